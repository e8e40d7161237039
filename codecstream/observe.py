"""See what a client does, as it happens: a hook for programs, and a log for people.

::

    class Console(codecstream.Observer):
        def chunk_decoded(self, chunk, progress):
            print(f"{chunk.frames} frames in {chunk.decode_ms:.0f} of {chunk.budget_ms:.0f} ms")

    client = codecstream.connect(url, program, observer=Console())

Without a hook the same goes to the log ``codecstream``, at level DEBUG: ``>`` for a message that
was sent, ``<`` for one that came, and what became of each utterance. What people say is not
written there: only how long it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from codecstream import wire
from codecstream.errors import WireError

if TYPE_CHECKING:
    from codecstream.metrics import ChunkTime
    from codecstream.speech import UtteranceResult

__all__ = ["Observer", "Observers", "Progress", "describe_message"]

_log = logging.getLogger("codecstream")

MAX_VALUE_CHARACTERS, MAX_LINE_CHARACTERS = 40, 400
# Strings that are settings of the protocol and not somebody's words.
_SHOWN = frozenset({"type", "mode", "format", "action", "decoder_id", "header_format", "voice"})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an utterance is.

    Attributes:
        elapsed_ms: Since its request was sent.
        frames_received: Valid frames that arrived.
        frames_decoded: Frames whose audio was decoded.
        frames_handed_out: Frames whose audio the caller took.
        frames_waiting: Received and not decoded.
        audio_ready_s: Decoded and not taken, in seconds.
        decode_ms_total: Time spent decoding.
        decode_rtf: The same over the audio that it made, or None before there is any.
    """

    elapsed_ms: float
    frames_received: int
    frames_decoded: int
    frames_handed_out: int
    frames_waiting: int
    audio_ready_s: float
    decode_ms_total: float
    decode_rtf: float | None


class Observer:
    """Base class of hooks: override what you want to see; the rest does nothing.

    Calls come from the event loop, or from the threads of a :func:`codecstream.sync_connect`
    client; they must not wait. What they raise is logged, once, and disturbs nothing, but for what
    ends a program, in its main thread. Of a client for threads they may call ``cancel``, ``close``,
    ``pause`` and ``resume``, of that client alone.
    """

    def connected(self, url: str) -> None:
        """A connection is open."""

    def sent(self, message: str) -> None:
        """A message goes out, JSON."""

    def received(self, message: str | bytes) -> None:
        """A message came: JSON, or a packet of frames."""

    def disconnected(self, code: int, reason: str) -> None:
        """A connection has ended, with the WebSocket's close code."""

    def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
        """A chunk is ready."""

    def utterance_ended(self, result: UtteranceResult) -> None:
        """An utterance has ended, and its last chunk was taken."""


class _Log(Observer):
    """Writes everything to the log."""

    def connected(self, url: str) -> None:
        _log.debug("connected to %s", url.partition("?")[0])

    def sent(self, message: str) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("> %s", describe_message(message))

    def received(self, message: str | bytes) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("< %s", describe_message(message))

    def disconnected(self, code: int, reason: str) -> None:
        _log.debug("connection closed with code %d%s", code, f": {reason}" if reason else "")

    def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
        _log.debug(
            "chunk %d: %d frames in %.1f of %.0f ms, %d frames wait",
            chunk.idx,
            chunk.frames,
            chunk.decode_ms,
            chunk.budget_ms,
            progress.frames_waiting,
        )

    def utterance_ended(self, result: UtteranceResult) -> None:
        _log.debug("utterance %s: %s", result.status, result.reason)


class Observers:
    """The log and, where there is one, a program's hook: each is told, none can disturb.

    >>> Observers(None).connected("ws://localhost")
    """

    def __init__(self, hook: Observer | None) -> None:
        self._all = [_Log()] if hook is None else [_Log(), hook]
        self._told = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that makes the call of this name on each of them."""
        if not hasattr(Observer, name):
            raise AttributeError(name)

        def tell(*arguments: Any) -> None:
            for observer in self._all:
                try:
                    getattr(observer, name)(*arguments)
                except BaseException as error:
                    # SystemExit and its like end the program where they can, in the main thread,
                    # where a signal's handler may have raised them; elsewhere only the thread.
                    main = threading.current_thread() is threading.main_thread()
                    if main and not isinstance(error, Exception):
                        raise
                    if not self._told:
                        _log.exception("an observer failed in %s; it is told once", name)
                    self._told = True

        return tell


def describe_message(message: str | bytes) -> str:
    """Return a message in one short line, without what anybody said.

    >>> describe_message('{"type": "input.text", "text": "Hello."}')
    'input.text text=(6 characters)'
    >>> describe_message(wire.encode_packet(seq=3, codes=[[0] * 16] * 2, flags=1))
    'packet 3: 2 frames, EOS'
    """
    if isinstance(message, bytes):
        return _describe_packet(message)
    try:
        document = msgspec.json.decode(message)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return f"({len(message)} characters that are no JSON)"
    if not isinstance(document, dict):
        return f"({len(message)} characters that are no message)"
    kind = str(document.get("type", "(no type)"))
    fields = " ".join(
        f"{name}={_describe_value(name, value)}"
        for name, value in document.items()
        if name != "type"
    )
    return wire.elide(f"{kind} {fields}".rstrip(), MAX_LINE_CHARACTERS)


def _describe_packet(data: bytes) -> str:
    try:
        seq, frames, flags = wire.peek_header(data)
    except WireError as error:
        return f"({error})"
    names = [flag.name for flag in wire.Flags if flag.name and flag in wire.Flags(flags)]
    return f"packet {seq}: {frames} frames" + "".join(f", {name}" for name in names)


def _describe_value(name: str, value: object) -> str:
    if isinstance(value, str) and name not in _SHOWN:
        return f"({len(value)} characters)"
    if isinstance(value, (list, dict)):
        return f"({len(value)} items)"
    return wire.elide(str(value), MAX_VALUE_CHARACTERS)
