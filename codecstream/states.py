"""The two state machines of a session, as tables.

A step that is not in its table is not allowed. Tests walk every cell.
"""

from __future__ import annotations

import enum

__all__ = ["LOCAL", "REMOTE", "ClientState", "Local", "Remote", "ServerState"]


class ClientState(enum.Enum):
    """What this side has sent of the current utterance."""

    IDLE = "no utterance"
    COMPOSING = "text sent, not flushed"
    FLUSHED = "text complete"
    WITHDRAWN = "cancelled before the text was complete"
    CLOSED = "closed"


class ServerState(enum.Enum):
    """What the server has sent of the current sentence."""

    QUIET = "no sentence"
    STREAMING = "a sentence's packets"
    ENDED = "end of stream, codec.done to come"
    CLOSED = "closed"


class Local(enum.Enum):
    """What this side can send."""

    CONFIG = "session.config"
    TEXT = "input.text"
    FLUSH = "input.done"
    CANCEL = "input.cancel"
    CLOSE = "session.close"


class Remote(enum.Enum):
    """What the server can send that moves its state."""

    START = "codec.start"
    PACKET = "a packet"
    EOS = "a packet with EOS"
    DONE = "codec.done"
    SESSION_DONE = "session.done"


_C, _L, _S, _R = ClientState, Local, ServerState, Remote

LOCAL: dict[tuple[ClientState, Local], ClientState] = {
    (_C.IDLE, _L.CONFIG): _C.IDLE,
    (_C.IDLE, _L.TEXT): _C.COMPOSING,
    (_C.IDLE, _L.FLUSH): _C.FLUSHED,
    (_C.IDLE, _L.CLOSE): _C.CLOSED,
    (_C.COMPOSING, _L.TEXT): _C.COMPOSING,
    (_C.COMPOSING, _L.FLUSH): _C.FLUSHED,
    (_C.COMPOSING, _L.CANCEL): _C.WITHDRAWN,
    (_C.COMPOSING, _L.CLOSE): _C.CLOSED,
    (_C.FLUSHED, _L.CANCEL): _C.FLUSHED,
    (_C.FLUSHED, _L.CLOSE): _C.CLOSED,
    (_C.WITHDRAWN, _L.CANCEL): _C.WITHDRAWN,
    (_C.WITHDRAWN, _L.CLOSE): _C.CLOSED,
}

REMOTE: dict[tuple[ServerState, Remote], ServerState] = {
    (_S.QUIET, _R.START): _S.STREAMING,
    (_S.QUIET, _R.SESSION_DONE): _S.QUIET,
    (_S.STREAMING, _R.PACKET): _S.STREAMING,
    (_S.STREAMING, _R.EOS): _S.ENDED,
    (_S.STREAMING, _R.DONE): _S.QUIET,
    (_S.STREAMING, _R.SESSION_DONE): _S.QUIET,
    (_S.ENDED, _R.DONE): _S.QUIET,
    (_S.ENDED, _R.SESSION_DONE): _S.QUIET,
}
