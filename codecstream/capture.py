"""Record what a client and its server say to each other, with the times, in one file.

::

    async with codecstream.connect(url, program, capture="fault.jsonl") as client:
        async for chunk in client.speak("Hello."):
            ...

    for record in codecstream.capture.read_capture("fault.jsonl").records:
        print(record.t_ms, record.kind)

:class:`codecstream.replay.CaptureServer` serves such a file again, so that a fault report is one
file and one command: ``python examples/replay_server.py --capture fault.jsonl``.

**What is in it.** Text of this program's user is left out unless ``include_text=True``: what is
said, and every string or list of a message that is not one of a few known settings (``voice``
stays, a speaker's embedding does not). A server's ``error`` stays, less what it quotes of the
text. Headers and URL are left out unless ``include_headers=True``. **The codec frames are in it**:
whoever has the decoder hears what was said.

**The format**, version 1: JSON objects, one a line, in UTF-8, written out message by message, so
that a program that dies leaves a file that can be read. The first line is
``{"capture": 1, "client": "codecstream 0.1.0", "include_text": false}``. Every other line has

- ``kind``: ``open``, ``sent`` (by the client), ``received`` (from the server), ``closed``, or
  ``failed`` (no connection could be made);
- ``t_ms``: milliseconds since the file was begun, never less than in the line before;
- ``connection``: which one, counted from 0;
- ``text`` of a text message or ``data`` of a binary one, in base64 (``sent``, ``received``), and
  ``redacted``: true where some of it was left out;
- ``code``, ``reason`` and ``by``: ``client``, ``server`` or ``network`` (``closed``);
- ``reason`` (``failed``); ``url`` and ``headers`` (``open``, where asked for).

What never became a message, such as a broken frame, is not in it; the close that followed is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec

from codecstream.errors import CaptureError
from codecstream.monitor import new_lock

if TYPE_CHECKING:
    from codecstream.options import Options

__all__ = ["FORMAT_VERSION", "Capture", "CaptureFile", "Record", "Tap", "read_capture"]

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 * 1024 * 1024  # far above the protocol's largest message
MAX_FILE_BYTES = 512 * 1024 * 1024  # three days of speech; it is held in memory

_log = logging.getLogger(__name__)

Kind = Literal["open", "sent", "received", "closed", "failed"]
Side = Literal["client", "server", "network"]


class _Header(msgspec.Struct, frozen=True):
    capture: int
    client: str = ""
    include_text: bool = False


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of a capture; the module's docstring says what each field holds."""

    kind: Kind
    t_ms: float
    connection: int
    text: str | None = None
    data: bytes | None = None
    redacted: bool = False
    code: int | None = None
    reason: str | None = None
    by: Side | None = None
    url: str | None = None
    headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.t_ms < math.inf or self.connection < 0:
            raise ValueError("t_ms and connection cannot be negative or infinite")
        has_one = (self.text is None) != (self.data is None)
        if self.kind in ("sent", "received") and not has_one:
            raise ValueError(f"{self.kind!r} needs either text or data")
        if self.kind == "sent" and self.text is None:
            raise ValueError("a client sends text only")
        if self.kind == "closed" and (self.code is None or self.by is None):
            raise ValueError("'closed' needs code and by")

    @property
    def message(self) -> str | bytes:
        """The message, where it is one."""
        if self.data is not None:
            return self.data
        return self.text or ""


@dataclass(frozen=True)
class CaptureFile:
    """A capture that was read.

    Attributes:
        records: All of it, in order.
        include_text: Whether the user's text is in it.
        truncated: Whether the last line was cut off: the program died, or the disk was full.
    """

    records: tuple[Record, ...]
    include_text: bool
    truncated: bool

    def connections(self) -> list[list[Record]]:
        """Return the records of each connection that was made, in the order of their opening."""
        grouped: dict[int, list[Record]] = {}
        for record in self.records:
            if record.kind != "failed":
                grouped.setdefault(record.connection, []).append(record)
        return list(grouped.values())


