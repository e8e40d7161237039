"""The step module is the eager decoder in pieces; the check that says so notices every mistake.

Each mutant is a way in which such a decoder has been got wrong. It runs through the same check
as the good module and must be rejected by it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, make_codes, worst_slice_db

torch = pytest.importorskip("torch")

from codecstream import Ramp  # noqa: E402
from codecstream_export import EagerDecoder, StepDecoder, step, step_layers  # noqa: E402
from codecstream_export.random_weights import TINY, random_decoder  # noqa: E402
from codecstream_export.reference import eager_pcm  # noqa: E402
from codecstream_export.step import decode_in_chunks  # noqa: E402

MIN_SLICE_DB = 90.0
FRAMES = 170  # two attention windows of 72 frames and a part of the third
CODES = make_codes(FRAMES)
SIZES = tuple(Ramp().split(FRAMES))
WINDOW = 72


@pytest.fixture(scope="module")
def reference(tiny_decoder: EagerDecoder) -> NDArray[np.float32]:
    return eager_pcm(tiny_decoder, CODES)


@pytest.fixture(scope="module")
def good(tiny_decoder: EagerDecoder) -> StepDecoder:
    return StepDecoder(tiny_decoder)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def run(
    module: StepDecoder,
    sizes: Sequence[int] = SIZES,
    state: Sequence[torch.Tensor] | None = None,
    codes: NDArray[np.int64] = CODES,
) -> NDArray[np.float32]:
    return decode_in_chunks(module, torch.from_numpy(codes[: sum(sizes)]), sizes, state).numpy()


def check(reference: NDArray[np.float32], output: NDArray[np.float32]) -> None:
    """The exactness check: at least 90 dB in every 80 ms slice."""
    worst = worst_slice_db(reference[: len(output)], output)
    assert worst >= MIN_SLICE_DB, f"worst slice {worst:.1f} dB"


def assert_rejected(reference: NDArray[np.float32], output: NDArray[np.float32]) -> None:
    with pytest.raises(AssertionError, match="worst slice"):
        check(reference, output)


@pytest.mark.parametrize(
    "sizes",
    [SIZES, (1,) * FRAMES, (FRAMES,), (25,) * 6 + (20,), (71, 1, 72, 26), (73, 2, 94), (144, 26)],
    ids=lambda sizes: f"{len(sizes)} chunks from {sizes[0]}",
)
def test_chunks_equal_one_pass(
    good: StepDecoder, reference: NDArray[np.float32], sizes: tuple[int, ...]
) -> None:
    check(reference, run(good, sizes))


@pytest.mark.case(30)
@pytest.mark.parametrize("frames", [1, 2, 71, 72, 73])
def test_folding_changes_nothing(
    good: StepDecoder, reference: NDArray[np.float32], frames: int
) -> None:
    output = run(good, (frames,))
    np.testing.assert_allclose(output, reference[: len(output)], rtol=0, atol=3e-6)


@pytest.mark.case(30)
def test_folded_constants_equal_what_the_eager_decoder_computes(
    good: StepDecoder, tiny_decoder: EagerDecoder
) -> None:
    books = [
        level._codebook.table()
        for part in (tiny_decoder.quantizer.rvq_first, tiny_decoder.quantizer.rvq_rest)
        for level in part.vq.layers
    ]
    torch.testing.assert_close(good.quantizer.table, torch.cat(books), rtol=1e-6, atol=1e-6)
    snake = tiny_decoder.decoder[-2]
    x = torch.randn(1, good.snake.frequency.shape[1], 50)
    torch.testing.assert_close(good.snake(x), snake(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, -3.0, -6.0])  # gains of 1, 20, and 400: too large to fold
def test_snake_between_two_convolutions(tiny_decoder: EagerDecoder, beta: float) -> None:
    unit = copy.deepcopy(tiny_decoder.decoder[2].block[2])
    unit.act2.beta.fill_(beta)
    unit.act2.alpha.uniform_(-1, 1)
    x = torch.randn(1, unit.conv1.conv.in_channels, 60)
    folded = step.StepResidualUnit(unit, "unit")
    assert isinstance(
        folded.act2, step_layers.StepSnake if beta == -6.0 else step_layers.StepInnerSnake
    )
    for _ in range(3):  # as it is; then with a scale, as int8 shares its grid; then with another
        state = {item.name: torch.zeros(item.shape) for item in folded.conv1.state}
        output, expected = folded(x, step_layers.StateCursor(state)), unit(x)
        atol = 2e-6 * float(expected.abs().max())
        torch.testing.assert_close(output, expected, rtol=0, atol=atol)
        scale = torch.rand(x.shape[1]) + 0.5
        folded.conv1.scale_rows(scale)
        folded.act2.scale(scale)
        folded.conv2.scale_columns(1 / scale)


TILES = [step.MEMORY_TILES, (2, 1, 1, 1), (1, 3, 1, 7), (4, 1, 2, 1)]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tiles_change_nothing(
    tiny_decoder: EagerDecoder, reference: NDArray[np.float32], tiles: tuple[int, ...]
) -> None:
    tiled = StepDecoder(tiny_decoder)
    tiled.tiles = tiles
    for sizes in (SIZES, (1,) * 20, (3, 50, 72)):
        check(reference, run(tiled, sizes))


def test_mutant_tiles_that_forget_each_other(
    tiny_decoder: EagerDecoder, reference: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    join = step_layers.StateCursor._join

    def forgetful(
        self: step_layers.StateCursor, item: step_layers.StateTensor, x: torch.Tensor, dim: int
    ) -> torch.Tensor:
        self.new.pop(item.name, None)
        return join(self, item, x, dim)

    monkeypatch.setattr(step_layers.StateCursor, "_join", forgetful)
    tiled = StepDecoder(tiny_decoder)
    check(reference, run(tiled))
    tiled.tiles = step.MEMORY_TILES
    assert_rejected(reference, run(tiled))


def test_state_is_named_shaped_and_zero_at_the_start(good: StepDecoder) -> None:
    names = [item.name for item in good.state]
    assert len(set(names)) == len(names)
    state = good.initial_state()
    assert [tuple(t.shape) for t in state] == [item.shape for item in good.state]
    assert all(t.dtype == torch.float32 and not t.any() for t in state)
    layers = good.config.num_hidden_layers
    assert sum("keys" in n or "values" in n for n in names) == 2 * layers


@pytest.mark.parametrize("frames", [1, 5, 80])
def test_a_step_keeps_the_shape_of_its_state_and_leaves_its_input_alone(
    good: StepDecoder, frames: int
) -> None:
    state = good.initial_state()
    pcm, *after = good(torch.from_numpy(CODES[:frames]).T[None], *state)
    assert pcm.shape == (frames * SAMPLES,)
    assert float(pcm.abs().max()) <= 1.0
    assert [t.shape for t in after] == [t.shape for t in state]
    assert not any(t.any() for t in state)


@pytest.mark.parametrize("frame", [0, 1, 71, 72, 100, FRAMES - 1])
def test_a_frame_never_changes_the_audio_before_it(
    good: StepDecoder, reference: NDArray[np.float32], tiny_decoder: EagerDecoder, frame: int
) -> None:
    changed = CODES.copy()
    changed[frame] = (changed[frame] + 1000) % 2048
    before, here = slice(0, frame * SAMPLES), slice(frame * SAMPLES, (frame + 1) * SAMPLES)
    for plain, other in (
        (reference, eager_pcm(tiny_decoder, changed)),
        (run(good), run(good, codes=changed)),
    ):
        assert np.array_equal(plain[before], other[before])
        assert not np.array_equal(plain[here], other[here])


def test_chunk_sizes_must_cover_the_codes(good: StepDecoder) -> None:
    with pytest.raises(ValueError, match="add up to 3 frames, not 4"):
        decode_in_chunks(good, torch.from_numpy(CODES[:4]), (2, 1))


# Mutants


def with_window(decoder: EagerDecoder, window: int) -> StepDecoder:
    source = copy.copy(decoder)
    source.config = dataclasses.replace(decoder.config, sliding_window=window)
    return StepDecoder(source)


@pytest.mark.parametrize("window", [71, 72, 73])
def test_mutant_another_attention_window(
    tiny_decoder: EagerDecoder, reference: NDArray[np.float32], window: int
) -> None:
    output = run(with_window(tiny_decoder, window))
    if window == WINDOW:  # the way in which the mutants are made is sound
        check(reference, output)
    else:
        assert_rejected(reference, output)


Damage = Callable[[torch.Tensor, int], torch.Tensor]


def forget(history: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros_like(history)


def forget_oldest(history: torch.Tensor, dim: int) -> torch.Tensor:
    history = history.clone()
    history.narrow(dim, 0, 1).zero_()
    return history


def shift(history: torch.Tensor, dim: int) -> torch.Tensor:
    return history.roll(1, dim)


NAMES = [item.name for item in StepDecoder(random_decoder(TINY)).state]
CONVOLUTIONS = [n for n in NAMES if not n.startswith(("transformer.", "frames_valid"))]
DAMAGES: list[tuple[str, Damage]] = [
    *((name, forget) for name in NAMES),
    *((name, damage) for name in CONVOLUTIONS for damage in (forget_oldest, shift)),
]


@pytest.mark.parametrize(
    ("name", "damage"),
    [d for d in DAMAGES if not (d[0].endswith("upsample") and d[1] is shift)],  # one column
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_mutant_one_history_is_damaged_between_chunks(
    good: StepDecoder,
    reference: NDArray[np.float32],
    name: str,
    damage: Damage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join = step_layers.StateCursor._join

    def damaged(
        self: step_layers.StateCursor, item: step_layers.StateTensor, x: torch.Tensor, dim: int
    ) -> torch.Tensor:
        joined = join(self, item, x, dim)
        if item.name == name:
            self.new[name] = damage(self.new[name], dim)
        return joined

    monkeypatch.setattr(step_layers.StateCursor, "_join", damaged)
    assert_rejected(reference, run(good, Ramp().split(90)))


def test_mutant_no_state_is_carried(good: StepDecoder, reference: NDArray[np.float32]) -> None:
    starts = np.cumsum((0, *SIZES[:-1]))
    parts = [run(good, (n,), codes=CODES[i:]) for i, n in zip(starts, SIZES, strict=True)]
    assert_rejected(reference, np.concatenate(parts))


@pytest.mark.case(16)
def test_mutant_zeros_as_history_instead_of_the_mask(
    good: StepDecoder, reference: NDArray[np.float32]
) -> None:
    state = good.initial_state()
    state[NAMES.index("frames_valid")].fill_(1.0)
    assert_rejected(reference, run(good, state=state))


@pytest.mark.case(16)
def test_mutant_code_0_as_history(good: StepDecoder, reference: NDArray[np.float32]) -> None:
    padding = torch.zeros(1, good.config.num_quantizers, WINDOW, dtype=torch.int64)
    _, *state = good(padding, *good.initial_state())
    assert_rejected(reference, run(good, state=state))


class AbsolutePositions(step.StepRotary):
    """Rotates with positions counted from the stream's start; optionally caps the queries'."""

    def __init__(self, module: StepDecoder, cap: int | None) -> None:
        super().__init__(module.config.head_dim, module.config.rope_theta)
        self.cap = cap
        self.start = 0

    def forward(self, positions: torch.Tensor, kept: int) -> step.Rotary:
        keys = positions + self.start
        queries = keys[kept:] if self.cap is None else keys[kept:].clamp(max=self.cap)
        self.start += len(queries)
        keyed, asked = super().forward(keys, 0), super().forward(queries, 0)
        return step.Rotary(keyed.cos, keyed.sin, asked.cos, asked.sin, self.swap)


@pytest.mark.parametrize("cap", [None, WINDOW - 1])
def test_mutant_queries_capped_at_the_window_while_keys_keep_their_positions(
    tiny_decoder: EagerDecoder,
    reference: NDArray[np.float32],
    cap: int | None,
) -> None:
    module = StepDecoder(tiny_decoder)
    module.transformer.rotary = AbsolutePositions(module, cap)
    output = run(module)
    if cap is None:  # absolute positions alone are right, so it is the cap that fails
        check(reference, output)
    else:
        assert_rejected(reference, output)
