"""A start policy at work on one utterance: what it is told, what it is asked, what it may answer.

:mod:`codecstream.pipeline` uses this where the client was given a policy. Like the policy, it has
no clock: times come in as arguments, in seconds of one clock.

- :class:`Playhead` says how much of what was handed out is still to be heard, from what the
  output says of itself or, where it says nothing, from the passing of time.
- :class:`Pacing` keeps frames until the policy wants them decoded, and holds audio back until the
  policy wants it played. So whatever plays at once what it is given begins at the right moment,
  and again after it ran dry.

A policy may be anybody's code. Where it raises, or asks for what cannot be, the utterance ends
with an error that says so; where it waits for nothing, it does so for :data:`PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from codecstream.codes import FrameQueue
from codecstream.errors import PolicyError
from codecstream.policy import StartPolicy

__all__ = ["PATIENCE_S", "Ahead", "Pacing", "Playhead"]

Ahead = Callable[[], float | None]
"""Says how much sound an output holds that it has not played, in seconds.

None while there is none, ``math.inf`` while it is paused with some. It must answer at once, in
any thread. :meth:`codecstream.playback.Player.ahead_s` is one.
"""

PATIENCE_S = 2.0
"""How long frames may lie about when no more come and nothing plays."""

PAUSED_S = 0.05  # how often a paused output is looked at: it does not tell when it goes on
SOONEST_S = 0.005  # before that, nothing is asked again for no reason


class Playhead:
    """How much of the audio that was handed out is still to be heard.

    Args:
        output_s: What the output says of itself. None: it is taken to play what it is given at
            once and without a break.
    """

    def __init__(self, output_s: Ahead | None) -> None:
        self._output_s = output_s
        self._end_s = -math.inf  # when what was handed out will have been heard
        self._in_hand_s = 0.0  # of it, what the output may not have been given yet
        self._playing = False

    def back(self) -> None:
        """Take note that the caller has come back: what it had, the output has."""
        self._in_hand_s = 0.0

    def handed_out(self, now_s: float, audio_s: float) -> None:
        """Take note that the caller was given ``audio_s`` of audio."""
        self._end_s = max(self._end_s, now_s) + audio_s
        self._in_hand_s = audio_s
        self._playing = True

    def ahead_s(self, now_s: float, *, more: bool) -> float | None:
        """Return what is still to be heard, in seconds.

        Args:
            now_s: The time.
            more: Whether there is more that the caller has not come for. An output of which
                nothing is known has not run dry then: its caller is late, and knows why.

        Returns:
            None while nothing plays; ``inf`` while the output is paused.

        Raises:
            PolicyError: The output's own answer is none, or it raised.
        """
        left_s = self._end_s - now_s
        if self._output_s is None:
            self._playing = self._playing and (left_s > 0 or more)
            return max(0.0, left_s) if self._playing else None
        with _blaming("ahead_s"):
            said_s = self._output_s()
            if said_s is not None and not said_s >= 0:
                raise ValueError(f"{said_s} is no number of seconds from 0 on")
        if said_s is not None and math.isinf(said_s):
            return said_s
        # What the caller has in hand is in the output already, or is not: the time that has
        # passed since tells, within what both allow.
        least_s = said_s or 0.0
        left_s = min(max(left_s, least_s), least_s + self._in_hand_s)
        self._end_s = now_s + left_s
        return None if said_s is None and left_s <= 0 else left_s


class Pacing:
    """What a policy is told and asked about one utterance.

    Each sentence is an utterance of its own to the policy, while playback goes on from one to the
    next.

    Args:
        policy: Decides; the caller keeps it from utterance to utterance.
        max_frames: The largest chunk that the program takes; None for any.
        output_s: See :class:`Playhead`.
    """

    def __init__(
        self, policy: StartPolicy, max_frames: int | None, output_s: Ahead | None = None
    ) -> None:
        self._policy = policy
        self._max_frames = max_frames
        self._playhead = Playhead(output_s)
        self.restart()

    def restart(self) -> None:
        """Forget the frames that came: none of their audio was handed out."""
        self._frames = FrameQueue()
        self._packets: deque[tuple[int, float]] = deque()  # frames, and arrival_ms
        self._begun = False  # until then the policy is still with what was before, and cut short
        self._in_sentence = False
        self._begin_s: float | None = None  # when playback begins; None: to be asked
        self._stuck_since_s: float | None = None

    @property
    def frames_waiting(self) -> int:
        """Frames that have come and that no chunk has taken."""
        return self._frames.frames

    def changed(self) -> None:
        """Take note that something has happened: :meth:`may_hand_out` asks the policy again."""
        self._begin_s = None

    # What the policy is told

    def arrived(self, codes: NDArray[np.int64], arrival_s: float, arrival_ms: float) -> None:
        """Take frames of a sentence, ``[frames, codebooks]``, that came at that time."""
        with _blaming("the start policy"):
            if not self._in_sentence:
                self._policy.begin()
            self._begun = self._in_sentence = True
            self._policy.arrived(arrival_s, len(codes))
        self._frames.append(codes)
        if len(codes):
            self._packets.append((len(codes), arrival_ms))

    def ended(self, now_s: float) -> None:
        """Take note that no more frames of this sentence come."""
        if self._in_sentence:
            self._in_sentence = False
            with _blaming("the start policy"):
                self._policy.ended(now_s)

    def decoded(self, now_s: float, ready_s: float, frames: int, cost_s: float) -> None:
        """Take note that the chunk last taken is decoded, which took ``cost_s``.

        Args:
            now_s: The time.
            ready_s: Audio that was ready before it.
            frames: Its size.
            cost_s: What decoding took.
        """
        self._playhead.ahead_s(now_s, more=ready_s > 0)  # before there is more: has it run dry?
        self._begin_s = None
        with _blaming("the start policy"):
            self._policy.decoded(now_s, frames, cost_s)

    # What it is asked

    def next_chunk(
        self, now_s: float, *, ready_s: float, held: bool, ended: bool
    ) -> tuple[int, float]:
        """Return how many frames to decode now, or 0 and when to ask again at the latest.

        Args:
            now_s: The time.
            ready_s: Audio that is decoded and not handed out.
            held: Whether the caller wants nothing handed out for now.
            ended: Whether no more frames of this sentence come.

        Raises:
            PolicyError: The policy failed, or asks for what cannot be.
        """
        if not self._begun:
            return 0, math.inf
        ahead_s = math.inf if held else self._playhead.ahead_s(now_s, more=ready_s > 0)
        with _blaming("the start policy"):
            decision = self._policy.next_chunk(
                now_s, None if ahead_s is None else ahead_s + ready_s
            )
            frames, again_s = operator.index(decision.frames), float(decision.ask_again_s)
        waiting = self.frames_waiting
        if not 0 <= frames <= min(waiting, self._max_frames or waiting):
            bound = "any number" if self._max_frames is None else f"at most {self._max_frames}"
            raise PolicyError(
                f"the start policy asks for a chunk of {frames} frames: {waiting} are there, "
                f"the program takes {bound}"
            )
        if frames or not waiting:
            self._stuck_since_s = None
            return frames, math.inf
        if ahead_s is not None:
            dry_s = PAUSED_S if math.isinf(ahead_s) else ahead_s + ready_s
            again_s = min(again_s, now_s + dry_s)
        if ahead_s is None and ended:
            again_s = min(again_s, self._patience_ends_s(now_s))
        else:
            self._stuck_since_s = None
        soonest_s = now_s + SOONEST_S
        return 0, again_s if again_s > soonest_s else soonest_s  # not a number: soonest

    def take(self, frames: int) -> tuple[NDArray[np.int64], float]:
        """Return the next frames, and when the last of them had arrived in ms."""
        codes = self._frames.peek(frames)
        self._frames.drop(frames)
        while True:
            came, arrival_ms = self._packets.popleft()
            if came >= frames:
                break
            frames -= came
        if came > frames:
            self._packets.appendleft((came - frames, arrival_ms))
        return codes, arrival_ms

    def may_hand_out(self, now_s: float, ready_s: float) -> bool:
        """Whether audio that is ready is to be played now: something plays, or is to begin."""
        if self._playhead.ahead_s(now_s, more=ready_s > 0) is not None:
            self._begin_s = None
            return True
        if self._begin_s is None:
            with _blaming("the start policy"):
                self._begin_s = float(self._policy.begin_at_s(now_s, ready_s))
        return not self._begin_s > now_s

    @property
    def begin_s(self) -> float:
        """When :meth:`may_hand_out` says yes if nothing happens; ``inf`` where that is unknown."""
        return math.inf if self._begin_s is None else self._begin_s

    def back(self) -> None:
        """See :class:`Playhead`."""
        self._playhead.back()

    def handed_out(self, now_s: float, audio_s: float) -> None:
        """See :class:`Playhead`."""
        self._playhead.handed_out(now_s, audio_s)
        self._begin_s = None

    def _patience_ends_s(self, now_s: float) -> float:
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s >= PATIENCE_S:
            raise PolicyError(
                f"the start policy waits for nothing: it has left {self.frames_waiting} frames "
                f"for {PATIENCE_S:g} s, no more come, and nothing plays"
            )
        return self._stuck_since_s + PATIENCE_S


@contextlib.contextmanager
def _blaming(whom: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PolicyError(f"{whom} failed: {error!r}") from error
