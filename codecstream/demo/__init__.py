"""A small decoder that really speaks, with three utterances as codes, in the package.

It has the real architecture at small widths and has *memorised* three short public-domain
readings: it says those and nothing else. It is here so that everything can be tried, tested and
measured without downloading a model. Its ``decoder_id`` is its own, so no talker's stream is
mistaken for its codes. ``scripts/train_demo_decoder.py`` in the repository makes it.

>>> from codecstream import demo
>>> [u.text for u in demo.utterances()][0]
'He was not an ill disposed young man.'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["DECODER_ID", "DemoUtterance", "artifact_dir", "checkpoint_dir", "utterances"]

DECODER_ID = "codecstream_demo_12hz"
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class DemoUtterance:
    """A memorised utterance: its name, its text, and codes int16 ``[frames, 16]``."""

    name: str
    text: str
    codes: NDArray[np.int16]


def utterances() -> list[DemoUtterance]:
    """Return the utterances that the demo decoder can say."""
    listed = json.loads((_HERE / "utterances.json").read_text(encoding="utf-8"))
    return [
        DemoUtterance(
            item["name"],
            item["text"],
            np.load(_HERE / item["codes"], allow_pickle=False).astype(np.int16),
        )
        for item in listed
    ]


def artifact_dir() -> Path:
    """Return the folder of the demo decoder's ONNX artifact."""
    return _HERE / "artifact"


def checkpoint_dir() -> Path:
    """Return the folder of the demo decoder's checkpoint, for the exporter."""
    return _HERE / "checkpoint"
