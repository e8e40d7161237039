"""What every runtime's program must do, through StreamDecoder: the eager decoder's audio, exactly.

A runtime that is not installed is skipped. References come from the store, so that all of this
also runs without torch; see ``artifacts.py``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
from artifacts import LONG_FRAMES, LONG_PLACES, Reference, Store
from numpy.typing import NDArray
from support import SAMPLES, decode, make_codes, worst_slice_db

from codecstream import InvalidCodesError, Program, StreamDecoder
from codecstream_parity import snr_db

Pcm = NDArray[np.float32]
Codes = NDArray[np.int64]

MIN_SLICE_DB = 90.0
LENGTHS = (1, 2, *range(71, 75), *range(142, 147), *range(566, 571), 700)
SECOND = 24_000  # samples
CODES = make_codes(1000)

# Where the runtimes differ: the largest chunk, or None for any.
MAX_FRAMES: dict[str, int | None] = {"onnx": None, "executorch": 25, "torch_export": None}


def random_sizes(frames: int, largest: int) -> list[int]:
    source = random.Random(frames)
    sizes: list[int] = []
    while sum(sizes) < frames:
        sizes.append(source.randint(1, largest))
    return sizes


# A schedule as long as the utterance is any partition of it.
PARTITIONS: dict[str, Callable[[int, int], list[int]]] = {
    "ones": lambda frames, largest: [1],
    "ramp": lambda frames, largest: [2, 4, 8, 16, 25],
    "25s": lambda frames, largest: [25],
    "random": random_sizes,
    "one block": lambda frames, largest: [min(frames, largest)],
}


@pytest.fixture(scope="module")
def whole(store: Store) -> Reference:
    """The eager decode of CODES; it is causal, so its start is that of any shorter stream."""
    reference = store.reference("whole")
    assert np.array_equal(reference.codes, CODES)
    return reference


@pytest.fixture(scope="module")
def plain(program: Program) -> Pcm:
    """What 120 frames in the default ramp become."""
    return decode(program, CODES[:120])


def exact(reference: Pcm, output: Pcm) -> bool:
    return worst_slice_db(reference[: len(output)], output) >= MIN_SLICE_DB


def test_the_largest_chunk_is_what_the_manifest_says(runtime: str, program: Program) -> None:
    assert program.max_frames == MAX_FRAMES[runtime]
    assert program.decoder_id == "qwen3_tts_tokenizer_v2_12hz"
    assert program.geometry.samples_per_frame == SAMPLES


# Exactness


# In ones, 566 frames are the beginning of 700.
GRID = [
    (frames, partition)
    for frames in LENGTHS
    for partition in ("ones", "ramp", "25s", "random")
    if partition != "ones" or not 150 < frames < 700
]


@pytest.mark.case(25)
@pytest.mark.parametrize(("frames", "partition"), GRID)
def test_stream_equals_one_pass(
    program: Program, whole: Reference, partition: str, frames: int
) -> None:
    sizes = PARTITIONS[partition](frames, program.max_frames or 40)
    pcm = decode(program, CODES[:frames], schedule=sizes)
    assert len(pcm) == frames * SAMPLES
    assert exact(whole.pcm, pcm)


@pytest.mark.case(4)
@pytest.mark.case(12)
def test_every_short_length_is_exact(program: Program, whole: Reference) -> None:
    for frames in range(1, 61):
        pcm = decode(program, CODES[:frames])
        assert len(pcm) == frames * SAMPLES
        assert exact(whole.pcm, pcm)


@pytest.mark.case(24)
@pytest.mark.case(39)
def test_every_chunk_size_in_any_order_within_one_process(
    runtime: str, program: Program, whole: Reference
) -> None:
    """A runtime that plans for its largest size must be right below it too."""
    sizes = list(range(1, (MAX_FRAMES[runtime] or 32) + 1))
    for order in (sizes, sizes[::-1], random.Random(0).sample(sizes, len(sizes))):
        state = program.initial_state()
        parts, start = [], 0
        for size in order:
            pcm, state = program.step(CODES[start : start + size], state)
            assert pcm.shape == (size * SAMPLES,)
            parts.append(pcm)
            start += size
        assert exact(whole.pcm, np.concatenate(parts))


@pytest.mark.case(13)
def test_grouping_of_frames_does_not_matter(program: Program) -> None:
    largest = program.max_frames or 300
    decoded = [
        decode(program, CODES[:300], schedule=sizes(300, largest)) for sizes in PARTITIONS.values()
    ]
    for i, one in enumerate(decoded):
        for other in decoded[:i]:
            assert worst_slice_db(one, other) >= MIN_SLICE_DB


def test_size_of_pushes_changes_no_bit(program: Program, plain: Pcm) -> None:
    for pushes in ([1] * 120, [120], [7] * 17 + [1], [0, 119, 0, 1]):
        assert np.array_equal(decode(program, CODES[:120], pushes=pushes), plain)


@pytest.mark.case(14)
def test_code_0_is_decoded_like_any_other(program: Program, store: Store) -> None:
    reference = store.reference("zeros")
    assert (reference.codes[[0, 20, 39]] == 0).all()
    assert exact(reference.pcm, decode(program, reference.codes))


@pytest.mark.case(16)
@pytest.mark.parametrize("frames", [2, 6, 14, 30, 55, 72, 73])
def test_the_onset_has_no_invented_history(program: Program, whole: Reference, frames: int) -> None:
    onset = slice(0, 2 * SAMPLES)  # 160 ms
    pcm = decode(program, CODES[:frames])[onset]
    assert snr_db(whole.pcm[onset], pcm) >= MIN_SLICE_DB
    assert exact(whole.pcm, pcm)


@pytest.mark.case(25)
@pytest.mark.parametrize("frames", [101, 250, 1000])
def test_the_last_second_of_a_long_text_is_there(
    program: Program, whole: Reference, frames: int
) -> None:
    pcm = decode(program, CODES[:frames])
    assert len(pcm) == frames * SAMPLES
    assert snr_db(whole.pcm[len(pcm) - SECOND : len(pcm)], pcm[-SECOND:]) >= MIN_SLICE_DB


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
        self.state_bytes.add(sum(as_numpy(value).nbytes for value in state))
        self.rss_bytes.append(psutil.Process().memory_info().rss)
        return self.inner.step(codes, state)


@dataclass
class LongStream:
    """Eleven minutes; only some places of its audio are kept."""

    meter: Meter
    kept: dict[int, Pcm]  # 100 frames from each of these frames on
    samples: int


@pytest.fixture(scope="module")
def long_stream(program: Program, store: Store) -> LongStream:
    codes = store.reference("long").codes
    stream = LongStream(Meter(program), {}, 0)
    parts: dict[int, list[Pcm]] = {first: [] for first in LONG_PLACES}
    decoder = StreamDecoder(stream.meter, (25,))
    for start in range(0, len(codes), 25):
        for pcm in decoder.push(codes[start : start + 25]):
            for first in parts:
                if first <= start < first + 100:
                    parts[first].append(pcm)
            stream.samples += len(pcm)
    assert list(decoder.finish()) == []
    stream.kept = {first: np.concatenate(pcm) for first, pcm in parts.items()}
    return stream


@pytest.mark.slow
@pytest.mark.case(17)
def test_the_eleventh_minute_is_as_exact_as_the_first(
    long_stream: LongStream, store: Store
) -> None:
    """Also across frame 8,000, where the published tables of positions end."""
    references = np.split(store.reference("long").pcm, len(LONG_PLACES))
    quality = {}
    for (first, pcm), reference in zip(long_stream.kept.items(), references, strict=True):
        quality[first] = snr_db(reference, pcm)
        assert worst_slice_db(reference, pcm) >= MIN_SLICE_DB
    assert min(quality.values()) >= quality[0] - 3.0


@pytest.mark.slow
@pytest.mark.case(18)
def test_cost_and_memory_do_not_grow_with_length(long_stream: LongStream) -> None:
    meter = long_stream.meter
    assert long_stream.samples == LONG_FRAMES * SAMPLES
    assert meter.frames == [25] * (LONG_FRAMES // 25)  # every frame is decoded once
    assert len(meter.state_bytes) == 1
    settled = meter.rss_bytes[30:]  # before, the process may still give back what loading took
    assert max(settled) - settled[0] < 20e6


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
    program: Program, plain: Pcm, use: Callable[[StreamDecoder], object]
) -> None:
    decoder = StreamDecoder(program)
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
def test_two_streams_share_one_program(program: Program, threads: bool) -> None:
    codes = [make_codes(2 * ROUNDS, seed=seed) for seed in (1, 2)]
    alone = [list(in_rounds(program, c)) for c in codes]
    together: list[list[Pcm]] = [[], []]
    streams = [in_rounds(program, c) for c in codes]
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
def test_priming_is_decoding_and_dropping(program: Program, whole: Reference, frames: int) -> None:
    decoder = StreamDecoder(program)
    decoder.prime(CODES[:frames])
    pcm = np.concatenate([*decoder.push(CODES[frames:150]), *decoder.finish()])
    assert len(pcm) == (150 - frames) * SAMPLES
    assert exact(whole.pcm[frames * SAMPLES :], pcm)
    cold = decode(program, CODES[frames:150])
    assert not exact(whole.pcm[frames * SAMPLES :], cold)


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
def test_the_form_of_the_codes_changes_no_bit(program: Program, plain: Pcm, form: str) -> None:
    codes = FORMS[form](CODES[:120])
    decoder = StreamDecoder(program)
    pcm = np.concatenate([*decoder.push(codes), *decoder.finish()])
    assert np.array_equal(pcm, plain)


@pytest.mark.case(36)
def test_codes_with_the_codebooks_first_are_refused(program: Program) -> None:
    with pytest.raises(InvalidCodesError, match=r"shape \[frames, 16\], not \[16, 20\]"):
        StreamDecoder(program).push(CODES[:20].T)


def test_audio_that_was_handed_out_belongs_to_the_caller(program: Program, plain: Pcm) -> None:
    decoder = StreamDecoder(program)
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


def as_numpy(value: Any) -> NDArray[Any]:
    """Return a state tensor of any runtime."""
    array: NDArray[Any] = value if isinstance(value, np.ndarray) else value.numpy()
    return array
