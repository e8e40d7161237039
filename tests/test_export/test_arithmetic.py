"""How much arithmetic a frame takes."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

from codecstream_export import DecoderConfig
from codecstream_export.arithmetic import flop_per_frame
from codecstream_export.random_weights import TINY


def test_the_published_size_takes_62_gflop_per_second() -> None:
    assert flop_per_frame(DecoderConfig()) * 12.5 == pytest.approx(62.0e9, rel=0.01)


def test_a_layer_by_hand() -> None:
    """What one more transformer layer adds at the tiny size, per frame.

    Projections: q and o of 32 x 32, k and v of 32 x 16, two each way; MLP: three of 32 x 48;
    attention: one more row and column of scores over 72 frames, whole as the eager decoder has it.
    """
    more = dataclasses.replace(TINY, num_hidden_layers=TINY.num_hidden_layers + 1)
    products = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    attention = 2 * 2 * 32 * (73**2 - 72**2)
    assert flop_per_frame(more) - flop_per_frame(TINY) == products + attention