class Capture:
    """A file that clients write what they send and receive into.

    Give it to ``connect`` or ``sync_connect``; a path does where the defaults suit. Several
    clients may share one, in any threads. A path's file is closed with its client, this one by
    its owner::

        with Capture("fault.jsonl", include_text=True) as capture:
            async with codecstream.connect(url, program, capture=capture) as client:
                ...

    A disk that is full costs no speech: what is not written is counted and, once, logged.

    Args:
        path: The file to write; it must not exist yet, so that no evidence is overwritten.
        include_text: Whether the user's text is written as it is.
        include_headers: Whether URL and headers of the handshake are written, with whatever
            token they hold.

    Attributes:
        lost: Records that were not written, because the disk did not take one of them. Nothing is
            written behind that one, so that a file has no hole.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        include_text: bool = False,
        include_headers: bool = False,
    ) -> None:
        self.path = Path(path)
        self.include_text = include_text
        self.include_headers = include_headers
        self.lost = 0
        self._closes_with_client = False
        self._lock = new_lock()
        self._file: IO[bytes] | None = None
        self._begun_s: float | None = None
        self._connections = 0

    @classmethod
    def of(cls, given: Capture | str | os.PathLike[str] | None) -> Capture | None:
        """Return what ``connect`` was given as a capture; one made of a path ends with its client.

        Raises:
            ValueError: It is neither.
        """
        if given is None or isinstance(given, Capture):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise ValueError(f"capture must be a path, a Capture or None, not {given!r}")
        capture = cls(given)
        capture._closes_with_client = True
        return capture

    def open(self) -> None:
        """Begin the file; does nothing where it is open.

        Raises:
            OSError: It cannot be written, or exists.
        """
        from codecstream import __version__

        with self._lock:
            if self._file is not None or self.lost:
                return
            again = self._begun_s is not None  # closed by close(): what follows is added
            self._file = self.path.open("ab" if again else "xb", buffering=0)
            if self._begun_s is None:
                self._begun_s = time.perf_counter()
                header = _Header(FORMAT_VERSION, f"codecstream {__version__}", self.include_text)
                self._write(msgspec.json.encode(header))

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            self._close()

    def release(self) -> None:
        """Close the file where it belongs to the client that calls this."""
        if self._closes_with_client:
            self.close()

    def __enter__(self) -> Capture:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def connected(self, options: Options) -> Tap:
        """Record that a connection was made; return what records its messages."""
        connection = self._next_connection()
        if self.include_headers:
            headers = dict(options.headers)
            self.record("open", connection, url=options.url, headers=headers)
        else:
            self.record("open", connection)
        return Tap(self, connection)

    def failed(self, error: Exception) -> None:
        """Record that no connection could be made."""
        # Its text may hold the URL, and that a token.
        reason = repr(error) if self.include_headers else type(error).__name__
        self.record("failed", self._next_connection(), reason=reason)

    def record(self, kind: Kind, connection: int, **fields: Any) -> None:
        """Write one line; a file that cannot be written, or is closed, costs that line only."""
        with self._lock:
            if self._file is None or self._begun_s is None:
                self.lost += 1
                return
            t_ms = round((time.perf_counter() - self._begun_s) * 1000, 3)
            record = Record(kind=kind, t_ms=t_ms, connection=connection, **fields)
            self._write(msgspec.json.encode(record))

    def _next_connection(self) -> int:
        with self._lock:
            self._connections += 1
            return self._connections - 1

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.lost += 1
            _log.warning("the capture %s ends here: %s", self.path, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk says so again
                file.close()


class Tap:
    """Records the messages of one connection."""

    def __init__(self, capture: Capture, connection: int) -> None:
        self._capture = capture
        self._connection = connection
        self._redact = None if capture.include_text else _Redaction()

    def sent(self, text: str) -> None:
        """Record a message of the client."""
        self._message("sent", text)

    def received(self, message: str | bytes) -> None:
        """Record a message of the server."""
        if isinstance(message, bytes):
            self._capture.record("received", self._connection, data=message)
        else:
            self._message("received", message)

    def closed(self, code: int, reason: str, by: Side) -> None:
        """Record the connection's end."""
        if self._redact is not None:
            reason = self._redact.quotes(reason)
        self._capture.record("closed", self._connection, code=code, reason=reason, by=by)

    def _message(self, kind: Kind, text: str) -> None:
        written = text if self._redact is None else self._redact(text)
        self._capture.record(kind, self._connection, text=written, redacted=written is not text)


