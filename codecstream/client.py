"""The asyncio client: text out, sound in.

::

    program = codecstream.load_program("decoder-onnx")
    async with codecstream.connect("ws://host:8000/v1/audio/speech/stream", program) as client:
        async for chunk in client.speak("Hello.", voice="vivian"):
            player.write(chunk.pcm)                  # float32 [samples] at 24 kHz

Three loops never wait for each other: one task reads the socket for as long as the connection
lives, one worker thread decodes, and the caller takes chunks when it likes. Decoded audio is
bounded (``max_ahead_s``); codes are not, at 400 bytes per second of speech.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from codecstream import wire
from codecstream.decoder import StreamDecoder
from codecstream.errors import (
    CodecStreamError,
    ConnectionFailedError,
    IncompleteError,
    LocalProtocolError,
    ServerError,
    StreamMismatchError,
)
from codecstream.events import Event, Notice, UtteranceEnded, UtteranceFailed
from codecstream.metrics import ChunkTime, Metrics, summarise
from codecstream.pipeline import AudioChunk, DecodePipeline
from codecstream.protocol import Session
from codecstream.runtimes import Program
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream.states import ClientState

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["AudioChunk", "Client", "Utterance", "UtteranceResult", "connect"]

Status = Literal["complete", "cancelled", "refused", "failed", "incomplete"]
Text = str | AsyncIterable[str]


@dataclass(frozen=True, slots=True)
class UtteranceResult:
    """How an utterance ended.

    Attributes:
        status: ``complete`` only when the server's own counts match what arrived.
        error: What was raised, or None.
        frames_received: Valid frames that arrived.
        frames_decoded: Frames whose audio was decoded.
        sentences: Sentences that began.
        notices: Oddities that were tolerated.
        metrics: Latency figures.
        timeline: When each chunk was ready.
    """

    status: Status
    error: CodecStreamError | None
    frames_received: int
    frames_decoded: int
    sentences: int
    notices: tuple[str, ...]
    metrics: Metrics
    timeline: tuple[ChunkTime, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    """What ``connect`` was given; see there."""

    url: str
    program: Program
    schedule: Ramp
    config: wire.SessionConfig
    headers: Mapping[str, str]
    ssl: ssl_module.SSLContext | None
    on_gap: str
    open_timeout_s: float
    idle_timeout_s: float
    drain_timeout_s: float
    max_ahead_s: float
    max_message_bytes: int


def connect(
    url: str,
    program: Program,
    *,
    schedule: Ramp | Iterable[int] = DEFAULT_RAMP,
    config: wire.SessionConfig | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: ssl_module.SSLContext | None = None,
    on_gap: Literal["stop", "reset"] = "stop",
    open_timeout_s: float = 10.0,
    idle_timeout_s: float = 30.0,
    drain_timeout_s: float = 2.0,
    max_ahead_s: float = 10.0,
    max_message_bytes: int = wire.MAX_PACKET_BYTES,
) -> Client:
    """Return a client that connects when it is entered with ``async with``.

    Args:
        url: ``ws://`` or ``wss://`` address of the server's codec-stream endpoint.
        program: The decoder program, from :func:`codecstream.load_program`.
        schedule: Frames per chunk; the last size repeats.
        config: The session's settings; ``speak`` may override them per utterance.
        headers: Extra headers of the handshake, such as ``{"Authorization": "Bearer ..."}``.
        ssl: TLS settings for ``wss://``; None for the system's defaults.
        on_gap: What to do when a packet is missing: ``"stop"`` the utterance before anything
            behind the gap is decoded, or ``"reset"`` the decoder, go on, and fail at the end.
        open_timeout_s: Longest time for connecting and the handshake.
        idle_timeout_s: Longest time without a message from the server during an utterance.
        drain_timeout_s: Longest time to wait for the server's last messages after a failed or
            cancelled utterance; then the connection is replaced.
        max_ahead_s: Decoded audio kept for the caller, in seconds; at least one chunk.
        max_message_bytes: Largest message accepted.

    Raises:
        ValueError: The URL is no WebSocket's, or the schedule cannot be used with the program.
    """
    if not url.startswith(("ws://", "wss://")) or (ssl is not None and url.startswith("ws://")):
        raise ValueError(f"the URL must start with ws://, or with wss:// for TLS, not {url!r}")
    ramp = Ramp.of(schedule)
    StreamDecoder(program, ramp)  # fails now rather than at the first utterance
    return Client(
        _Options(
            url=url,
            program=program,
            schedule=ramp,
            config=config or wire.SessionConfig(),
            headers=dict(headers or {}),
            ssl=ssl,
            on_gap=on_gap,
            open_timeout_s=open_timeout_s,
            idle_timeout_s=idle_timeout_s,
            drain_timeout_s=drain_timeout_s,
            max_ahead_s=max_ahead_s,
            max_message_bytes=max_message_bytes,
        )
    )


class Client:
    """A connection to a talker server that speaks utterances one after another.

    When the server closed the connection between utterances, as it does after 30 idle seconds,
    the next utterance opens a new one.
    """

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._connection: _Connection | None = None
        self._utterance: Utterance | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._starting = asyncio.Lock()  # one utterance at a time asks for the connection

    async def __aenter__(self) -> Client:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
        """
        self._connection = await _Connection.open(self._options)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="codecstream-decode")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def speak(self, text: Text, **settings: Any) -> Utterance:
        """Return an utterance to iterate over; the request is sent when iteration starts.

        An utterance that is left before its end must be cancelled before the next one starts.

        Args:
            text: The text, or an asynchronous iterable of its pieces.
            **settings: Fields of :class:`codecstream.wire.SessionConfig` for this utterance,
                such as ``voice="vivian"``.

        Raises:
            LocalProtocolError: A setting is not a field of the session's config, or the client
                is not open.
        """
        try:
            config = msgspec.structs.replace(self._options.config, **settings)
        except TypeError as error:
            known = ", ".join(wire.SessionConfig.__struct_fields__)
            raise LocalProtocolError(f"{error}; settings are: {known}") from error
        pipeline = DecodePipeline(
            StreamDecoder(self._options.program, self._options.schedule),
            self._options.program.geometry,
            self._open_worker(),
            self._options.max_ahead_s,
        )
        return Utterance(self, text, config, pipeline, self._options)

    async def cancel(self) -> None:
        """Stop the utterance in flight: nothing more of it is decoded or handed out.

        Its iteration ends at once, with ``result.status == "cancelled"``. Returns when the
        connection is free again; does nothing where no utterance is in flight.
        """
        utterance = self._utterance
        if utterance is not None:
            utterance._stop_now()
            await utterance._settle()
            async with self._starting:
                if self._connection is not None:
                    await self._release(self._connection)

    async def close(self) -> None:
        """End the utterance in flight, say goodbye and close. May be called twice."""
        worker, self._worker = self._worker, None
        if self._utterance is not None:
            self._utterance._stop_now()
            await self._utterance._settle()
        async with self._starting:  # a start in flight sees that the client is closed
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close(goodbye=True)
        if worker is not None:
            worker.shutdown()  # idle by now

    def _open_worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            raise LocalProtocolError("the client is not open: use it inside 'async with'")
        return self._worker

    async def _start(self, utterance: Utterance) -> _Connection:
        """Send the request of ``utterance`` and return the connection that it went out on.

        Raises:
            LocalProtocolError: Another utterance is in flight, or the client was closed.
            ConnectionFailedError: The server cannot be reached.
        """
        async with self._starting:
            self._open_worker()
            previous = self._utterance
            if previous is not None and not previous.over:
                raise LocalProtocolError(
                    "an utterance is still in flight: iterate it to its end or cancel() it first"
                )
            self._utterance = utterance
            if previous is not None:
                await previous._settle()
            # The second time round, the server had closed while we were idle and the news came
            # only now. Nothing was received, so nothing can be said twice.
            for _ in range(2):
                if self._connection is not None:
                    await self._release(self._connection)
                if self._connection is None:
                    self._connection = await _Connection.open(self._options)
                if await self._connection.start(utterance):
                    return self._connection
            raise ConnectionFailedError(f"{self._options.url} closes every connection at once")

    async def _release(self, connection: _Connection) -> None:
        """Let the server finish what it was sending; give up the connection where it does not."""
        free = await connection.wait_idle(self._options.drain_timeout_s)
        if connection.closed or not free:
            await connection.close(goodbye=False)
            if self._connection is connection:
                self._connection = None


