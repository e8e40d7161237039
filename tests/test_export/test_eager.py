"""Our eager decoder is the published one: same weights, same codes, same audio."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from official import official_decoder
from support import make_codes

torch = pytest.importorskip("torch")

from codecstream.cpus import usable_cpus  # noqa: E402
from codecstream_export import DecoderConfig, EagerDecoder  # noqa: E402
from codecstream_export.random_weights import TINY, random_decoder  # noqa: E402
from codecstream_parity import snr_db  # noqa: E402

LENGTHS = (1, 2, 71, 72, 73, 200)  # around the attention window of 72
MIN_DB = 120.0


class Pair:
    """Ours and the published decoder with the same weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self.ours = random_decoder(config)
        self.official = official_decoder(config)
        self.official.load_state_dict(self.ours.state_dict(), strict=True)

    def snr_db(self, frames: int, ours: EagerDecoder | None = None) -> float:
        codes = torch.from_numpy(make_codes(frames)).T[None]
        with torch.inference_mode():
            reference = self.official(codes)[0, 0].numpy()
            output = (ours or self.ours)(codes)[0].numpy()
        assert output.shape == (frames * 1920,)
        assert reference.std() > 0.01, "a silent reference agrees with anything"
        return snr_db(reference, output)


@pytest.fixture(scope="module")
def tiny() -> Pair:
    return Pair(TINY)


@pytest.fixture(scope="module")
def full() -> Iterator[Pair]:
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    yield Pair(DecoderConfig())
    torch.set_num_threads(before)


@pytest.mark.parametrize("frames", LENGTHS)
def test_tiny_decoder_equals_the_official_one(tiny: Pair, frames: int) -> None:
    assert tiny.snr_db(frames) >= MIN_DB


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("frames", LENGTHS)
def test_full_decoder_equals_the_official_one(full: Pair, frames: int) -> None:
    assert full.snr_db(frames) >= MIN_DB


def test_comparison_notices_a_wrong_epsilon(tiny: Pair) -> None:
    """A known port has 1e-5 in the ConvNeXt blocks, where the published decoder has 1e-6."""
    ours = random_decoder(TINY)
    for module in ours.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5
    assert tiny.snr_db(73, ours) < MIN_DB
