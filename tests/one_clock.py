"""A client's pipeline with its policy, a worker and an output, all on one clock of the test's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from fake_sound import FakeSound
from numpy.typing import NDArray
from support import GEOMETRY, LedgerProgram, make_codes
from wire_messages import start

from codecstream import AudioChunk, StreamDecoder, wire
from codecstream.events import (
    DecoderReset,
    Event,
    Frames,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
)
from codecstream.pacing import Ahead, Pacing
from codecstream.pipeline import DecodePipeline, Job
from codecstream.playback import Player
from codecstream.policy import AdaptivePolicy, Decision, StartPolicy

Timed = tuple[float, Event]
FRAME_S = 0.08
REQUEST_S = 1000.0  # what the policy's clock shows when the request is sent


def sentence_of(codes: NDArray[Any], times_s: Sequence[float], sizes: Iterable[int]) -> list[Timed]:
    """Return a sentence in packets of these sizes, which come at these times."""
    begins = wire.decode_message(start())
    assert isinstance(begins, wire.CodecStart)
    events: list[Timed] = [(times_s[0], SentenceStarted(begins))]
    at = 0
    for seq, (time_s, size) in enumerate(zip(times_s, sizes, strict=True)):
        events.append((time_s, Frames(codes[at : at + size], seq)))
        at += size
    assert at == len(codes)
    return [*events, (times_s[-1], SentenceEnded(wire.CodecDone()))]


def ended(events: list[Timed]) -> list[Timed]:
    """Return the events with the utterance's end behind them."""
    return [*events, (events[-1][0] if events else 0.0, UtteranceEnded(False, None))]


def reset_at(time_s: float) -> Timed:
    """Return a reset of the decoder in mid-sentence."""
    return time_s, DecoderReset()


class Output(Protocol):
    """Where the chunks go. Its own events are those of a device that asks for sound."""

    ahead_s: Ahead | None

    def write(self, now_s: float, pcm: NDArray[np.float32]) -> None: ...

    def next_s(self) -> float: ...

    def happen(self, now_s: float) -> None: ...


class Speaker:
    """A player on a fake device, which asks for a block every 10 ms."""

    def __init__(self, sound: FakeSound, block_s: float = 0.01, **settings: Any) -> None:
        self.sound = sound
        self.block_s = block_s
        self.player: Player = sound.player(capacity_s=3600, **settings)
        self.ahead_s: Ahead | None = self.player.ahead_s
        self.blocks: list[tuple[float, NDArray[np.float32]]] = []
        self._next_s = 0.0

    def write(self, now_s: float, pcm: NDArray[np.float32]) -> None:
        self.player.write(pcm)

    def next_s(self) -> float:
        return self._next_s

    def happen(self, now_s: float) -> None:
        rate_hz = self.sound.stream.samplerate
        if self.sound.stream.active:
            self.blocks.append((now_s, self.sound.stream.pull(round(self.block_s * rate_hz))))
        self._next_s = now_s + self.block_s

    @property
    def begin_s(self) -> float:
        """When the device took the first sample that is no silence."""
        return next(time_s for time_s, block in self.blocks if block.any())


