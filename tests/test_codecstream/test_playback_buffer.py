"""What a device is given, block by block; no device, no thread, no real time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from codecstream.playback_buffer import PlaybackBuffer


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ramp(samples: int, start: int = 0) -> NDArray[np.float32]:
    """Samples that tell their place; none is 0."""
    return (np.arange(start + 1, start + samples + 1) / 2**20).astype(np.float32)


def read(buffer: PlaybackBuffer, samples: int) -> NDArray[np.float32]:
    block = np.full(samples, 9.0, np.float32)
    buffer.read_into(block)
    return block


@pytest.mark.case(49)
@pytest.mark.parametrize("blocks", [[1], [333], [480], [4096], [1, 333, 4096, 7, 480]])
def test_case_49_every_block_size_plays_each_sample_once(blocks: list[int]) -> None:
    buffer = PlaybackBuffer(10**6)
    for start, size in ((0, 1000), (1000, 1), (1001, 2839)):
        buffer.append(ramp(size, start))
    buffer.end()
    heard = []
    more = True
    while more:
        block = np.full(blocks[len(heard) % len(blocks)], 9.0, np.float32)
        more = buffer.read_into(block)
        heard.append(block)
    all_heard = np.concatenate(heard)
    assert np.array_equal(all_heard[:3840], ramp(3840))
    assert not all_heard[3840:].any()
    assert buffer.counts.played == 3840
    assert (buffer.counts.underruns, buffer.counts.underrun_samples) == (0, 0)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 700)),
        st.tuples(st.just("read"), st.integers(1, 500)),
        st.tuples(st.sampled_from(["pause", "resume"]), st.just(0)),
    ),
    max_size=40,
)


@given(steps=steps)
def test_no_pause_and_no_underrun_loses_or_repeats_a_sample(steps: list[tuple[str, int]]) -> None:
    buffer = PlaybackBuffer(10**6)
    written = 0
    paused = False
    heard = [np.empty(0, np.float32)]
    silent_in_pause = 0
    for step, size in steps:
        if step == "append":
            buffer.append(ramp(size, written))
            written += size
        elif step == "read":
            heard.append(read(buffer, size))
            if paused:
                assert not heard[-1].any(), "paused is silent"
                silent_in_pause += size
        else:
            getattr(buffer, step)()
            paused = step == "pause"
    buffer.resume()
    buffer.end()
    heard.append(read(buffer, written + 1))
    everything = np.concatenate(heard)
    assert np.array_equal(everything[everything != 0], ramp(written))
    assert (buffer.counts.played, buffer.counts.queued) == (written, 0)
    if written:
        first, last = np.flatnonzero(everything)[[0, -1]]
        silence = int(np.count_nonzero(everything[first:last] == 0))
        assert 0 <= silence - buffer.counts.underrun_samples <= silent_in_pause


@pytest.mark.case(47)
def test_case_47_starvation_is_silence_and_counted_once() -> None:
    buffer = PlaybackBuffer(10**6)
    read(buffer, 480)  # before the first sample: silence, but nobody starves
    buffer.append(ramp(720))
    read(buffer, 480)
    block = read(buffer, 480)  # 240 samples, then dry
    assert np.array_equal(block[:240], ramp(240, 480)) and not block[240:].any()
    for _ in range(30):
        read(buffer, 480)
    buffer.append(ramp(480, 720))
    assert np.array_equal(read(buffer, 480), ramp(480, 720)), "speech resumes at the next sample"
    buffer.end()
    read(buffer, 480)  # silence after the end is no underrun
    assert buffer.counts.underruns == 1
    assert buffer.counts.underrun_samples == 240 + 30 * 480


def test_paused_time_is_no_underrun() -> None:
    buffer = PlaybackBuffer(10**6)
    buffer.append(ramp(600))
    read(buffer, 480)
    buffer.pause()
    for _ in range(10):
        assert not read(buffer, 480).any()
    buffer.resume()
    buffer.append(ramp(360, 600))
    assert np.array_equal(read(buffer, 480), ramp(480, 480))
    assert buffer.counts.underruns == 0


@pytest.mark.parametrize("ending", ["end", "clear"])
def test_the_silence_between_two_utterances_is_no_underrun(ending: str) -> None:
    buffer = PlaybackBuffer(10**6)
    for _ in range(3):
        buffer.append(ramp(480))
        if ending == "end":
            buffer.end()
        read(buffer, 500)
        if ending == "clear":
            buffer.clear()  # 20 samples into what might have become an underrun
        read(buffer, 4800)
    assert buffer.counts.underruns == 0 and buffer.counts.played == 3 * 480


def test_start_delay_lets_a_cushion_build_up_for_each_utterance() -> None:
    clock = Clock()
    buffer = PlaybackBuffer(10**6, start_delay_s=1.84, clock=clock)
    for _ in range(2):
        clock.now_s += 5.0
        buffer.append(ramp(480))
        clock.now_s += 1.83
        assert not read(buffer, 480).any() and buffer.counts.underruns == 0
        clock.now_s += 0.02
        assert np.array_equal(read(buffer, 480), ramp(480))
        buffer.end()
        read(buffer, 1)


def test_a_start_delay_that_is_changed_counts_at_once() -> None:
    clock = Clock()
    buffer = PlaybackBuffer(10**6, start_delay_s=60, clock=clock)
    buffer.append(ramp(480))
    clock.now_s = 0.5
    assert not read(buffer, 480).any()
    buffer.start_delay_s = 0.4
    assert np.array_equal(read(buffer, 480), ramp(480))


def test_a_text_shorter_than_the_delay_plays_when_it_ends() -> None:
    buffer = PlaybackBuffer(10**6, start_delay_s=60, clock=Clock())
    buffer.append(ramp(480))
    buffer.end()
    block = np.empty(480, np.float32)
    assert buffer.read_into(block) is False
    assert np.array_equal(block, ramp(480))


@pytest.mark.case(10)
def test_case_10_clear_is_silence_from_the_next_block_and_the_next_utterance_is_whole() -> None:
    buffer = PlaybackBuffer(10**6)
    buffer.append(ramp(72_000))
    read(buffer, 480)
    assert buffer.clear().queued == 0
    assert not read(buffer, 480).any()
    buffer.append(ramp(480, 5000))
    assert np.array_equal(read(buffer, 480), ramp(480, 5000))
    assert buffer.counts.underruns == 0, "silence after a cancel is no underrun"


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    blocks=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    ending=st.sampled_from(["end", "clear"]),
)
def test_no_edge_of_an_underrun_a_pause_or_the_end_clicks_with_a_fade(
    sizes: list[int], blocks: list[int], ending: str
) -> None:
    """With a constant signal of 1, every step is one that the fade has made."""
    fade = 48
    buffer = PlaybackBuffer(10**6, fade_samples=fade)
    heard = [np.zeros(1, np.float32)]
    for index, size in enumerate(sizes):
        buffer.append(np.ones(size, np.float32))
        heard.append(read(buffer, blocks[index % len(blocks)]))
        buffer.pause()
        heard.append(read(buffer, blocks[-1]))
        buffer.resume()
    getattr(buffer, ending)()
    heard += [read(buffer, blocks[0]) for _ in range(2 + (sum(sizes) + fade) // blocks[0])]
    everything = np.concatenate([*heard, np.zeros(1, np.float32)])
    steepest = np.pi / 2 / fade  # of one raised cosine
    assert np.abs(np.diff(everything)).max() <= 2 * steepest
    assert everything.max() <= 1 + 1e-6
    assert ending == "clear" or buffer.counts.played == sum(sizes)


def test_a_fade_is_over_before_the_utterance_is() -> None:
    buffer = PlaybackBuffer(10**6, fade_samples=48)
    buffer.append(np.ones(100, np.float32))
    buffer.end()
    block = np.empty(50, np.float32)
    assert [buffer.read_into(block) for _ in range(3)] == [True, True, False]
    assert block[47] > 0 and not block[48:].any()


def test_a_fade_leaves_what_is_not_at_an_edge_as_it_is() -> None:
    buffer = PlaybackBuffer(10**6, fade_samples=48)
    buffer.append(ramp(4800))
    buffer.end()
    heard = read(buffer, 4900)
    assert np.array_equal(heard[48:4800], ramp(4800)[48:]), "not one of the last is shaped"
    assert 0 < heard[0] < ramp(1)[0] / 100
    assert heard[4800:4848].all() and not heard[4848:].any()
    assert (np.diff(heard[4799:4848]) < 0).all(), "it falls from the last sample on"
