"""Play an utterance through a policy in simulated time, from the times of its packets.

>>> from codecstream.policy import FixedPolicy
>>> from codecstream.simulate import clairvoyant_start_s, simulate
>>> packets = [(0.08 * (i + 1), 1) for i in range(60)]        # seconds, frames: in real time
>>> run = simulate(FixedPolicy((2, 4, 8, 16, 25)), packets, lambda frames: 0.04 * frames)
>>> run.start_s, run.underruns, round(run.stall_s, 2)
(0.24, 4, 2.76)
>>> round(clairvoyant_start_s(packets, lambda frames: 0.04 * frames), 2)
0.12
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from codecstream.plan import earliest_due_s
from codecstream.policy import StartPolicy

__all__ = ["Chunk", "Playback", "clairvoyant_start_s", "ramp_start_s", "simulate"]

Packet = tuple[float, int]
"""When it arrives, in seconds from the request, and how many frames it has."""

Cost = Callable[[int], float]
"""Seconds that decoding so many frames takes."""

SAME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Chunk:
    """A decoded chunk: its frames, and when decoding began and ended."""

    frames: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Playback:
    """How an utterance went. Times are seconds from the request.

    Attributes:
        chunks: All chunks, in order.
        start_s: When playback began; None where there was nothing to play.
        underruns: Times that the player ran dry before the last frame.
        stall_s: Silence in all of them.
    """

    chunks: tuple[Chunk, ...]
    start_s: float | None
    underruns: int
    stall_s: float


def simulate(
    policy: StartPolicy,
    packets: Iterable[Packet],
    cost: Cost,
    *,
    frame_s: float = 0.08,
    offset_s: float = 0.0,
) -> Playback:
    """Return how ``policy`` plays an utterance.

    There is one worker, decisions take no time, and the player begins exactly when it is told to.

    Args:
        policy: Told and asked as :class:`~codecstream.policy.StartPolicy` says.
        packets: In order of time; the utterance ends with the last.
        cost: Called once per chunk.
        frame_s: Duration of a frame.
        offset_s: Added to all times that the policy gets: what its clock shows at the request.
    """
    return _Simulation(policy, list(packets), cost, frame_s, offset_s).run()


class _Simulation:
    def __init__(
        self,
        policy: StartPolicy,
        packets: Sequence[Packet],
        cost: Cost,
        frame_s: float,
        offset_s: float,
    ) -> None:
        self.policy = policy
        self.packets = packets
        self.total = sum(frames for _, frames in packets)
        self.cost = cost
        self.frame_s = frame_s
        self.offset_s = offset_s
        self.now_s = 0.0
        self.idle_turns = 0  # without any time between them
        self.sent = 0  # packets
        self.arrived = 0
        self.decoded = 0
        self.busy: Chunk | None = None
        self.ask_again_s = math.inf
        self.chunks: list[Chunk] = []
        self.start_s: float | None = None
        self.begin_at_s = math.inf
        self.dry_s = math.inf  # when what is decoded has been heard; inf while nothing plays
        self.stalled_since_s: float | None = None
        self.unheard_s = 0.0  # while nothing plays
        self.underruns = 0
        self.stall_s = 0.0

    def run(self) -> Playback:
        self.policy.begin()
        if not self.packets:
            self.policy.ended(self.offset_s)
        while self.decoded < self.total or (self.start_s is None and self.total):
            self._advance()
            self._happen()
            self._decide()
        if self.stalled_since_s is not None:
            self.stall_s += max(self.begin_at_s, self.now_s) - self.stalled_since_s
        return Playback(tuple(self.chunks), self.start_s, self.underruns, self.stall_s)

    def _advance(self) -> None:
        times_s = [self.ask_again_s, self.begin_at_s, self.dry_s]
        if self.sent < len(self.packets):
            times_s.append(self.packets[self.sent][0])
        if self.busy is not None:
            times_s.append(self.busy.end_s)
        next_s = min(times_s)
        if math.isinf(next_s):
            raise RuntimeError("the policy waits for nothing")
        self.idle_turns = 0 if next_s > self.now_s else self.idle_turns + 1
        if self.idle_turns > 100 + len(self.packets):
            raise RuntimeError("the policy wants to be asked again and again at the same time")
        self.now_s = max(self.now_s, next_s)

    def _happen(self) -> None:
        clock_s = self.now_s + self.offset_s
        while self.sent < len(self.packets) and self.packets[self.sent][0] <= self.now_s:
            frames = self.packets[self.sent][1]
            self.sent += 1
            self.arrived += frames
            self.policy.arrived(clock_s, frames)
            if self.sent == len(self.packets):
                self.policy.ended(clock_s)
        if self.busy is not None and self.busy.end_s <= self.now_s + SAME_S:
            chunk, self.busy = self.busy, None
            self.decoded += chunk.frames
            self.policy.decoded(clock_s, chunk.frames, chunk.end_s - chunk.begin_s)
            audio_s = chunk.frames * self.frame_s
            if math.isinf(self.dry_s):
                self.unheard_s += audio_s
            else:
                self.dry_s += audio_s
        if self.dry_s <= self.now_s and self.decoded < self.total:
            self._run_dry()

    def _run_dry(self) -> None:
        self.underruns += 1
        self.stalled_since_s = self.dry_s
        self.dry_s, self.unheard_s = math.inf, 0.0

    def _decide(self) -> None:
        clock_s = self.now_s + self.offset_s
        if self.busy is None:
            playing = not math.isinf(self.dry_s)
            ahead_s = max(0.0, self.dry_s - self.now_s) if playing else None
            decision = self.policy.next_chunk(clock_s, ahead_s)
            self.ask_again_s = decision.ask_again_s - self.offset_s
            if decision.frames:
                if decision.frames > self.arrived - self.decoded:
                    raise RuntimeError(f"the policy asks for {decision.frames} frames: not there")
                end_s = self.now_s + self.cost(decision.frames)
                self.busy = Chunk(decision.frames, self.now_s, end_s)
                self.chunks.append(self.busy)
        else:
            self.ask_again_s = math.inf
        self.begin_at_s = math.inf
        if math.isinf(self.dry_s):
            begin_s = self.policy.begin_at_s(clock_s, self.unheard_s) - self.offset_s
            if self.unheard_s and begin_s <= self.now_s + SAME_S:
                self._play()
            elif self.unheard_s:
                self.begin_at_s = begin_s

    def _play(self) -> None:
        if self.start_s is None:
            self.start_s = self.now_s
        if self.stalled_since_s is not None:
            self.stall_s += self.now_s - self.stalled_since_s
            self.stalled_since_s = None
        self.dry_s = self.now_s + self.unheard_s
        self.unheard_s = 0.0


def clairvoyant_start_s(
    packets: Iterable[Packet], cost: Cost, *, frame_s: float = 0.08, max_frames: int = 25
) -> float:
    """Return the earliest start without an underrun of someone who knows all times and costs.

    The best over every cut of the frames into chunks of 1 to ``max_frames`` frames, to within
    :data:`codecstream.plan.TOLERANCE_S`.
    """
    costs_s = {n: cost(n) for n in range(1, max_frames + 1)}
    return earliest_due_s(_arrivals_s(packets), costs_s, frame_s)


def ramp_start_s(
    packets: Iterable[Packet], cost: Cost, sizes: Sequence[int], *, frame_s: float = 0.08
) -> float:
    """Return the earliest start without an underrun for chunks of these sizes, which must add up.

    Someone who knows all times and costs but keeps to a ramp can start then, not before.
    """
    arrivals_s = _arrivals_s(packets)
    if sum(sizes) != len(arrivals_s):
        raise ValueError(f"the sizes add up to {sum(sizes)} frames, not {len(arrivals_s)}")
    end_s = start_s = -math.inf
    frames = 0
    for size in sizes:
        end_s = max(end_s, arrivals_s[frames + size - 1]) + cost(size)
        start_s = max(start_s, end_s - frames * frame_s)
        frames += size
    return start_s


def _arrivals_s(packets: Iterable[Packet]) -> list[float]:
    return [time_s for time_s, frames in packets for _ in range(frames)]
