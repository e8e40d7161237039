"""The sinks that need no device, and what a robot's own must have."""

from __future__ import annotations

import gc
import io
import os
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from codecstream import OutputError, PlaybackError
from codecstream.playback import Player
from codecstream.sinks import NullSink, RawSink, Sink
from codecstream.wav import WavWriter, read_wav


def noise(samples: int) -> Any:
    return np.random.default_rng(0).uniform(-1.1, 1.1, samples).astype(np.float32)


def test_all_of_the_packages_outputs_are_sinks(tmp_path: Path) -> None:
    outputs = [RawSink(io.BytesIO()), NullSink(), WavWriter(tmp_path / "a.wav", 24_000)]
    for output in outputs:
        assert isinstance(output, Sink)
        output.write(noise(10))
        output.clear()
        output.write(noise(10))
        output.drain()
        output.close()
        output.close()
    assert issubclass(Player, Sink)


def test_raw_samples_are_those_of_the_wav_file(tmp_path: Path) -> None:
    pipe = io.BytesIO()
    with RawSink(pipe) as raw, WavWriter(tmp_path / "a.wav", 24_000) as wav:
        for sink in (raw, wav):
            sink.write(noise(1920))
            sink.write(noise(3))
            sink.drain()
    assert not pipe.closed, "whoever opened it closes it"
    assert len(pipe.getvalue()) == 2 * 1923
    assert np.array_equal(np.frombuffer(pipe.getvalue(), "<i2") / np.float32(32767),
                          read_wav(tmp_path / "a.wav")[0])  # fmt: skip


def test_a_wav_file_can_be_read_once_drained(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with WavWriter(path, 24_000) as wav:
        wav.write(noise(100))
        wav.drain()
        assert read_wav(path)[0].size == 100
        wav.write(noise(50))
    assert read_wav(path)[0].size == 150


def test_a_pipe_takes_more_than_it_holds() -> None:
    """A pipe holds 64 KiB: writes are cut short, and go on when the reader has read."""
    reader_fd, writer_fd = os.pipe()
    received = bytearray()

    def read() -> None:
        with open(reader_fd, "rb") as pipe:
            received.extend(pipe.read())

    reader = threading.Thread(target=read)
    reader.start()
    pcm = noise(200_000)
    with open(writer_fd, "wb") as stream:
        sink = RawSink(stream)
        sink.write(pcm)
        sink.drain()
    reader.join(10)
    assert np.array_equal(np.frombuffer(bytes(received), "<i2")[:5],
                          np.rint(np.clip(pcm[:5] * 32767, -32768, 32767)))  # fmt: skip
    assert len(received) == 2 * 200_000


def test_a_reader_that_has_ended_is_an_error_and_leaves_nothing_behind() -> None:
    reader_fd, writer_fd = os.pipe()
    os.close(reader_fd)
    stream = open(writer_fd, "wb")  # noqa: SIM115 - that closing it is quiet is what is tested
    sink = RawSink(stream)
    with pytest.raises(PlaybackError, match="takes no more sound"):
        sink.write(noise(100))
    sink.close()
    stream.close()  # with anything left in Python's buffer, this would fail


def test_short_writes_are_completed() -> None:
    class Narrow(io.RawIOBase):
        taken = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:7])
            return min(7, len(data))

    narrow, wide = Narrow(), io.BytesIO()
    RawSink(cast("Any", narrow)).write(noise(100))
    RawSink(wide).write(noise(100))
    assert narrow.taken == wide.getvalue()


def test_a_full_pipe_that_does_not_block_is_an_error_not_a_loss() -> None:
    reader_fd, writer_fd = os.pipe()
    os.set_blocking(writer_fd, False)
    with (
        open(reader_fd, "rb"),
        open(writer_fd, "wb") as stream,
        pytest.raises(PlaybackError, match="does not block"),
    ):
        RawSink(stream).write(noise(200_000))


def test_nothing_that_is_no_sound_is_written() -> None:
    pipe = io.BytesIO()
    with pytest.raises(OutputError, match="NaN"):
        RawSink(pipe).write(np.array([0.0, np.nan], np.float32))
    assert pipe.getvalue() == b""


def test_the_null_sink_counts() -> None:
    with NullSink() as sink:
        sink.write(noise(100))
        sink.write(noise(20))
    assert sink.written_samples == 120


def test_a_file_that_nobody_else_holds_stays_open(tmp_path: Path) -> None:
    sink = RawSink((tmp_path / "a.raw").open("wb"))
    gc.collect()
    sink.write(np.zeros(4, np.float32))
    assert (tmp_path / "a.raw").stat().st_size == 8
    sink._given.close()
