"""When to decode how much, and when to begin to play.

A policy is told what happens and asked what to do. It has no clock, no thread and no socket: times
come in as arguments, in seconds of one clock.

>>> from codecstream.policy import AdaptivePolicy
>>> policy = AdaptivePolicy(costs_s={1: 0.06, 25: 0.9})     # measured at warm-up; may be left out
>>> policy.begin()
>>> for i in range(5):                                      # a frame every 48 ms
...     policy.arrived(0.048 * (i + 1), frames=1)
>>> policy.next_chunk(now_s=0.24, ahead_s=None)             # nothing is playing yet
Decision(frames=1, ask_again_s=inf)
>>> policy.decoded(0.3, frames=1, cost_s=0.06)
>>> policy.begin_at_s(now_s=0.3, queued_s=0.08)             # play at once
0.3

Clients do all that: ``connect(url, program, policy=AdaptivePolicy.for_program(program))``.

:class:`AdaptivePolicy` needs no settings. :class:`FixedPolicy` is a ramp and a fixed delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from codecstream.forecast import ArrivalForecast, DecodeCost
from codecstream.geometry import CodecGeometry
from codecstream.plan import earliest_due_s, latest_free_s
from codecstream.runtimes import Program, measure_costs
from codecstream.schedule import DEFAULT_RAMP, Ramp

__all__ = ["AdaptivePolicy", "Decision", "FixedPolicy", "StartPolicy"]

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25)
"""Chunk sizes in frames that the adaptive policy weighs against each other."""

LEAST_AHEAD_FRAMES = 25
"""Playback begins when this much more would go well, however long the utterance is already."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the decoding worker does now.

    Attributes:
        frames: Decode a chunk of this many frames at once; 0: wait.
        ask_again_s: When waiting, ask again at this time at the latest; ``inf``: no need to before
            something happens.
    """

    frames: int
    ask_again_s: float = math.inf


WAIT = Decision(0)


class StartPolicy(Protocol):
    """Decides the next chunk's size, and when playback begins.

    The caller reports every packet, every chunk and the end of the frames, and asks after each of
    them and when playback begins or runs dry: :meth:`next_chunk` while the worker is free,
    :meth:`begin_at_s` while nothing plays.
    """

    def begin(self) -> None:
        """Begin a new utterance; what was learned in those before stays."""

    def arrived(self, now_s: float, frames: int) -> None:
        """``frames`` frames have arrived, at ``now_s`` or, told late, before it was called."""

    def ended(self, now_s: float) -> None:
        """No more frames will come."""

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        """The chunk that :meth:`next_chunk` asked for is ready, after ``cost_s`` of decoding."""

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        """Return what the worker, which is free, does now.

        A decision to decode is binding: the caller decodes those frames at once.

        Args:
            now_s: The time.
            ahead_s: Audio that is decoded and not yet heard, in seconds; None while nothing plays.
        """

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        """Return when playback begins, or begins again after it ran dry, if nothing new happens.

        Args:
            now_s: The time.
            queued_s: Audio that is decoded and not yet heard, in seconds.

        Returns:
            A time from ``now_s`` on; ``inf`` while nothing can be said.
        """


class _Counts:
    """What both policies keep about an utterance."""

    def __init__(self, geometry: CodecGeometry | None) -> None:
        self._frame_s = (geometry or CodecGeometry()).seconds(1)
        self._now_s = -math.inf
        self._reset()

    def _reset(self) -> None:
        self._waiting = 0
        self._in_flight = 0
        self._chunks = 0
        self._ended = False

    def _tick(self, now_s: float) -> float:
        """Return the time, which for a policy never runs backwards."""
        self._now_s = max(self._now_s, now_s)
        return self._now_s

    def _take(self, frames: int) -> Decision:
        self._waiting -= frames
        self._in_flight = frames
        self._chunks += 1
        return Decision(frames)


class FixedPolicy(_Counts):
    """A ramp of chunk sizes, and playback a fixed time after the first chunk.

    Args:
        ramp: Frames per chunk; the last size repeats.
        prebuffer_s: Seconds from the first chunk's audio to the beginning of playback.
        geometry: Of the codec; by default Qwen3-TTS's.

    Raises:
        ValueError: The ramp is none, or the time is negative.
    """

    def __init__(
        self,
        ramp: Ramp | Iterable[int] = DEFAULT_RAMP,
        prebuffer_s: float = 0.0,
        geometry: CodecGeometry | None = None,
    ) -> None:
        if not 0 <= prebuffer_s < math.inf:
            raise ValueError(f"a prebuffer is 0 or more seconds, not {prebuffer_s}")
        self._ramp = Ramp.of(ramp)
        self._prebuffer_s = prebuffer_s
        super().__init__(geometry)

    def _reset(self) -> None:
        super()._reset()
        self._first_audio_s: float | None = None

    def begin(self) -> None:
        """See :class:`StartPolicy`."""
        self._reset()

    def arrived(self, now_s: float, frames: int) -> None:
        """See :class:`StartPolicy`."""
        self._tick(now_s)
        self._waiting += frames

    def ended(self, now_s: float) -> None:
        """See :class:`StartPolicy`."""
        self._tick(now_s)
        self._ended = True

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        """See :class:`StartPolicy`."""
        now_s = self._tick(now_s)
        self._in_flight = 0
        if self._first_audio_s is None:
            self._first_audio_s = now_s

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        """See :class:`StartPolicy`."""
        size = self._ramp.size(self._chunks)
        if self._waiting >= size:
            return self._take(size)
        return self._take(self._waiting) if self._ended and self._waiting else WAIT

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        """See :class:`StartPolicy`. What ran dry goes on at once."""
        now_s = self._tick(now_s)
        if self._first_audio_s is None:
            return math.inf
        if self._ended and not self._waiting and not self._in_flight:
            return now_s
        return max(now_s, self._first_audio_s + self._prebuffer_s)


class AdaptivePolicy(_Counts):
    """Begins as early as it can without running dry, by what it has measured.

    It plans with :mod:`codecstream.plan` on bounds of :mod:`codecstream.forecast`: for frames that
    are still to come, the latest time that the past of this connection allows; for chunks, what
    they took so far and how far that was ever exceeded. Three things follow:

    - *Kept promise, no underrun.* While no frame comes later than was forecast when playback
      began, and chunks cost what they did, it does not run dry. Any frame can come later than
      that, so no start but the end is safe against everything.
    - *As early as that allows.* A start that is earlier by more than the reserves, from chunks of
      these sizes, would run dry if every frame came as late as the forecast allows.
    - Slower than real time, every start but the end is too early for some length, and nobody knows
      how much will be said. Then it is safe for utterances of up to ``protect_s``, or of the
      length that :meth:`expect` was told.

    A chunk takes as many frames as the plan allows, since large ones cost less per frame: sizes
    grow by themselves as audio queues up.

    One policy belongs to one connection, for all of its utterances: the first is played with
    nothing but its own frames to go by, later ones with the past.

    Args:
        costs_s: Seconds that chunks of some sizes took, such as at warm-up; more is learned.
        max_frames: The largest chunk that the program takes; None for any.
        protect_s: Seconds of speech for which a talker slower than real time is planned.
        geometry: Of the codec; by default Qwen3-TTS's.

    Raises:
        ValueError: A value is not positive.
    """

    def __init__(
        self,
        costs_s: Mapping[int, float] | None = None,
        *,
        max_frames: int | None = None,
        protect_s: float = 10.0,
        geometry: CodecGeometry | None = None,
    ) -> None:
        if max_frames is not None and max_frames < 1:
            raise ValueError(f"a chunk has at least one frame, not {max_frames}")
        if not 0 < protect_s < math.inf:
            raise ValueError(f"protect_s is a positive number of seconds, not {protect_s}")
        self._forecast = ArrivalForecast()
        self._cost = DecodeCost(costs_s)
        self._sizes = [n for n in SIZES if max_frames is None or n <= max_frames]
        self._learn_costs()
        self._arrival_s = -math.inf
        super().__init__(geometry)
        self._protect_frames = math.ceil(protect_s / self._frame_s)

    @classmethod
    def for_program(cls, program: Program) -> AdaptivePolicy:
        """Return a policy for this decoder program, with costs measured in a few chunks of it."""
        return cls(measure_costs(program), max_frames=program.max_frames, geometry=program.geometry)

    def _reset(self) -> None:
        super()._reset()
        self._busy_until_s = -math.inf
        self._idle = True
        self._expected: int | None = None

    def begin(self) -> None:
        """See :class:`StartPolicy`."""
        self._reset()
        self._forecast.begin()

    def expect(self, frames: int) -> None:
        """Say how many frames this utterance will likely have, such as by its text's length."""
        if frames < 1:
            raise ValueError(f"an utterance has at least one frame, not {frames}")
        self._expected = frames

    def arrived(self, now_s: float, frames: int) -> None:
        """See :class:`StartPolicy`."""
        # Of arrivals alone: they may be told late, behind what was decoded meanwhile.
        self._arrival_s = max(self._arrival_s, now_s)
        self._tick(now_s)
        self._forecast.arrived(self._arrival_s, frames)
        self._waiting += frames

    def ended(self, now_s: float) -> None:
        """See :class:`StartPolicy`."""
        self._tick(now_s)
        self._ended = True

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        """See :class:`StartPolicy`."""
        self._tick(now_s)
        self._in_flight = 0
        self._cost.decoded(frames, cost_s, after_idle=self._idle)
        self._learn_costs()
        self._idle = False

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        """See :class:`StartPolicy`."""
        now_s = self._tick(now_s)
        if not self._waiting:
            self._idle = True
            return WAIT
        if not self._cost.known:
            return self._decode(1, now_s)  # nothing is lost by trying
        arrivals_s = self._arrivals_s(now_s, at_least=0) or [now_s] * self._waiting
        due_s = math.inf if ahead_s is None else now_s + ahead_s
        slack_s = self._slack_s(now_s, due_s, arrivals_s)
        if not slack_s:  # running dry now: as short a gap as can be
            return self._decode(1, now_s)
        size = self._choose(slack_s, playing=ahead_s is not None)
        if size <= self._waiting:
            return self._decode(size, now_s)
        # A larger chunk pays, and there is time for its frames to come. If they don't, what is
        # there is decoded while that keeps the plan, or else while it is in time at all.
        here = max(n for n in self._sizes if n <= self._waiting)
        ask_again_s = now_s + slack_s.get(here, -math.inf)
        if ask_again_s <= now_s:
            ask_again_s = due_s - self._costs_s[here]
        if ask_again_s <= now_s:
            return self._decode(here, now_s)
        self._idle = True
        return Decision(0, ask_again_s)

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        """See :class:`StartPolicy`."""
        now_s = self._tick(now_s)
        if self._ended and not self._waiting and not self._in_flight:
            return now_s
        arrivals_s = self._arrivals_s(now_s, at_least=LEAST_AHEAD_FRAMES)
        if arrivals_s is None or not self._cost.known:
            return math.inf
        free_s = max(now_s, self._busy_until_s) if self._in_flight else now_s
        due_s = earliest_due_s(arrivals_s, self._costs_s, self._frame_s, free_s)
        # What is planned is heard after what is queued and what is being decoded, ...
        begin_s = due_s - queued_s - self._in_flight * self._frame_s
        if self._in_flight:  # ... and that after what is queued.
            begin_s = max(begin_s, free_s - queued_s)
        return max(now_s, begin_s + self._reserve_s)

    def _slack_s(self, now_s: float, due_s: float, arrivals_s: Sequence[float]) -> dict[int, float]:
        """Return, by size of the next chunk, how much later it could begin for all to go well.

        Where it can't go well, or nothing plays, that refers to the least delay with which it
        would. Sizes that would themselves come too late are left out.
        """
        plan_due_s = due_s
        latest_s = latest_free_s(arrivals_s, self._costs_s, due_s, self._frame_s)
        if math.isinf(due_s) or now_s > latest_s[0]:
            plan_due_s = earliest_due_s(arrivals_s, self._costs_s, self._frame_s, now_s)
            latest_s = latest_free_s(arrivals_s, self._costs_s, plan_due_s, self._frame_s)
        slack_s = {}
        for size, cost_s in self._costs_s.items():
            if size <= len(arrivals_s):
                ready_s = max(now_s, arrivals_s[size - 1]) + cost_s
                if ready_s <= due_s:
                    slack_s[size] = min(plan_due_s, latest_s[size]) - ready_s
        return slack_s

    def _choose(self, slack_s: Mapping[int, float], playing: bool) -> int:
        """Return the size of the next chunk, which may be more than is waiting."""
        safe = [n for n in slack_s if n <= self._waiting and slack_s[n] >= 0]
        if not playing and safe and self._forecast.frames == self._waiting:
            return safe[0]  # the first sound: the sooner the better
        comfort_s = max(2 * self._reserve_s, self._frame_s)
        comfortable = [n for n in slack_s if slack_s[n] >= comfort_s]
        size = comfortable[-1] if comfortable else max(slack_s, key=lambda n: (slack_s[n], n))
        if size > self._waiting and not playing and safe:
            return max(safe, key=lambda n: (slack_s[n], n))
        return size

    def _decode(self, frames: int, now_s: float) -> Decision:
        self._busy_until_s = now_s + self._cost.expected_s(frames)
        return self._take(frames)

    def _learn_costs(self) -> None:
        self._costs_s = self._cost.planned_s(self._sizes)
        self._reserve_s = self._cost.reserve_s

    def _arrivals_s(self, now_s: float, at_least: int) -> list[float] | None:
        """When frames from the next undecoded one on will be there; None if nothing is known.

        As many as are expected in all, and some if more came than that: ``at_least`` so many.
        """
        here_s = [now_s] * min(self._waiting, self._protect_frames)
        if self._ended:
            return here_s
        left = (self._expected or self._protect_frames) - self._forecast.frames
        coming = max(left, 0 if self._expected else at_least) if left > 0 else LEAST_AHEAD_FRAMES
        coming_s = self._forecast.bounds_s(now_s, coming)
        return None if coming_s is None else here_s + coming_s
