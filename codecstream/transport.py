"""What asyncio and threads share of the transport: its options, its close codes, its failures."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from codecstream.errors import ConnectionFailedError
from codecstream.options import Options
from codecstream.protocol import Session

if TYPE_CHECKING:
    from codecstream.capture import Side

__all__ = ["close_code_of", "closed_by", "failed_to_connect", "new_session", "socket_options"]


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out what the utterance's result says, which ``websockets`` logs with a traceback."""
    return record.msg != "keepalive ping failed"


# Under websockets' own name: it logs every message as it is, with somebody's words.
_logger = logging.getLogger("websockets.client.codecstream")
_logger.addFilter(_is_news)


def new_session(options: Options) -> Session:
    """Return the protocol state of a new connection."""
    program = options.program
    return Session(
        program.geometry, program.decoder_id, on_gap=options.on_gap, max_frames=options.max_frames
    )


def socket_options(options: Options) -> dict[str, Any]:
    """Return the keyword arguments of ``websockets``' ``connect``, of either kind."""
    tls: dict[str, Any] = {} if options.ssl is None else {"ssl": options.ssl}
    return {
        "additional_headers": options.headers,
        "open_timeout": options.open_timeout_s,
        "close_timeout": options.drain_timeout_s,
        "ping_interval": options.ping_interval_s,
        "ping_timeout": options.ping_timeout_s,
        "max_size": options.max_message_bytes,
        "compression": options.compression,
        "proxy": options.proxy,
        "logger": _logger,
        **tls,
    }


def close_code_of(closed: ConnectionClosed) -> tuple[int, str]:
    """Return the close code and reason: the server's, else this side's, else 1006."""
    frame = closed.rcvd or closed.sent
    return (1006, "") if frame is None else (frame.code, frame.reason)


def closed_by(closed: ConnectionClosed) -> Side:
    """Return who ended the connection: ``network`` where nobody said anything."""
    if closed.rcvd is None:
        return "network" if closed.sent is None else "client"
    return "client" if closed.sent is not None and not closed.rcvd_then_sent else "server"


def failed_to_connect(options: Options, error: Exception) -> ConnectionFailedError:
    """Return ``error``, which opening the socket raised, as one of ours."""
    if options.capture is not None:
        options.capture.failed(error)
    reason = str(error) or type(error).__name__
    return ConnectionFailedError(
        f"no connection to {options.url}: {reason}", transient=_is_transient(error)
    )


def _is_transient(error: Exception) -> bool:
    """Whether the same handshake may work later, by the same rules as ``websockets``' own."""
    if isinstance(error, InvalidStatus):
        return error.response.status_code in (429, 500, 502, 503, 504)
    if isinstance(error, InvalidMessage):
        return isinstance(error.__cause__, EOFError)  # the server went away in the handshake
    if isinstance(error, ConnectionClosed):
        return True  # the same, as websockets' client for threads tells it
    if isinstance(error, ssl.SSLCertVerificationError):
        return False
    timed_out = type(error).__name__ == "TimeoutError"  # asyncio's own, before Python 3.11
    return timed_out or isinstance(error, (OSError, EOFError))
