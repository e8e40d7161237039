"""The asyncio client: text out, sound in.

::

    program = codecstream.load_program("decoder-onnx")
    async with codecstream.connect("ws://host:8000/v1/audio/speech/stream", program) as client:
        async for chunk in client.speak("Hello.", voice="vivian"):
            player.write(chunk.pcm)                  # float32 [samples] at 24 kHz

Three loops never wait for each other: one task reads the socket for as long as the connection
lives, one worker thread decodes, and the caller takes chunks when it likes. Decoded audio is
bounded (``max_ahead_s``); codes are not, at 400 bytes per second of speech.

With a policy, playback begins as early as it can without running dry::

    policy = AdaptivePolicy.for_program(program)         # keep it: it learns
    with Player(24_000) as player:
        async with connect(url, program, policy=policy, ahead_s=player.ahead_s) as client:
            async for chunk in client.speak("Hello."):   # from when playback is to begin
                await asyncio.to_thread(player.write, chunk.pcm)
            await asyncio.to_thread(player.drain)

:mod:`codecstream.sync_client` is the same for programs without asyncio.
"""

from __future__ import annotations

import asyncio
import os
import ssl as ssl_module
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from codecstream import wire
from codecstream.capture import Capture
from codecstream.connection import Connection
from codecstream.errors import LocalProtocolError
from codecstream.observe import Observer, Observers
from codecstream.options import Options, Reconnect
from codecstream.pacing import Ahead
from codecstream.pipeline import AudioChunk
from codecstream.policy import StartPolicy
from codecstream.runtimes import Program
from codecstream.sampling import UtteranceSampler
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream.speech import UtteranceResult
from codecstream.utterance import Text, Utterance

__all__ = ["AudioChunk", "Client", "Reconnect", "Utterance", "UtteranceResult", "connect"]


def connect(
    url: str,
    program: Program,
    *,
    schedule: Ramp | Iterable[int] = DEFAULT_RAMP,
    policy: StartPolicy | None = None,
    ahead_s: Ahead | None = None,
    config: wire.SessionConfig | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: ssl_module.SSLContext | None = None,
    proxy: str | Literal[True] | None = None,
    compression: Literal["deflate"] | None = None,
    on_gap: Literal["stop", "reset"] = "stop",
    open_timeout_s: float = 10.0,
    idle_timeout_s: float = 30.0,
    stall_timeout_s: float | None = 20.0,
    drain_timeout_s: float = 2.0,
    ping_interval_s: float | None = 20.0,
    ping_timeout_s: float | None = 20.0,
    reconnect: Reconnect | None = None,
    max_audio_s: float | None = 7200.0,
    max_ahead_s: float = 10.0,
    max_message_bytes: int = wire.MAX_PACKET_BYTES,
    observer: Observer | None = None,
    capture: Capture | str | os.PathLike[str] | None = None,
    sampler: UtteranceSampler | None = None,
) -> Client:
    """Return a client that connects when it is entered with ``async with``.

    Args:
        url: ``ws://`` or ``wss://`` address of the server's codec-stream endpoint.
        program: The decoder program, from :func:`codecstream.load_program`.
        schedule: Frames per chunk; the last size repeats.
        policy: Decides instead, by what it measures, how many frames go into each chunk and when
            playback begins: ``AdaptivePolicy()`` of :mod:`codecstream.policy`. Chunks are handed
            out from the moment at which playback is to begin, and again after it ran dry, so
            play them at once. One policy belongs to one client. None keeps to ``schedule``.
        ahead_s: Tells the policy, and ``result.frames_played``, how much sound the output has not
            played yet: a player's ``player.ahead_s``, or what answers like it. None: each chunk
            is taken to be played at once and without a break.
        config: The session's settings; ``speak`` may override them per utterance.
        headers: Extra headers of the handshake, such as ``{"Authorization": "Bearer ..."}``.
        ssl: TLS settings for ``wss://``; None for the system's defaults.
        proxy: A proxy's address, or True for that of the environment; None connects directly,
            whatever the environment says.
        compression: ``"deflate"`` to offer it to the server. It saves little of 500 bytes per
            second and costs several times the CPU; see ``benchmarks/README.md``.
        on_gap: What to do when a packet is missing: ``"stop"`` the utterance before anything
            behind the gap is decoded, or ``"reset"`` the decoder, go on, and fail at the end.
        open_timeout_s: Longest time for connecting and the handshake.
        idle_timeout_s: Longest time without a message from the server while it is its turn, and
            longest time that it may take no message of ours.
        stall_timeout_s: Longest time without a frame while it is the server's turn, whatever
            else comes; the first frame counts, too. None to rely on ``idle_timeout_s``.
        drain_timeout_s: Longest time to wait for the server's last messages after a failed or
            cancelled utterance; then the connection is replaced. Also for the closing handshake.
        ping_interval_s: Time between pings, which find a dead connection; None for no pings.
        ping_timeout_s: Longest time to wait for a ping's answer; None not to look at it.
        reconnect: When to try again after the connection was lost: ``Reconnect()``, or with
            other numbers. An utterance is asked for again only while none of its audio was
            handed out. None never does, except on a connection that the server had closed
            before the request reached it. The first connection, on entering, is not retried.
        max_audio_s: Longest utterance; it is cut off there. None for no limit.
        max_ahead_s: Decoded audio kept for the caller, in seconds; at least one chunk.
        max_message_bytes: Largest message accepted; the default is the protocol's largest packet.
        observer: Is told of messages, chunks and ends; see :mod:`codecstream.observe`.
        capture: A file to record all messages in, with their times: a path, or a
            :class:`codecstream.capture.Capture`. Text and headers are left out unless asked.
        sampler: Keeps codes and sound of some utterances, a file for each sentence, see
            :mod:`codecstream.sampling`. One that is cancelled is not kept.

    Raises:
        ValueError: The URL is no WebSocket's, an option is out of its range, or the schedule
            cannot be used with the program.
    """
    return Client(
        Options(
            url=url,
            program=program,
            schedule=Ramp.of(schedule),
            config=config or wire.SessionConfig(),
            headers=dict(headers or {}),
            ssl=ssl,
            proxy=proxy,
            compression=compression,
            on_gap=on_gap,
            open_timeout_s=open_timeout_s,
            idle_timeout_s=idle_timeout_s,
            stall_timeout_s=stall_timeout_s,
            drain_timeout_s=drain_timeout_s,
            ping_interval_s=ping_interval_s,
            ping_timeout_s=ping_timeout_s,
            reconnect=reconnect,
            max_audio_s=max_audio_s,
            max_ahead_s=max_ahead_s,
            max_message_bytes=max_message_bytes,
            observers=Observers(observer),
            capture=Capture.of(capture),
            policy=policy,
            ahead_s=ahead_s,
            sampler=sampler,
        )
    )


