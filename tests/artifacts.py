"""The tiny decoder's artifacts, and what the eager decoder makes of some codes: made once.

Making them needs torch and minutes. The folder that the environment variable
CODECSTREAM_TEST_ARTIFACTS names is filled by the first run of the tests that has torch; later ones
use what is there, also under a Python without torch. It holds what the exporter of that day wrote:
give every change of the exporter a new one. Without the variable a folder lasts one session.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray
from support import make_codes

from codecstream import MissingDependencyError
from codecstream.locks import try_lock

if TYPE_CHECKING:
    from codecstream_export import EagerDecoder

FOLDER_VARIABLE = "CODECSTREAM_TEST_ARTIFACTS"

CONTEXT = 72  # of windowed artifacts
REACH = 640  # frames that the audio of a frame can depend on: 8 layers x 71, and convolutions
LONG_FRAMES = 8200
LONG_PLACES = (0, 7950, LONG_FRAMES - 100)  # 100 frames from each of these on are compared


@dataclass(frozen=True)
class Recipe:
    """How an artifact is made."""

    runtime: str
    mode: str = "stateful"
    ramp: tuple[int, ...] = (2, 4, 8, 16, 25)
    layers: int = 8


RECIPES = {
    "onnx": Recipe("onnx"),
    "executorch": Recipe("executorch"),
    "torch_export": Recipe("torch_export"),
    "onnx windowed": Recipe("onnx", "windowed", (2, 5, 25)),
    # Lowering costs by layer; for two of them a window of 72 sees nearly all there is.
    "executorch windowed": Recipe("executorch", "windowed", (2, 25), layers=2),
    "torch_export windowed": Recipe("torch_export", "windowed", (2, 25), layers=2),
}


@dataclass(frozen=True)
class Reference:
    """Codes, int64 ``[frames, 16]``, and what the eager decoder makes of them."""

    codes: NDArray[np.int64]
    pcm: NDArray[np.float32]


def window_chunks() -> list[int]:
    """Return the sizes of chunks that windowed programs are compared in: a start, then all."""
    return [2, 2, 5, *random.Random(0).sample(range(1, 26), 25)]


def _whole(decoder: EagerDecoder) -> Reference:
    from codecstream_export.reference import eager_pcm

    codes = make_codes(1000)
    return Reference(codes, eager_pcm(decoder, codes))


def _zeros(decoder: EagerDecoder) -> Reference:
    from codecstream_export.reference import eager_pcm

    codes = make_codes(40)
    codes[[0, 20, 39]] = 0
    codes[10], codes[:, 0] = 1, np.where(np.arange(40) % 3, codes[:, 0], 0)
    return Reference(codes, eager_pcm(decoder, codes))


def _long(decoder: EagerDecoder) -> Reference:
    from codecstream_export.reference import eager_pcm

    codes = make_codes(LONG_FRAMES)
    parts = []
    for first in LONG_PLACES:
        pcm = eager_pcm(decoder, codes[max(0, first - REACH) : first + 100])
        parts.append(pcm[-100 * 1920 :])
    return Reference(codes, np.concatenate(parts))


def _windows(decoder: EagerDecoder) -> Reference:
    from codecstream_export.reference import eager_pcm, window_pcm

    codes = make_codes(sum(window_chunks()))
    decode = functools.partial(eager_pcm, decoder)
    parts = window_pcm(decode, codes, window_chunks(), CONTEXT)
    return Reference(codes, np.concatenate(list(parts)))


REFERENCES: dict[str, Callable[[EagerDecoder], Reference]] = {
    "whole": _whole,
    "zeros": _zeros,
    "long": _long,
    "windows": _windows,
}


class Store:
    """A folder of artifacts and references, each made when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._decoders: dict[int, EagerDecoder] = {}

    def artifact(self, name: str) -> Path:
        """Return the folder of an artifact; tests must not write into it."""
        with self._alone(name):
            return self._artifact(name)

    def _artifact(self, name: str) -> Path:
        recipe = RECIPES[name]
        folder = self.folder / name.replace(" ", "-")
        if not (folder / "manifest.json").is_file():
            if importlib.util.find_spec("torch") is None:
                skip_or_fail(
                    recipe.runtime, f"{folder.name} is not there, and making it needs torch"
                )
            checkpoint = self.checkpoint(recipe.layers)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # tools say things when they are first imported
                    from codecstream_export import export_artifact

                    export_artifact(
                        checkpoint,
                        folder,
                        runtime=recipe.runtime,
                        mode=recipe.mode,
                        ramp=recipe.ramp,
                    )
            except MissingDependencyError as error:
                skip_or_fail(recipe.runtime, f"its artifact cannot be made here: {error}")
        return folder

    def checkpoint(self, layers: int = 8) -> Path:
        """Return the folder of the tiny decoder's checkpoint."""
        folder = self.folder / f"checkpoint-{layers}" / "speech_tokenizer"
        with self._alone(f"checkpoint-{layers}"):
            if not folder.is_dir():
                decoder = self.decoder(layers)
                from codecstream_export import save_checkpoint

                part = folder.with_name(f"{os.getpid()}")
                save_checkpoint(part, decoder)
                part.rename(folder)
        return folder

    def decoder(self, layers: int = 8) -> EagerDecoder:
        """Return the eager decoder: the architecture at small widths, seeded random weights."""
        if layers not in self._decoders:
            pytest.importorskip("torch", reason="the exporter needs torch: pip install '.[export]'")
            from codecstream_export.random_weights import TINY, random_decoder

            config = dataclasses.replace(TINY, num_hidden_layers=layers)
            self._decoders[layers] = random_decoder(config)
        return self._decoders[layers]

    def reference(self, name: str, layers: int = 8) -> Reference:
        """Return a reference by its name in REFERENCES."""
        paths = [self.folder / f"{name}-{layers}.{part}.npy" for part in ("codes", "pcm")]
        with self._alone(f"{name}-{layers}"):
            if not paths[1].is_file():  # the last that is written
                made = REFERENCES[name](self.decoder(layers))
                for path, array in zip(paths, (made.codes, made.pcm), strict=True):
                    part = path.with_suffix(f".{os.getpid()}.npy")
                    np.save(part, array)
                    part.replace(path)
        codes, pcm = (np.load(path) for path in paths)
        return Reference(codes, pcm)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Wait until no other process makes what is called ``name``."""
        with (self.folder / f".{name}.lock").open("ab") as file:
            while not try_lock(file):
                time.sleep(0.1)
            yield


def skip_or_fail(runtime: str, reason: str) -> None:
    """Skip a test for want of ``runtime``, or fail it where the runtime must be there."""
    if runtime in os.environ.get("CODECSTREAM_REQUIRE_RUNTIMES", "").split():
        pytest.fail(reason)
    pytest.skip(reason)
