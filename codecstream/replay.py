"""A server that says again what another one said: it serves a capture with its original timing.

::

    capture = codecstream.capture.read_capture("fault.jsonl")
    async with CaptureServer(capture) as server:
        async with codecstream.connect(server.url, program) as client:
            ...

Or ``python examples/replay_server.py --capture fault.jsonl``, and point any client at it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from codecstream import wire
from codecstream.capture import CaptureFile, Record
from codecstream.errors import CaptureError, WireError
from codecstream.testing import Peer, ScriptedServer

__all__ = ["CaptureServer"]

# A client ends a connection with these because of what it received, which no message shows.
_COMPLAINTS = {1002, 1003, 1007, 1009}
_THE_END = "the capture ends here: it does not hold the answer to this request"


class CaptureServer(ScriptedServer):
    """Serves a capture: the same messages, the same close or cut, at the same times.

    Connection by connection, in the order of the capture, and from its start again behind the
    last one. Where the original server waited for a request, this one does, and times count
    from there: the text may be another, and may come when it likes. A cancel of the original
    client is waited for, too, but not for long, since the client at hand may have no reason to.
    Attempts that made no connection are not served.

    Args:
        capture: What to serve.
        pace: Time over the original's: 1.0 as it was, 0.5 twice as fast, 0 at once.
        cancel_patience_s: Longest wait for a cancel that the original client sent.
        **options: As for :class:`codecstream.testing.ScriptedServer`.

    Raises:
        CaptureError: No connection was made in it.
    """

    def __init__(
        self,
        capture: CaptureFile,
        *,
        pace: float = 1.0,
        cancel_patience_s: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(self._serve, **options)
        if pace < 0 or cancel_patience_s < 0:
            raise ValueError(f"pace {pace} and patience {cancel_patience_s} cannot be negative")
        self._captured = capture.connections()
        if not self._captured:
            raise CaptureError("the capture has no connection: there is nothing to serve")
        self._pace = pace
        self._patience_s = cancel_patience_s

    async def _serve(self, peer: Peer) -> None:
        records = self._captured[(self.connections - 1) % len(self._captured)]
        client = _Client(peer)
        reading = asyncio.ensure_future(client.read())
        replaying = asyncio.ensure_future(self._replay(records, peer, client))
        try:
            await asyncio.wait([reading, replaying], return_when=asyncio.FIRST_COMPLETED)
            if replaying.done():
                replaying.result()
        finally:
            reading.cancel()
            replaying.cancel()
            await asyncio.wait([reading, replaying])
            for task in (reading, replaying):
                if not task.cancelled():
                    task.exception()  # that the client left is no news

    async def _replay(self, records: list[Record], peer: Peer, client: _Client) -> None:
        loop = asyncio.get_running_loop()
        begun_s, begun_ms = loop.time(), records[0].t_ms
        original = _Steps()
        for record in records:
            if record.kind == "open":
                continue
            if record.kind == "sent":
                kind = _kind_of(record.message)
                original.take(kind)
                if kind is wire.InputDone:
                    await client.reaches("flushed", original.flushed)
                elif kind is wire.InputCancel:
                    await client.reaches("begun", original.begun)
                    await client.reaches("cancelled", original.cancelled, self._patience_s)
                else:
                    continue  # in how many pieces its text comes is the client's matter
                begun_s, begun_ms = loop.time(), record.t_ms
                continue
            due_s = begun_s + (record.t_ms - begun_ms) / 1000 * self._pace
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if record.kind == "received":
                await peer.send(record.message)
            else:
                await self._end(record, peer)
                return
        while True:  # the original client died here, or its disk was full
            original.take(wire.InputDone)
            await client.reaches("flushed", original.flushed)
            await peer.error(_THE_END)
            await peer.session_done(sentences=0)

    async def _end(self, closed: Record, peer: Peer) -> None:
        """End the connection as the captured one did."""
        assert closed.code is not None
        if closed.by == "client" and closed.code not in _COMPLAINTS:
            if closed.code == 1011:  # its pings were not answered
                peer.socket.transport.pause_reading()
            await asyncio.Event().wait()  # it will leave by itself
        else:
            await peer.close(closed.code, closed.reason or "")


@dataclass
class _Steps:
    """How far a client has come: utterances begun, flushed and cancelled."""

    begun: int = 0
    flushed: int = 0
    cancelled: int = 0
    composing: bool = False

    def take(self, kind: type) -> None:
        """Count a message of this kind."""
        if kind in (wire.InputText, wire.InputDone):
            self.begun += not self.composing
            self.composing = kind is wire.InputText
            self.flushed += kind is wire.InputDone
        elif kind is wire.InputCancel:
            self.cancelled += 1
            self.composing = False


class _Client:
    """Counts the steps of the client at hand."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._steps = _Steps()
        self._more = asyncio.Condition()

    async def read(self) -> None:
        """Count until the client leaves."""
        while True:
            try:
                kind = type(await self._peer.receive())
            except WireError:
                continue
            if kind is wire.SessionClose:
                return
            async with self._more:
                self._steps.take(kind)
                self._more.notify_all()

    async def reaches(self, step: str, count: int, timeout_s: float | None = None) -> None:
        """Wait for its ``count``-th step of a kind, for ``timeout_s`` at most."""

        async def wait() -> None:
            async with self._more:
                await self._more.wait_for(lambda: getattr(self._steps, step) >= count)

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)


def _kind_of(message: str | bytes) -> type:
    """Return the type of a client's message; that of an unknown one where it cannot be read."""
    if isinstance(message, str):
        with contextlib.suppress(WireError):
            return type(wire.decode_client_message(message))
    return wire.UnknownMessage