# Strings that are settings, not words of a user, by the name of their field.
_PUBLIC = {"type", "action", "decoder_id", "header_format", "language", "model", "output_mode"}
_PUBLIC |= {"response_format", "split_granularity", "task_type", "voice"}
_SHORTEST_QUOTE = 4  # characters; shorter pieces of text stand in many an innocent word
_QUOTES_KEPT = 100  # pieces of text that an error is searched for


class _Redaction:
    """Leaves a user's text out of messages; remembers it, to find it in a server's errors."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=_QUOTES_KEPT)

    def __call__(self, text: str) -> str:
        """Return ``text`` itself where nothing of it had to go."""
        try:
            document = msgspec.json.decode(text)
            redacted = self._value(document, "")
            return text if redacted == document else msgspec.json.encode(redacted).decode()
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            return f"[{len(text)} characters that are no JSON left out]"  # no JSON either

    def quotes(self, text: str) -> str:
        """Return ``text`` without what it quotes of the user's."""
        for said in sorted(self._said, key=len, reverse=True):
            text = text.replace(said, _left_out(said))
        return text

    def _value(self, value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            self._remember(value)
            return {key: self._value(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return f"[list of {len(value)} left out]"
        if not isinstance(value, str) or name in _PUBLIC:
            return value
        return self.quotes(value) if name == "message" else _left_out(value)

    def _remember(self, message: Mapping[str, Any]) -> None:
        for name in ("text", "instructions", "ref_text"):
            said = message.get(name)
            if isinstance(said, str) and len(said.strip()) >= _SHORTEST_QUOTE:
                self._said.append(said.strip())


def _left_out(text: str) -> str:
    return f"[{len(text)} characters left out]" if text else ""


def read_capture(path: str | os.PathLike[str]) -> CaptureFile:
    """Return what a capture holds. The file need not be trusted.

    A last line that was cut off is left away, as ``truncated`` tells; anything else that is not
    as the format says is an error.

    Raises:
        CaptureError: It is no capture, of a later version, damaged, or too large.
        OSError: It cannot be read.
    """
    records: list[Record] = []
    truncated = False
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise CaptureError(
                f"{path} has {size} bytes; a capture of more than {MAX_FILE_BYTES} is not read"
            )
        header = _read_header(path, file.readline(MAX_LINE_BYTES))
        decoder = msgspec.json.Decoder(Record)
        opened: set[int] = set()
        number = 1
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            where = f"{path}, line {number}"
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise CaptureError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
                truncated = True
                break
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise CaptureError(f"{where} is damaged: {error}") from error
            if records and record.t_ms < records[-1].t_ms:
                raise CaptureError(
                    f"{where} is damaged: its time is before that of line {number - 1}"
                )
            if record.kind in ("open", "failed"):
                opened.add(record.connection)
            elif record.connection not in opened:
                raise CaptureError(
                    f"{where} is damaged: connection {record.connection} was not opened"
                )
            records.append(record)
    return CaptureFile(tuple(records), header.include_text, truncated)


def _read_header(path: str | os.PathLike[str], line: bytes) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CaptureError(
            f"{path} is no capture of codecstream: its first line is not the head of one ({error})"
        ) from error
    if header.capture != FORMAT_VERSION:
        raise CaptureError(
            f"{path} is a capture of format {header.capture}, written by {header.client!r}; this "
            f"version of codecstream reads format {FORMAT_VERSION}: install that version"
        )
    return header
