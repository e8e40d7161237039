"""What StreamDecoder makes of the tiny decoder's program is what the eager decoder makes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from support import SAMPLES, decode, eager_pcm, make_codes, worst_slice_db

from codecstream import InvalidCodesError, Program, Ramp, StreamDecoder
from codecstream_parity import snr_db

if TYPE_CHECKING:
    from codecstream_export import EagerDecoder

Pcm = NDArray[np.float32]
Codes = NDArray[np.int64]

MIN_SLICE_DB = 90.0
LENGTHS = (1, 2, *range(71, 75), *range(142, 147), *range(566, 571), 700)
# Frames before a place that its audio can depend on: 8 layers x 71, and the convolutions.
CONTEXT = 640

SECOND = 24_000  # samples
CODES = make_codes(1000)


def random_sizes(frames: int) -> list[int]:
    source = random.Random(frames)
    sizes: list[int] = []
    while sum(sizes) < frames:
        sizes.append(source.randint(1, 40))
    return sizes


# A schedule as long as the utterance is any partition of it.
PARTITIONS: dict[str, Callable[[int], list[int]]] = {
    "ones": lambda frames: [1],
    "ramp": lambda frames: [2, 4, 8, 16, 25],
    "25s": lambda frames: [25],
    "random": random_sizes,
    "one block": lambda frames: [frames],
}


@pytest.fixture(scope="module")
def reference(tiny_decoder: EagerDecoder) -> Pcm:
    """The eager decode of all CODES; it is causal, so its start is that of any shorter stream."""
    pcm = eager_pcm(tiny_decoder, CODES)
    start = eager_pcm(tiny_decoder, CODES[:73])
    assert worst_slice_db(start, pcm[: len(start)]) >= MIN_SLICE_DB + 10
    return pcm


@pytest.fixture(scope="module")
def plain(tiny_program: Program) -> Pcm:
    """What 120 frames in the default ramp become."""
    return decode(tiny_program, CODES[:120])


def exact(reference: Pcm, output: Pcm) -> bool:
    return worst_slice_db(reference[: len(output)], output) >= MIN_SLICE_DB


@pytest.mark.case(25)
@pytest.mark.parametrize("partition", ["ones", "ramp", "25s", "random"])
@pytest.mark.parametrize("frames", LENGTHS)
def test_stream_equals_one_pass(
    tiny_program: Program, reference: Pcm, partition: str, frames: int
) -> None:
    pcm = decode(tiny_program, CODES[:frames], schedule=PARTITIONS[partition](frames))
    assert len(pcm) == frames * SAMPLES
    assert exact(reference, pcm)


@pytest.mark.case(4)
@pytest.mark.case(12)
def test_every_short_length_is_exact(tiny_program: Program, reference: Pcm) -> None:
    for frames in range(1, 61):
        pcm = decode(tiny_program, CODES[:frames])
        assert len(pcm) == frames * SAMPLES
        assert exact(reference, pcm)


@pytest.mark.case(13)
def test_grouping_of_frames_does_not_matter(tiny_program: Program) -> None:
    decoded = [
        decode(tiny_program, CODES[:300], schedule=sizes(300)) for sizes in PARTITIONS.values()
    ]
    for i, one in enumerate(decoded):
        for other in decoded[:i]:
            assert worst_slice_db(one, other) >= MIN_SLICE_DB


def test_size_of_pushes_changes_no_bit(tiny_program: Program, plain: Pcm) -> None:
    for pushes in ([1] * 120, [120], [7] * 17 + [1], [0, 119, 0, 1]):
        assert np.array_equal(decode(tiny_program, CODES[:120], pushes=pushes), plain)


@pytest.mark.case(14)
def test_code_0_is_decoded_like_any_other(
    tiny_program: Program, tiny_decoder: EagerDecoder
) -> None:
    codes = make_codes(40)
    codes[[0, 20, 39]] = 0
    codes[10], codes[:, 0] = 1, np.where(np.arange(40) % 3, codes[:, 0], 0)
    assert exact(eager_pcm(tiny_decoder, codes), decode(tiny_program, codes))


@pytest.mark.case(16)
@pytest.mark.parametrize("frames", [2, 6, 14, 30, 55, 72, 73])
def test_the_onset_has_no_invented_history(
    tiny_program: Program, tiny_decoder: EagerDecoder, frames: int
) -> None:
    pcm = decode(tiny_program, CODES[:frames])[: 2 * SAMPLES]  # 160 ms
    reference = eager_pcm(tiny_decoder, CODES[:frames])[: 2 * SAMPLES]
    assert snr_db(reference, pcm) >= MIN_SLICE_DB
    assert worst_slice_db(reference, pcm) >= MIN_SLICE_DB


@pytest.mark.case(25)
@pytest.mark.parametrize("frames", [101, 250, 1000])
def test_the_last_second_of_a_long_text_is_there(
    tiny_program: Program, reference: Pcm, frames: int
) -> None:
    pcm = decode(tiny_program, CODES[:frames])
    assert len(pcm) == frames * SAMPLES
    assert snr_db(reference[len(pcm) - SECOND : len(pcm)], pcm[-SECOND:]) >= MIN_SLICE_DB


# Long streams


@dataclass
class Meter:
    """A program that notes what its inner one is asked and how large the state is."""

    inner: Program
    frames: list[int] = field(default_factory=list)
    state_bytes: set[int] = field(default_factory=set)
    rss_bytes: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, codes: Codes, state: Any) -> tuple[Pcm, Any]:
        self.frames.append(len(codes))
        self.state_bytes.add(sum(value.numpy().nbytes for value in state))
        self.rss_bytes.append(psutil.Process().memory_info().rss)
        return self.inner.step(codes, state)


@dataclass
class LongStream:
    """9,000 frames, twelve minutes; only some places of its audio are kept."""

    codes: Codes
    meter: Meter
    kept: dict[int, Pcm]  # 100 frames from each of these frames on
    samples: int


@pytest.fixture(scope="module")
def long_stream(tiny_program: Program) -> LongStream:
    codes = make_codes(9000)
    stream = LongStream(codes, Meter(tiny_program), {0: _none(), 7950: _none(), 8900: _none()}, 0)
    decoder = StreamDecoder(stream.meter, (25,))
    for start in range(0, len(codes), 25):
        for pcm in decoder.push(codes[start : start + 25]):
            for first, before in stream.kept.items():
                if first <= start < first + 100:
                    stream.kept[first] = np.append(before, pcm)
            stream.samples += len(pcm)
    assert list(decoder.finish()) == []
    return stream


def _none() -> Pcm:
    return np.empty(0, np.float32)


@pytest.mark.case(17)
def test_the_twelfth_minute_is_as_exact_as_the_first(
    long_stream: LongStream, tiny_decoder: EagerDecoder
) -> None:
    """Also across frame 8,000, where the published tables of positions end."""
    quality = {}
    for first, pcm in long_stream.kept.items():
        assert len(pcm) == 100 * SAMPLES
        start = max(0, first - CONTEXT)
        reference = eager_pcm(tiny_decoder, long_stream.codes[start : first + 100])
        quality[first] = snr_db(reference[-len(pcm) :], pcm)
        assert worst_slice_db(reference[-len(pcm) :], pcm) >= MIN_SLICE_DB
    assert min(quality.values()) >= quality[0] - 3.0


@pytest.mark.case(18)
def test_cost_and_memory_do_not_grow_with_length(long_stream: LongStream) -> None:
    meter = long_stream.meter
    assert long_stream.samples == 9000 * SAMPLES
    assert meter.frames == [25] * 360  # every frame is decoded once
    assert len(meter.state_bytes) == 1
    assert max(meter.rss_bytes) - meter.rss_bytes[30] < 20e6


# Reset and sharing


def aborted(decoder: StreamDecoder) -> None:
    next(decoder.push(make_codes(90, seed=5)))


def finished(frames: int) -> Callable[[StreamDecoder], None]:
    def use(decoder: StreamDecoder) -> None:
        list(decoder.push(make_codes(frames, seed=5)))
        list(decoder.finish())

    return use


@pytest.mark.case(19)
@pytest.mark.parametrize(
    "use",
    [
        finished(1),
        finished(72),
        finished(90),
        aborted,
        lambda decoder: decoder.push(make_codes(30)),
        lambda decoder: decoder.prime(make_codes(30)),
        lambda decoder: decoder.finish(),
    ],
    ids=["1 frame", "72 frames", "90 frames", "aborted", "untouched", "primed", "only finished"],
)
def test_reset_is_bit_for_bit_a_new_decoder(
    tiny_program: Program, plain: Pcm, use: Callable[[StreamDecoder], object]
) -> None:
    decoder = StreamDecoder(tiny_program)
    use(decoder)
    decoder.reset()
    assert (decoder.frames_pending, decoder.frames_decoded) == (0, 0)
    pcm = np.concatenate([*decoder.push(CODES[:120]), *decoder.finish()])
    assert np.array_equal(pcm, plain)


ROUNDS = 50


def in_rounds(program: Program, codes: Codes) -> Iterator[Pcm]:
    """Decode two frames per round."""
    decoder = StreamDecoder(program, (2,))
    for i in range(ROUNDS):
        yield from decoder.push(codes[2 * i : 2 * i + 2])


@pytest.mark.case(20)
@pytest.mark.parametrize("threads", [False, True], ids=["interleaved", "two threads"])
def test_two_streams_share_one_program(tiny_program: Program, threads: bool) -> None:
    codes = [make_codes(2 * ROUNDS, seed=seed) for seed in (1, 2)]
    alone = [list(in_rounds(tiny_program, c)) for c in codes]
    together: list[list[Pcm]] = [[], []]
    streams = [in_rounds(tiny_program, c) for c in codes]
    if threads:
        barrier = threading.Barrier(2, timeout=60)

        def work(index: int) -> None:
            for _ in range(ROUNDS):
                barrier.wait()
                together[index].append(next(streams[index]))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    else:
        for pair in zip(*streams, strict=True):
            for parts, pcm in zip(together, pair, strict=True):
                parts.append(pcm)
    for solo, shared in zip(alone, together, strict=True):
        assert np.array_equal(np.concatenate(solo), np.concatenate(shared))


# prime, input and output arrays


@pytest.mark.parametrize("frames", [1, 30, 100])
def test_priming_is_decoding_and_dropping(
    tiny_program: Program, reference: Pcm, frames: int
) -> None:
    decoder = StreamDecoder(tiny_program)
    decoder.prime(CODES[:frames])
    pcm = np.concatenate([*decoder.push(CODES[frames:150]), *decoder.finish()])
    assert len(pcm) == (150 - frames) * SAMPLES
    assert exact(reference[frames * SAMPLES :], pcm)
    cold = decode(tiny_program, CODES[frames:150])
    assert not exact(reference[frames * SAMPLES :], cold)


def read_only(codes: Codes) -> NDArray[Any]:
    return np.frombuffer(codes.astype("<i2").tobytes(), "<i2").reshape(codes.shape)


FORMS: dict[str, Callable[[Codes], Any]] = {
    **{name: lambda c, n=name: c.astype(n) for name in ("int16", "int32", "uint16", "uint64")},
    "big-endian": lambda c: c.astype(">i2"),
    "Fortran order": np.asfortranarray,
    "every second row": lambda c: np.repeat(c, 2, axis=0)[::2],
    "reversed twice": lambda c: c[::-1].copy()[::-1],
    "transposed view": lambda c: c.T.copy().T,
    "read-only": read_only,
    "list": lambda c: c.tolist(),
}


@pytest.mark.case(36)
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_codes_changes_no_bit(tiny_program: Program, plain: Pcm, form: str) -> None:
    codes = FORMS[form](CODES[:120])
    decoder = StreamDecoder(tiny_program)
    pcm = np.concatenate([*decoder.push(codes), *decoder.finish()])
    assert np.array_equal(pcm, plain)


@pytest.mark.case(36)
def test_codes_with_the_codebooks_first_are_refused(tiny_program: Program) -> None:
    with pytest.raises(InvalidCodesError, match=r"shape \[frames, 16\], not \[16, 20\]"):
        StreamDecoder(tiny_program).push(CODES[:20].T)


def test_audio_that_was_handed_out_belongs_to_the_caller(tiny_program: Program, plain: Pcm) -> None:
    decoder = StreamDecoder(tiny_program)
    chunks = decoder.push(CODES[:120])
    parts: list[Pcm] = []
    copies: list[Pcm] = []
    for pcm in chunks:
        assert pcm.dtype == np.float32 and pcm.ndim == 1 and pcm.flags.writeable
        assert not any(np.shares_memory(pcm, part) for part in parts)
        copies.append(pcm.copy())
        parts.append(pcm)
        if len(parts) == 2:
            pcm[:] = 9.0  # must not reach the decoder's state
    parts += list(decoder.finish())
    for part, copy in zip(parts[2:], copies[2:], strict=False):
        assert np.array_equal(part, copy)
    copies.append(parts[-1])
    assert np.array_equal(np.concatenate(copies), plain)


def test_order_of_sizes_within_one_process_does_not_matter(
    tiny_program: Program, reference: Pcm
) -> None:
    sizes = list(range(1, 26))
    for order in (sizes, sizes[::-1], random.Random(0).sample(sizes, len(sizes))):
        pcm = decode(tiny_program, CODES[: sum(sizes)], schedule=Ramp(tuple(order)).sizes)
        assert exact(reference, pcm)
