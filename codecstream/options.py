"""What a client can be told, checked: one set of settings for asyncio and for threads."""

from __future__ import annotations

import math
import random
import ssl as ssl_module
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from codecstream import wire
from codecstream.decoder import StreamDecoder
from codecstream.errors import LocalProtocolError
from codecstream.observe import Observers
from codecstream.pacing import Ahead, Pacing
from codecstream.pipeline import DecodePipeline
from codecstream.policy import StartPolicy
from codecstream.runtimes import Program
from codecstream.sampling import UtteranceSampler
from codecstream.schedule import Ramp

if TYPE_CHECKING:
    from codecstream.capture import Capture

__all__ = ["Options", "Reconnect"]


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How often, and when, to try again after the connection was lost.

    The wait before try ``n``, counted from 0, is ``first_delay_s * factor**n``, at most
    ``max_delay_s``, less a random part of it up to ``jitter``, so that the clients of a server
    that comes back do not all arrive at once.

    >>> list(Reconnect(attempts=4, first_delay_s=0.5, max_delay_s=3.0, jitter=0).delays_s())
    [0.5, 1.0, 2.0, 3.0]

    Attributes:
        attempts: Tries after the first one, per utterance.
        first_delay_s: Wait before the first of them, in seconds.
        factor: How much longer each wait is than the one before.
        max_delay_s: Longest wait.
        jitter: Random part of each wait, from 0 (none) to 1.

    Raises:
        ValueError: A number is out of its range.
    """

    attempts: int = 5
    first_delay_s: float = 0.25
    factor: float = 2.0
    max_delay_s: float = 8.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        _check("attempts", self.attempts, self.attempts >= 1, "1 or more")
        _check("first_delay_s", self.first_delay_s, self.first_delay_s >= 0, "0 or more")
        _check("factor", self.factor, 1 <= self.factor < math.inf, "1 or more")
        _check("max_delay_s", self.max_delay_s, 0 <= self.max_delay_s < math.inf, "0 or more")
        _check("jitter", self.jitter, 0 <= self.jitter <= 1, "from 0 to 1")

    def delays_s(self, generator: random.Random | None = None) -> Iterator[float]:
        """Yield the waits in seconds, one per try."""
        generator = generator or random.Random()
        delay_s = min(self.first_delay_s, self.max_delay_s)
        for _ in range(self.attempts):
            yield delay_s * (1 - generator.uniform(0, self.jitter))
            delay_s = min(delay_s * self.factor, self.max_delay_s)


@dataclass(frozen=True, slots=True)
class Options:
    """What ``connect`` and ``sync_connect`` were given; see :func:`codecstream.connect`.

    Raises:
        ValueError: An option is out of its range; the message names it.
    """

    url: str
    program: Program
    schedule: Ramp
    config: wire.SessionConfig
    headers: Mapping[str, str]
    ssl: ssl_module.SSLContext | None
    proxy: str | Literal[True] | None
    compression: Literal["deflate"] | None
    on_gap: str
    open_timeout_s: float
    idle_timeout_s: float
    stall_timeout_s: float | None
    drain_timeout_s: float
    ping_interval_s: float | None
    ping_timeout_s: float | None
    reconnect: Reconnect | None
    max_audio_s: float | None
    max_ahead_s: float
    max_message_bytes: int
    observers: Observers = field(default_factory=lambda: Observers(None))
    capture: Capture | None = None
    policy: StartPolicy | None = None
    ahead_s: Ahead | None = None
    sampler: UtteranceSampler | None = None

    def __post_init__(self) -> None:
        secure = self.url.startswith("wss://")
        if not secure and (self.ssl is not None or not self.url.startswith("ws://")):
            raise ValueError(
                f"the URL must start with ws://, or with wss:// for TLS, not {self.url!r}"
            )
        for name in ("open_timeout_s", "idle_timeout_s", "drain_timeout_s", "max_message_bytes"):
            value = getattr(self, name)
            _check(name, value, 0 < value < math.inf, "above 0")
        for name in ("stall_timeout_s", "ping_interval_s", "ping_timeout_s", "max_audio_s"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 < value < math.inf, "above 0, or None")
        _check("max_ahead_s", self.max_ahead_s, self.max_ahead_s >= 0, "0 or more")
        if self.compression not in (None, "deflate"):
            raise ValueError(f"compression must be 'deflate' or None, not {self.compression!r}")
        if self.on_gap not in ("stop", "reset"):
            raise ValueError(f"on_gap must be 'stop' or 'reset', not {self.on_gap!r}")
        if self.max_frames == 0:
            raise ValueError(f"max_audio_s of {self.max_audio_s} is less than one frame of audio")
        self.new_decoder()  # a schedule that does not fit fails now, not at the first utterance

    @property
    def max_frames(self) -> int | None:
        """``max_audio_s`` in whole frames."""
        if self.max_audio_s is None:
            return None
        return math.floor(self.max_audio_s * self.program.geometry.frame_rate_hz)

    def configured(self, settings: Mapping[str, Any]) -> wire.SessionConfig:
        """Return the session's config with ``settings`` in place of its fields.

        Raises:
            LocalProtocolError: One of them is not a field of it.
        """
        try:
            return msgspec.structs.replace(self.config, **settings)
        except TypeError as error:
            known = ", ".join(wire.SessionConfig.__struct_fields__)
            raise LocalProtocolError(f"{error}; settings are: {known}") from error

    def new_decoder(self) -> StreamDecoder:
        """Return a decoder for one utterance."""
        schedule = self.schedule if self.policy is None else Ramp((1,))  # which nobody goes by
        return StreamDecoder(self.program, schedule, sampler=self.sampler)

    def new_pipeline(self) -> DecodePipeline:
        """Return the pipeline of one utterance."""
        pacing = None
        if self.policy is not None:
            pacing = Pacing(self.policy, self.program.max_frames, self.ahead_s)
        return DecodePipeline(self.new_decoder, self.program.geometry, self.max_ahead_s, pacing)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