class _Connection:
    """A socket, its protocol state, and the task that reads it."""

    def __init__(self, socket: ClientConnection, options: _Options) -> None:
        self._socket = socket
        self._config: wire.SessionConfig | None = None
        self._receiver: Utterance | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: deque[str] = deque()
        self._sending = asyncio.Lock()
        self.session = Session(
            options.program.geometry, options.program.decoder_id, on_gap=options.on_gap
        )
        self.closed = False
        self.last_message_s = time.perf_counter()
        self._reader = asyncio.create_task(self._read(), name="codecstream-read")

    @classmethod
    async def open(cls, options: _Options) -> _Connection:
        from websockets.asyncio.client import connect as open_socket
        from websockets.exceptions import WebSocketException

        tls: dict[str, Any] = {} if options.ssl is None else {"ssl": options.ssl}
        try:
            socket = await open_socket(
                options.url,
                additional_headers=options.headers,
                open_timeout=options.open_timeout_s,
                max_size=options.max_message_bytes,
                compression=None,  # small packets of nearly random codes do not compress
                proxy=None,
                close_timeout=options.drain_timeout_s,
                **tls,
            )
        except (OSError, asyncio.TimeoutError, WebSocketException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ConnectionFailedError(f"no connection to {options.url}: {reason}") from error
        return cls(socket, options)

    async def start(self, utterance: Utterance) -> bool:
        """Send the settings where they changed, and the text; return False where nobody is there.

        Text that comes in pieces is the utterance's own to send.
        """
        if self._config != utterance.config:
            self.session.configure(utterance.config)
        if isinstance(utterance.text, str):
            self.session.send_text(utterance.text)
            self.session.flush()
        self._receiver = utterance
        self._idle.clear()
        self.last_message_s = time.perf_counter()
        utterance._pipeline.restart_clock()
        if not await self.send():
            self._receiver = None
            utterance._forget_early_events()
            return False
        self._config = utterance.config
        return True

    def serves(self, utterance: Utterance) -> bool:
        """Whether ``utterance`` is the one that the server is still busy with."""
        return self._receiver is utterance

    async def send(self) -> bool:
        """Send what the session has to send, in order; return False where the socket is closed."""
        from websockets.exceptions import ConnectionClosed

        async with self._sending:
            self._outbox.extend(self.session.data_to_send())
            try:
                while self._outbox:
                    await self._socket.send(self._outbox[0])
                    self._outbox.popleft()  # only now: a cancelled send is made up for later
            except ConnectionClosed:
                self._outbox.clear()
                return False
        return True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no utterance is in flight; return False where it takes too long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, *, goodbye: bool) -> None:
        """Close the socket and wait for the reader."""
        if goodbye and not self.closed:
            self.session.close()
            await self.send()
        await self._socket.close()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        code, reason = 1006, ""
        try:
            while True:
                message = await self._socket.recv()
                self.last_message_s = time.perf_counter()
                self._deliver(self.session.receive(message))
                await self.send()
        except ConnectionClosed as closed:
            frame = closed.rcvd or closed.sent
            if frame is not None:
                code, reason = frame.code, frame.reason
        except Exception as error:  # a fault of this program: it must not look like the network's
            failure = CodecStreamError(f"reading from the server failed: {error!r}")
            failure.__cause__ = error
            self._deliver([UtteranceFailed(failure)])
            await self._socket.close(1011)
        finally:
            self.closed = True
            self._deliver(self.session.receive_eof(code, reason))
            self._idle.set()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            receiver = self._receiver
            if isinstance(event, UtteranceEnded):
                self._receiver = None
                self._idle.set()
            if receiver is not None:
                receiver._receive(event, self.session)