@dataclass
class Rig:
    """Runs one utterance. ``at`` are calls that the test makes at some times."""

    events: list[Timed]
    policy: StartPolicy | None
    cost: Callable[[int], float]
    output: Speaker | None = None
    at: list[tuple[float, Callable[[Rig], object]]] = field(default_factory=list)
    max_frames: int | None = None
    max_ahead_s: float = 3600.0
    request_s: float = REQUEST_S
    schedule: tuple[int, ...] = (2, 4, 8, 16, 25)
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        self.program = LedgerProgram()
        self.program.max_frames = self.max_frames
        self.now_s = 0.0
        pacing = None
        if self.policy is not None:
            ahead_s = None if self.output is None else self.output.ahead_s
            pacing = Pacing(self.policy, self.max_frames, ahead_s)
        self.pipeline = DecodePipeline(
            lambda: StreamDecoder(self.program, (1,) if pacing else self.schedule),
            GEOMETRY,
            self.max_ahead_s,
            pacing,
        )
        self.pipeline.request_s = self.request_s
        self.heard: list[tuple[float, AudioChunk]] = []
        self.turns = 0
        self._job: tuple[Job, NDArray[np.float32], float, float] | None = None

    @property
    def pcm(self) -> NDArray[np.float32]:
        """All that was handed out."""
        return np.concatenate([np.empty(0, np.float32), *(c.pcm for _, c in self.heard)])

    def run(self, *, until_played: bool = True) -> Rig:
        """Run until the pipeline is over, and the output has played what it was given."""
        waiting, calls = list(self.events), list(self.at)
        while not self.pipeline.over or calls or (until_played and self._sounding()):
            times_s = [
                self.pipeline.ask_again_s - self.request_s,
                self.pipeline.begin_s - self.request_s,
            ]
            times_s += [waiting[0][0]] if waiting else []
            times_s += [calls[0][0]] if calls else []
            times_s += [self._job[3]] if self._job is not None else []
            times_s += [self.output.next_s()] if self.output is not None else []
            next_s = min(times_s)
            assert not math.isinf(next_s), f"nothing will ever happen, at {self.now_s}"
            assert next_s < self.limit_s, "it does not come to an end"
            self.turns += 1
            assert self.turns < 100_000, f"it turns without end, at {self.now_s}"
            self._now(max(self.now_s, next_s))
            while waiting and waiting[0][0] <= self.now_s:
                self.pipeline.feed(waiting.pop(0)[1], self.now_s * 1000)
            while calls and calls[0][0] <= self.now_s:
                calls.pop(0)[1](self)
            self._work()
            self._listen()
            if self.output is not None and self.output.next_s() <= self.now_s:
                self.output.happen(self.now_s)
        return self

    def _now(self, now_s: float) -> None:
        self.now_s = now_s
        if self.output is not None:
            self.output.sound.now_s = now_s

    def _work(self) -> None:
        if self._job is not None and self._job[3] <= self.now_s:
            job, pcm, began_s, ends_s = self._job
            self._job = None
            self.pipeline.finish_job(job, pcm, ends_s * 1000, (ends_s - began_s) * 1000)
        if self._job is None:
            next_job = self.pipeline.next_job(self.request_s + self.now_s)
            if next_job is not None:
                pcm = next_job.run()
                frames = pcm.size // GEOMETRY.samples_per_frame
                ends_s = self.now_s + (self.cost(frames) if frames else 0.0)
                self._job = next_job, pcm, self.now_s, ends_s

    def _listen(self) -> None:
        while True:
            chunk = self.pipeline.take(self.request_s + self.now_s)
            if chunk is None:
                break
            self.heard.append((self.now_s, chunk))
            if self.output is not None:
                self.output.write(self.now_s, chunk.pcm)
            if self._job is None:
                self._work()

    def _sounding(self) -> bool:
        return self.output is not None and bool(self.output.player.ahead_s())


def cost(frames: int) -> float:
    return 0.01 + 0.02 * frames


def paced(frames: int, pace: float = 1.0, late_s: Any = None, begin_s: float = 0.0) -> list[float]:
    times_s, last_s = [], 0.0
    for i in range(frames):
        last_s = max(last_s, begin_s + (i + 1) * pace * FRAME_S + (late_s[i] if late_s else 0.0))
        times_s.append(last_s)
    return times_s


def talk(frames: int, **pace: Any) -> list[Timed]:
    return ended(sentence_of(make_codes(frames), paced(frames, **pace), [1] * frames))


class Recorded(AdaptivePolicy):
    """Keeps what it is told and asked, to hold it against what the protocol of policies says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[tuple[Any, ...]] = []

    def begin(self) -> None:
        self.calls.append(("begin",))
        super().begin()

    def arrived(self, now_s: float, frames: int) -> None:
        self.calls.append(("arrived", now_s, frames))
        super().arrived(now_s, frames)

    def ended(self, now_s: float) -> None:
        self.calls.append(("ended", now_s))
        super().ended(now_s)

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        self.calls.append(("decoded", now_s, frames, cost_s))
        super().decoded(now_s, frames, cost_s)

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        decision = super().next_chunk(now_s, ahead_s)
        self.calls.append(("next_chunk", now_s, ahead_s, decision.frames))
        return decision
