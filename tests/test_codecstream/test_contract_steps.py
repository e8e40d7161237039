"""What every runtime's ``step`` must do: refuse before native code, and keep its hands off memory.

A native call that was made is counted at the place where the runtime's own code begins.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, make_codes

from codecstream import DecoderError, InvalidCodesError, OutputError, Program, StreamDecoder

Array = NDArray[Any]

CODES = make_codes(60)

# Attributes on the way from a program to the runtime's own object.
NATIVE: dict[str, tuple[str, ...]] = {
    "onnx": ("_session",),
    "executorch": ("_method", "_call"),
    "torch_export": ("_module",),
}


class Native:
    """A runtime's own object; counts calls of it, or of its methods, and lets some fail."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0
        self.failures = 0  # how many calls from now on fail, after all their work is done

    def __call__(self, *arguments: Any) -> Any:
        return self._run(self.inner, *arguments)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._run(getattr(self.inner, name), *arguments)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        result = function(*arguments)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory\nat line 300 of kernel.cc")
        return result


@pytest.fixture
def native(runtime: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> Native:
    owner: Any = program
    *path, last = NATIVE[runtime]
    for name in path:
        owner = getattr(owner, name)
    stub = Native(getattr(owner, last))
    monkeypatch.setattr(owner, last, stub)
    program.step(CODES[:2], program.initial_state())
    assert stub.calls == 1
    stub.calls = 0
    return stub


def as_numpy(value: Any) -> Array:
    """Return a state tensor of any runtime."""
    array: Array = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def snapshot(state: Any) -> list[Array]:
    return [as_numpy(value).copy() for value in state]


def equal(one: list[Array], other: list[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Refused before native code


@pytest.mark.case(7)
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
@pytest.mark.parametrize("codebook", [0, 15])
def test_bad_ids_reach_no_runtime(
    program: Program, native: Native, value: int, codebook: int
) -> None:
    codes = CODES[:30].astype(np.int32)
    codes[7, codebook] = value
    decoder = StreamDecoder(program, (10,))
    good = list(decoder.push(CODES[:10]))
    calls = native.calls
    with pytest.raises(InvalidCodesError) as caught:
        decoder.push(codes)
    error = caught.value
    assert (error.frame, error.codebook, error.value) == (7, codebook, value)
    assert f"frame 7, codebook {codebook}: id {value}" in str(error)
    with pytest.raises(InvalidCodesError):
        decoder.prime(codes) if decoder.frames_decoded == 0 else StreamDecoder(program).prime(codes)
    assert native.calls == calls
    # The stream goes on as if nothing had been pushed.
    after = list(decoder.push(CODES[10:20]))
    other = StreamDecoder(program, (10,))
    assert equal([*good, *after], list(other.push(CODES[:20])))


WRONG: dict[str, Callable[[], Array]] = {
    "axes swapped": lambda: CODES[:5].T.copy(),
    "axes swapped, the same count": lambda: CODES[:20].reshape(16, 20),
    "batched": lambda: CODES[:5].T[None].copy(),
    "batch of 2": lambda: CODES[:10].reshape(2, 5, 16),
    "one codebook more": lambda: np.zeros((16, 17), np.int64),
    "flat": lambda: CODES[:5].ravel(),
    "no frames": lambda: CODES[:0],
    "int32": lambda: CODES[:5].astype(np.int32),
    "int16": lambda: CODES[:5].astype(np.int16),
    "float32": lambda: CODES[:5].astype(np.float32),
    "uint64": lambda: CODES[:5].astype(np.uint64),
    "other byte order": lambda: CODES[:5].astype(">i8"),
}


@pytest.mark.case(36)
@pytest.mark.case(38)
@pytest.mark.parametrize("wrong", WRONG)
def test_codes_of_a_wrong_form_reach_no_runtime(
    program: Program, native: Native, wrong: str
) -> None:
    codes = WRONG[wrong]()
    with pytest.raises(InvalidCodesError) as caught:
        program.step(codes, program.initial_state())
    assert native.calls == 0
    message = str(caught.value)
    if wrong == "no frames":
        assert "not 0" in message
    else:
        assert "codes int64 [frames, 16]" in message and str(list(codes.shape)) in message


@pytest.mark.case(38)
def test_the_bound_is_named_before_native_code_sees_more(
    runtime: str, program: Program, native: Native
) -> None:
    if program.max_frames is None:
        pytest.skip(f"{runtime} programs have no bound")
    bound = program.max_frames
    program.step(CODES[:bound], program.initial_state())
    assert native.calls == 1
    for frames in (bound + 1, 2 * bound):
        with pytest.raises(InvalidCodesError, match=f"takes 1 to {bound} frames, not {frames}"):
            program.step(CODES[:frames], program.initial_state())
    assert native.calls == 1
    with pytest.raises(ValueError, match=f"the program takes at most {bound}"):
        StreamDecoder(program, (2, bound + 1))


@pytest.mark.case(38)
def test_layout_and_ownership_of_the_codes_do_not_matter(program: Program) -> None:
    plain, _ = program.step(CODES[:20], program.initial_state())
    read_only = CODES[:20].copy()
    read_only.flags.writeable = False
    forms = (np.asfortranarray(CODES[:20]), np.repeat(CODES[:20], 2, axis=0)[::2], read_only)
    for codes in forms:
        pcm, _ = program.step(codes, program.initial_state())
        assert np.array_equal(pcm, plain)


FOREIGN: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "one tensor short": lambda state: state[:-1],
    "one tensor more": lambda state: (*state, state[0]),
    "empty": lambda state: (),
    "another order": lambda state: state[::-1],
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_state_of_something_else_is_refused(program: Program, foreign: str) -> None:
    state = FOREIGN[foreign](tuple(program.initial_state()))
    with pytest.raises(DecoderError):
        program.step(CODES[:5], state)


# Failures of the runtime


def test_a_failed_step_leaves_the_stream_as_it_was(program: Program, native: Native) -> None:
    """The native call fails when it has done all its work, which is the worst moment."""
    whole = list(StreamDecoder(program, (10,)).push(CODES))
    decoder = StreamDecoder(program, (10,))
    parts = list(decoder.push(CODES[:30]))
    native.failures = 2
    for _ in range(2):
        with pytest.raises(DecoderError, match=r": out of memory$") as caught:
            next(decoder.push(CODES[:0]) if decoder.chunk_ready else decoder.push(CODES[30:40]))
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert (decoder.frames_decoded, decoder.frames_pending) == (30, 10)
    parts += list(decoder.push(CODES[40:]))
    assert equal(parts, whole)


def test_a_failed_priming_leaves_the_stream_as_it_was(program: Program, native: Native) -> None:
    decoder = StreamDecoder(program, (10,))
    native.failures = 1
    with pytest.raises(DecoderError):
        decoder.prime(CODES[:25])
    assert equal(list(decoder.push(CODES)), list(StreamDecoder(program, (10,)).push(CODES)))


class Faulty:
    """A program whose audio goes bad in its third step."""

    def __init__(self, inner: Program, fault: Callable[[Array], Array]) -> None:
        self.inner, self.fault, self.steps = inner, fault, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, codes: NDArray[np.int64], state: Any) -> tuple[Array, Any]:
        pcm, after = self.inner.step(codes, state)
        self.steps += 1
        return (self.fault(pcm) if self.steps == 3 else pcm), after


def one_sample(value: float) -> Callable[[Array], Array]:
    def put(pcm: Array) -> Array:
        pcm[len(pcm) // 2] = value
        return pcm

    return put


FAULTS: dict[str, Callable[[Array], Array]] = {
    "555 samples short": lambda pcm: pcm[:-555],
    "one sample short": lambda pcm: pcm[:-1],
    "one sample long": lambda pcm: np.append(pcm, pcm[-1]),
    "nothing": lambda pcm: pcm[:0],
    "two-dimensional": lambda pcm: pcm[None],
    "NaN": one_sample(np.nan),
    "+Inf": one_sample(np.inf),
    "-Inf": one_sample(-np.inf),
    "all NaN": lambda pcm: np.full_like(pcm, np.nan),
}


@pytest.mark.case(12)
@pytest.mark.case(21)
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_audio_is_not_handed_out_and_a_retry_is_as_good_as_new(
    program: Program, fault: str
) -> None:
    whole = list(StreamDecoder(program, (10,)).push(CODES))
    decoder = StreamDecoder(Faulty(program, FAULTS[fault]), (10,))
    chunks = decoder.push(CODES)
    parts = [next(chunks), next(chunks)]
    with pytest.raises(OutputError):
        next(chunks)
    assert (decoder.frames_decoded, decoder.frames_pending) == (20, 40)
    assert equal([*parts, *decoder.finish()], whole)


# Threads

# Methods of an ExecuTorch program work in memory that they share.
ONE_AT_A_TIME = {"executorch"}


@pytest.mark.case(20)
def test_native_calls_overlap_only_where_they_may(
    runtime: str, program: Program, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if native code let other threads run all the time, whether or not it does today."""
    running, most = [], []

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        running.append(None)
        most.append(len(running))
        time.sleep(0.05)
        try:
            return function(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(native, "_run", run)
    work = [
        threading.Thread(target=program.step, args=(CODES[:2], program.initial_state()))
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(most) == 4
    assert (max(most) == 1) == (runtime in ONE_AT_A_TIME)


# Memory


def address_range(value: Any) -> range:
    if isinstance(value, np.ndarray):
        start = value.__array_interface__["data"][0]
    else:  # onnxruntime.OrtValue or torch.Tensor
        start = value.data_ptr()
    return range(start, start + max(as_numpy(value).nbytes, 1))


def test_arrays_neither_change_later_nor_share_memory(program: Program) -> None:
    state = program.initial_state()
    states, audio, kept, kept_state, start = [state], [], [], [snapshot(state)], 0
    for size in (5, 1, 25, 2, 25, 2):
        pcm, state = program.step(CODES[start : start + size], state)
        start += size
        audio.append(pcm)
        kept.append(pcm.copy())
        states.append(state)
        kept_state.append(snapshot(state))
    assert equal(audio, kept)
    for value, before in zip(states, kept_state, strict=True):
        assert equal(snapshot(value), before)
    ranges = sorted(
        (address_range(value) for value in (*audio, *(v for s in states[1:] for v in s))),
        key=lambda item: item.start,
    )
    assert all(one.stop <= other.start for one, other in itertools.pairwise(ranges))
    assert all(len(pcm) == pcm.base.size if pcm.base is not None else True for pcm in audio)


def held_bytes(value: Any) -> int:
    """Return the size of the memory that a state tensor keeps alive."""
    if isinstance(value, np.ndarray):
        base = value if value.base is None else value.base
        return int(memoryview(base).nbytes)
    if hasattr(value, "untyped_storage"):
        return int(value.untyped_storage().nbytes())
    return as_numpy(value).nbytes  # onnxruntime.OrtValue: always its own


def test_a_state_keeps_nothing_else_alive(program: Program) -> None:
    """A view into a layer's whole input would keep all of that, for as long as the stream rests."""
    _, state = program.step(CODES[:25], program.initial_state())
    for value in state:
        assert held_bytes(value) == as_numpy(value).nbytes


def test_a_state_may_be_used_again(program: Program) -> None:
    """The caller may decode two continuations of one stream."""
    _, state = program.step(CODES[:20], program.initial_state())
    before = snapshot(state)
    first, after = program.step(CODES[20:40], state)
    other, _ = program.step(CODES[5:25], state)
    again, after_again = program.step(CODES[20:40], state)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert equal(snapshot(after), snapshot(after_again))
    assert equal(snapshot(state), before)


def test_all_new_streams_start_alike(program: Program) -> None:
    fresh, _ = program.step(CODES[:20], program.initial_state())
    pcm, _ = program.step(CODES[20:40], program.initial_state())
    pcm[:] = 9.0
    again, _ = program.step(CODES[:20], program.initial_state())
    assert np.array_equal(fresh, again)
    assert all((as_numpy(value) == 0).all() for value in program.initial_state())
    assert fresh.shape == (20 * SAMPLES,)


def test_codes_are_not_kept(program: Program) -> None:
    """The caller may write into its buffer as soon as ``step`` returned."""
    codes = CODES[:20].copy()
    pcm, state = program.step(codes, program.initial_state())
    codes[:] = 0
    more, _ = program.step(CODES[20:40], state)
    expected, state = program.step(CODES[:20], program.initial_state())
    assert np.array_equal(pcm, expected)
    assert np.array_equal(more, program.step(CODES[20:40], state)[0])