class Utterance:
    """One spoken text: an asynchronous iterator of :class:`AudioChunk`, for one task.

    Iteration ends after the last chunk of a complete utterance, or at once when it is cancelled.
    Any other end raises an error of :mod:`codecstream.errors`. A failure that the server reports,
    or a packet that cannot be right, raises at once and drops the audio not yet taken; counts
    that do not add up raise after the last chunk.
    """

    def __init__(
        self,
        client: Client,
        text: Text,
        config: wire.SessionConfig,
        pipeline: DecodePipeline,
        options: _Options,
    ) -> None:
        self.text = text
        self.config = config
        self._client = client
        self._pipeline = pipeline
        self._options = options
        self._begin_task: asyncio.Task[None] | None = None
        self._connection: _Connection | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._early: list[Event] = []
        self._frames_received = 0
        self._utterance_index: int | None = None
        self._cancelled = False
        self._failed_remotely = False
        self._notices: list[str] = []

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not, and the last chunk was taken."""
        return self._pipeline.over

    @property
    def result(self) -> UtteranceResult:
        """How it ended.

        Raises:
            LocalProtocolError: It has not ended yet.
        """
        if not self.over:
            raise LocalProtocolError("the utterance has no result before it has ended")
        pipeline = self._pipeline
        geometry = self._options.program.geometry
        return UtteranceResult(
            status=_status(pipeline.error, self._cancelled),
            error=pipeline.error,
            frames_received=self._frames_received,
            frames_decoded=pipeline.frames_decoded,
            sentences=pipeline.sentences,
            notices=tuple(self._notices),
            metrics=summarise(pipeline.timeline, geometry.sample_rate_hz),
            timeline=tuple(pipeline.timeline),
        )

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        if self._begin_task is None and not self.over:
            # A task of its own: a caller that is cancelled here leaves no half request behind.
            self._begin_task = asyncio.create_task(self._begin(), name="codecstream-begin")
        chunk = await self._pipeline.get()
        if chunk is None:
            if not self._cancelled:  # else whoever cancelled it does that
                await self._settle()
            if self._pipeline.error is not None:
                raise self._pipeline.error
            raise StopAsyncIteration
        return chunk

    async def _begin(self) -> None:
        try:
            connection = await self._client._start(self)
        except CodecStreamError as error:
            self._pipeline.stop(error)
            return
        except Exception as error:
            failure = CodecStreamError(f"the utterance could not start: {error!r}")
            failure.__cause__ = error
            self._pipeline.stop(failure)
            return
        self._connection = connection
        early, self._early = self._early, []
        for event in early:
            self._pipeline.feed(event)
        if self.over:  # cancelled meanwhile: _settle() tells the server
            return
        self._pipeline.start()
        self._helpers.append(asyncio.create_task(self._watch(connection), name="codecstream-watch"))
        if not isinstance(self.text, str):
            pieces = self._send_pieces(connection, self.text)
            self._helpers.append(asyncio.create_task(pieces, name="codecstream-text"))

    async def _send_pieces(self, connection: _Connection, pieces: AsyncIterable[str]) -> None:
        try:
            async for piece in pieces:
                if not connection.serves(self):
                    return  # it ended before its text did; what follows belongs to nothing
                connection.session.send_text(piece)
                await connection.send()
            if connection.serves(self):
                connection.session.flush()
                await connection.send()
        except LocalProtocolError:
            pass  # cancelled before its text was complete
        except Exception as error:  # the caller's iterator failed: the caller gets it
            failure = CodecStreamError(f"the text's iterator failed: {error!r}")
            failure.__cause__ = error
            self._pipeline.stop(failure)
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def _watch(self, connection: _Connection) -> None:
        """End the utterance when its text is complete and the server stays silent for too long."""
        limit_s = self._options.idle_timeout_s
        while connection.serves(self):
            silent_s = time.perf_counter() - connection.last_message_s
            if silent_s < limit_s or connection.session.client_state is not ClientState.FLUSHED:
                await asyncio.sleep(max(limit_s - silent_s, limit_s / 10))
            elif not self._pipeline.waiting_for_frames:
                await asyncio.sleep(limit_s / 10)  # the caller first gets what has come
            else:
                error = IncompleteError(
                    f"nothing came from the server for {limit_s:g} s "
                    f"after {self._frames_received} frames",
                    utterance_index=self._utterance_index,
                    frames_received=self._frames_received,
                )
                self._pipeline.stop(error)
                return

    def _receive(self, event: Event, session: Session) -> None:
        """Take an event from the connection's reader. Never waits."""
        self._frames_received = session.frames_received
        self._utterance_index = session.utterance_index
        if isinstance(event, Notice):
            self._notices.append(event.text)
            return
        if isinstance(event, UtteranceFailed):
            self._failed_remotely = True
        if self._connection is None:
            self._early.append(event)
        else:
            self._pipeline.feed(event)

    def _forget_early_events(self) -> None:
        """The request did not go out: the end of that connection is not this utterance's."""
        self._early.clear()
        self._notices.clear()
        self._failed_remotely = False

    def _stop_now(self) -> None:
        if not self.over:
            self._cancelled = self._pipeline.error is None
            self._pipeline.stop()

    async def _settle(self) -> None:
        """Stop what still works for this utterance, here and on the server."""
        if self._begin_task is not None and not self._begin_task.done():
            await asyncio.wait([self._begin_task])
        for task in self._helpers:
            task.cancel()
        if self._helpers:
            await asyncio.wait(self._helpers)
        connection = self._connection
        if connection is not None and connection.serves(self) and not self._failed_remotely:
            with contextlib.suppress(LocalProtocolError):  # the socket closed just now
                connection.session.cancel()
            await connection.send()
        await self._pipeline.join()


def _status(error: CodecStreamError | None, cancelled: bool) -> Status:
    if error is None:
        return "cancelled" if cancelled else "complete"
    if isinstance(error, IncompleteError):
        return "incomplete"
    if isinstance(error, StreamMismatchError):
        return "refused"
    if isinstance(error, ServerError) and error.refused:
        return "refused"
    return "failed"