class Client:
    """A connection to a talker server that speaks utterances one after another.

    When the server closed the connection between utterances, as it does after 30 idle seconds,
    the next utterance opens a new one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._connection: Connection | None = None
        self._utterance: Utterance | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._starting = asyncio.Lock()  # one utterance at a time asks for the connection
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Client:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
            OSError: The capture's file cannot be written, or exists.
        """
        capture = self._options.capture
        if capture is not None:
            capture.open()
        try:
            self._connection = await Connection.open(self._options)
        except BaseException:
            if capture is not None:
                capture.release()
            raise
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
        config = self._options.configured(settings)
        return Utterance(text, config, self._options, self._open_worker(), self._start)

    def pause(self) -> None:
        """Hand out no chunk of the utterance in flight until :meth:`resume`; see there.

        Frames are still received, and decoded until ``max_ahead_s`` of audio wait. Nothing is
        lost and nothing comes twice. Does nothing where no utterance is in flight; the next
        utterance is not paused.
        """
        if self._utterance is not None:
            self._utterance.pause()

    def resume(self) -> None:
        """Hand out chunks again, from where it was paused."""
        if self._utterance is not None:
            self._utterance.resume()

    async def cancel(self) -> None:
        """Stop the utterance in flight: nothing more of it is decoded or handed out.

        Its iteration ends at once, with ``result.status == "cancelled"``. Returns when the
        connection is free again; does nothing where no utterance is in flight.
        """
        utterance = self._utterance
        if utterance is not None:
            utterance.stop_now()
            await utterance.settle()
            async with self._starting:
                if self._connection is not None:
                    await self._release(self._connection)

    async def close(self) -> None:
        """End the utterance in flight, say goodbye and close. May be called twice.

        A caller that is cancelled while it waits is cancelled; closing goes on without it.
        """
        if self._closing is None or self._closing.done():
            self._closing = asyncio.create_task(self._close(), name="codecstream-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        worker, self._worker = self._worker, None
        if self._utterance is not None:
            self._utterance.stop_now()
            await self._utterance.settle()
        async with self._starting:  # a start in flight sees that the client is closed
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close(goodbye=True)
        if worker is not None:
            worker.shutdown()  # idle by now
        if self._options.capture is not None:
            self._options.capture.release()

    def _open_worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            raise LocalProtocolError("the client is not open: use it inside 'async with'")
        return self._worker

    async def _start(self, utterance: Utterance) -> None:
        """Send the request of ``utterance``, on a new connection where there is none.

        Raises:
            LocalProtocolError: Another utterance is in flight, or the client was closed.
            ConnectionFailedError: The server cannot be reached.
        """
        async with self._starting:
            self._open_worker()
            previous = self._utterance
            if previous is not None and previous is not utterance:
                if not previous.over:
                    raise LocalProtocolError(
                        "an utterance is still in flight: "
                        "iterate it to its end or cancel() it first"
                    )
                await previous.settle()
            self._utterance = utterance
            if self._connection is not None:
                await self._release(self._connection)
            if self._connection is None:
                self._connection = await Connection.open(self._options)
            utterance.connection = self._connection
            await self._connection.start(utterance.speech, utterance.speech.config, utterance.wake)

    async def _release(self, connection: Connection) -> None:
        """Let the server finish what it was sending; give up the connection where it does not."""
        free = await connection.wait_idle(self._options.drain_timeout_s)
        if connection.closed or not free:
            await connection.close(goodbye=False)
            if self._connection is connection:
                self._connection = None
