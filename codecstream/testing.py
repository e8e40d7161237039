"""Servers that speak the codec-stream protocol, for tests, demos and fault reports.

:class:`ReplayServer` serves recorded codes at a pace, with jitter and faults on demand:

::

    async with ReplayServer([Recording(codes, text="Hello.")], pace=1.0) as server:
        async with codecstream.connect(server.url, program) as client:
            ...

:class:`ScriptedServer` follows a coroutine of yours, message by message, for faults that no
sane server has. :class:`codecstream.replay.CaptureServer` serves what a client has recorded, and
:class:`codecstream.fault_proxy.FaultProxy` stands between any client and any server and does what
networks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl as ssl_module
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codecstream import wire
from codecstream.errors import WireError
from codecstream.geometry import QWEN3_TTS_12HZ, CodecGeometry

if TYPE_CHECKING:
    from websockets.asyncio.server import Server, ServerConnection

__all__ = ["Fault", "Peer", "Recording", "ReplayServer", "ScriptedServer"]

CONFIG_TIMEOUT_S = 10.0
PATH = "/v1/audio/speech/stream"


@dataclass(frozen=True)
class Recording:
    """An utterance to serve: integer codes ``[frames, codebooks]`` per sentence, and its text."""

    sentences: tuple[NDArray[np.int16], ...]
    text: str

    def __init__(self, *sentences: ArrayLike, text: str = "") -> None:
        """Keep the codes; ids outside the codebook are allowed, so that faults can be served."""
        arrays = tuple(np.asarray(codes) for codes in sentences)
        for array in arrays:
            if array.ndim != 2 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"codes must be integers [frames, codebooks], not {array.dtype} {array.shape}"
                )
            if array.size and not -0x8000 <= int(array.min()) <= int(array.max()) <= 0x7FFF:
                raise ValueError("codes do not fit the wire's 16 bits")
        object.__setattr__(self, "sentences", tuple(a.astype(np.int16) for a in arrays))
        object.__setattr__(self, "text", text)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at one packet of one utterance.

    Attributes:
        kind: ``drop``, ``repeat`` or ``truncate`` the packet; ``code``: put ``value`` into it;
            ``stall``: wait ``seconds`` first; ``error``: fail with ``message`` instead of it;
            ``close`` the WebSocket with ``value`` as code, or ``abort`` the TCP connection,
            instead of it; ``count``: add ``value`` to ``codec.done.total_frames``.
        packet: Index of the packet within the sentence; ``count`` needs none.
        utterance: Index of the utterance on its connection.
    """

    kind: Literal["drop", "repeat", "truncate", "code", "stall", "error", "close", "abort", "count"]
    packet: int = 0
    utterance: int = 0
    value: int = 0
    seconds: float = 0.0
    message: str = "generation failed"


class Peer:
    """The server's end of one connection: typed messages in and out."""

    def __init__(
        self, socket: ServerConnection, geometry: CodecGeometry, decoder_id: str | None
    ) -> None:
        self.socket = socket
        self._geometry = geometry
        self._decoder_id = decoder_id

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the client's handshake."""
        assert self.socket.request is not None
        return self.socket.request.headers

    async def receive(self) -> wire.ClientMessage | wire.UnknownMessage:
        """Return the client's next message.

        Raises:
            WireError: It is not one of the protocol's.
        """
        message = await self.socket.recv()
        if isinstance(message, bytes):
            raise WireError(f"a client sent {len(message)} bytes of binary data")
        return wire.decode_client_message(message)

    async def request(self) -> str:
        """Read up to ``input.done`` and return the utterance's text."""
        text = ""
        while True:
            message = await self.receive()
            if isinstance(message, wire.InputText):
                text += message.text
            elif isinstance(message, wire.InputDone):
                return text

    async def send(self, message: wire.ServerMessage | bytes | str) -> None:
        """Send a message, or raw bytes or text as they are."""
        if not isinstance(message, (bytes, str)):
            message = wire.encode_message(message)
        await self.socket.send(message)

    async def start(self, utterance: int = 0, sentence: int = 0, **changes: Any) -> None:
        """Send ``codec.start``; ``changes`` replace fields of it."""
        fields: dict[str, Any] = {
            "version": wire.PROTOCOL_VERSION,
            "codebooks": self._geometry.codebooks,
            "codebook_size": self._geometry.codebook_size,
            "frame_rate_hz": self._geometry.frame_rate_hz,
            "sample_rate": self._geometry.sample_rate_hz,
            "decoder_id": self._decoder_id,
            "header_format": wire.HEADER_FORMAT,
            "utterance_index": utterance,
            "sentence_index": sentence,
            "sentence_text": "",
        }
        await self.send(wire.CodecStart(**{**fields, **changes}))

    async def packet(self, seq: int, codes: ArrayLike | None = None, flags: int = 0) -> None:
        """Send a packet; without ``codes``, one of no frames."""
        if codes is None:
            codes = np.empty((0, self._geometry.codebooks), np.int16)
        await self.send(wire.encode_packet(seq, codes, flags))

    async def packets(self, codes: NDArray[Any], *, first_seq: int = 0, eos: bool = True) -> None:
        """Send one packet per frame, the last one with EOS."""
        for i in range(len(codes)):
            last = eos and i == len(codes) - 1
            await self.packet(first_seq + i, codes[i : i + 1], wire.Flags.EOS if last else 0)

    async def done(self, utterance: int = 0, sentence: int = 0, **fields: Any) -> None:
        """Send ``codec.done``."""
        message = wire.CodecDone(utterance_index=utterance, sentence_index=sentence, **fields)
        await self.send(message)

    async def error(self, message: str) -> None:
        """Send ``error``, as before any frame of an utterance."""
        await self.send(wire.ErrorMessage(message))

    async def session_done(self, utterance: int = 0, sentences: int = 1) -> None:
        """Send ``session.done``."""
        await self.send(wire.SessionDone(utterance, sentences))

    async def speak(self, codes: NDArray[Any], utterance: int = 0) -> None:
        """Send a whole, correct utterance of one sentence."""
        await self.start(utterance)
        await self.packets(codes)
        await self.done(utterance, total_frames=len(codes), seq_last=len(codes) - 1)
        await self.session_done(utterance)

    async def close(self, code: int, reason: str = "") -> None:
        """Close with any code: 1005 is a close frame without one, 1006 the end without a frame."""
        await close_with(self.socket, code, reason)

    def abort(self) -> None:
        """Cut the TCP connection."""
        self.socket.transport.abort()


async def close_with(socket: ServerConnection, code: int, reason: str = "") -> None:
    """Close a connection so that its client sees ``code``, even one that no frame may carry."""
    if code == 1006:
        socket.transport.close()  # what was sent before still arrives
        await socket.wait_closed()
    elif code == 1005:
        socket.protocol.send_close()
        socket.send_data()
        await socket.wait_closed()
    else:
        await socket.close(code, reason)


Script = Callable[[Peer], Awaitable[None]]


class ScriptedServer:
    """A WebSocket server on loopback that runs ``script`` for every connection.

    The connection is closed with code 1000 when the script returns.

    Args:
        script: A coroutine function that gets the server's end of a connection.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        geometry: What ``codec.start`` announces.
        decoder_id: The same.
        ssl: TLS settings, for ``wss://``.
        **options: Passed to ``websockets.serve``.

    Attributes:
        connections: Connections accepted so far.
        failures: Exceptions that left a script; a test should find this empty.
    """

    def __init__(
        self,
        script: Script,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        geometry: CodecGeometry | None = None,
        decoder_id: str | None = QWEN3_TTS_12HZ,
        ssl: ssl_module.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self._script = script
        self._host, self._port = host, port
        self._geometry = geometry or CodecGeometry()
        self._decoder_id = decoder_id
        self._ssl = ssl
        self._options = options
        self._server: Server | None = None
        self.connections = 0
        self.failures: list[Exception] = []

    @property
    def url(self) -> str:
        """Address of the endpoint, with the port that was given by the system."""
        assert self._server is not None, "the server is not running"
        port = next(iter(self._server.sockets)).getsockname()[1]
        scheme = "ws" if self._ssl is None else "wss"
        return f"{scheme}://{self._host}:{port}{PATH}"

    async def __aenter__(self) -> ScriptedServer:
        from websockets.asyncio.server import serve

        options: dict[str, Any] = {
            "compression": None,
            "max_size": wire.MAX_CONFIG_BYTES,
            "close_timeout": 1.0,
            **self._options,
        }
        self._server = await serve(self._handle, self._host, self._port, ssl=self._ssl, **options)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def serve_forever(self) -> None:
        """Serve until cancelled."""
        assert self._server is not None
        await self._server.serve_forever()

    async def _handle(self, socket: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        self.connections += 1
        try:
            await self._script(Peer(socket, self._geometry, self._decoder_id))
        except ConnectionClosed:
            pass  # the client left; its own matter
        except Exception as error:
            self.failures.append(error)


class ReplayServer(ScriptedServer):
    """Serves recorded codes as a talker would.

    A request is answered with the recording of that text, else with the next one in turn.

    Args:
        recordings: What to serve; at least one.
        pace: Time per frame over the frame's duration: 1.0 is real time, 0.5 twice as fast, 0 at
            once.
        jitter_ms: Every packet is late by up to this much, from a seeded generator; their order
            is kept.
        faults: What goes wrong.
        frames_per_packet: The talker makes one frame per step.
        eos: Whether EOS rides on the last packet or comes ``"alone"``.
        idle_timeout_s: Time without a message, between utterances, after which it closes.
        seed: Seed of the jitter.
        **options: As for :class:`ScriptedServer`.
    """

    def __init__(
        self,
        recordings: Iterable[Recording],
        *,
        pace: float = 1.0,
        jitter_ms: float = 0.0,
        faults: Iterable[Fault] = (),
        frames_per_packet: int = 1,
        eos: Literal["last", "alone"] = "last",
        idle_timeout_s: float = 30.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(self._converse, **options)
        self._recordings = list(recordings)
        if not self._recordings:
            raise ValueError("a replay server needs at least one recording")
        if pace < 0 or jitter_ms < 0 or frames_per_packet < 1:
            raise ValueError("pace and jitter cannot be negative, a packet has at least one frame")
        self._pace = pace
        self._jitter_s = jitter_ms / 1000
        self._faults = list(faults)
        self._frames_per_packet = frames_per_packet
        self._eos_alone = eos == "alone"
        self._idle_timeout_s = idle_timeout_s
        self._random = random.Random(seed)

    async def __aenter__(self) -> ReplayServer:
        await super().__aenter__()
        return self

    async def _converse(self, peer: Peer) -> None:
        """One connection: the server's side of the protocol."""
        talker = _Talker(self, peer)
        configured = False
        try:
            while True:
                limit_s = self._idle_timeout_s if configured else CONFIG_TIMEOUT_S
                try:
                    message = await asyncio.wait_for(peer.receive(), limit_s)
                except asyncio.TimeoutError:
                    if talker.busy:
                        continue
                    await peer.error("Idle timeout: no message received")
                    return
                except WireError as error:
                    await peer.error(str(error))
                    continue
                if isinstance(message, wire.SessionConfig):
                    configured = True
                    if talker.busy or talker.text:
                        await peer.error("session.config inside an utterance")
                elif isinstance(message, wire.SessionClose):
                    return
                elif not configured:
                    await peer.error("the first message must be session.config")
                    return
                elif isinstance(message, wire.InputText):
                    talker.text += message.text
                elif isinstance(message, wire.InputDone):
                    talker.flush()
                elif isinstance(message, wire.InputCancel):
                    await talker.cancel()
        finally:
            await talker.stop()

    async def _generate(
        self, peer: Peer, utterance: int, text: str, cancelled: asyncio.Event
    ) -> None:
        """Answer one request. ``cancelled`` is looked at between packets, as a talker would."""
        sentences = self._select(text, utterance).sentences if text.strip() else ()
        begun = 0
        for sentence, codes in enumerate(sentences):
            begun += 1
            if not await self._stream(peer, utterance, sentence, codes, cancelled):
                break
        await peer.session_done(utterance, begun)

    def _select(self, text: str, utterance: int) -> Recording:
        for recording in self._recordings:
            if recording.text and recording.text.strip() == text.strip():
                return recording
        return self._recordings[utterance % len(self._recordings)]

    async def _stream(
        self,
        peer: Peer,
        utterance: int,
        sentence: int,
        codes: NDArray[np.int16],
        cancelled: asyncio.Event,
    ) -> bool:
        """Send one sentence; return False where the utterance ends with it."""
        sent = 0
        seq = -1
        await peer.start(utterance, sentence)
        async for packet in self._paced(codes, cancelled):
            if cancelled.is_set():
                await peer.packet(seq + 1, flags=wire.Flags.EOS)
                await peer.done(
                    utterance, sentence, total_frames=sent, seq_last=seq + 1, cancelled=True
                )
                return False
            seq += 1
            if not await self._send_packet(peer, utterance, seq, packet):
                await peer.done(
                    utterance, sentence, total_frames=sent, seq_last=seq - 1, error=True
                )
                return False
            sent += len(packet.codes)
        extra = sum(f.value for f in self._faults_at(utterance, None) if f.kind == "count")
        await peer.done(utterance, sentence, total_frames=sent + extra, seq_last=seq)
        return True

    async def _paced(
        self, codes: NDArray[np.int16], cancelled: asyncio.Event
    ) -> AsyncIterator[wire.Packet]:
        """Yield the sentence's packets when their last frame is due, or at once when cancelled."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        frame_s = self._pace / self._geometry.frame_rate_hz
        step = self._frames_per_packet
        for start in range(0, len(codes), step):
            part = codes[start : start + step]
            due_s = started_s + frame_s * (start + len(part))
            due_s += self._random.uniform(0, self._jitter_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(cancelled.wait(), max(0.0, due_s - loop.time()))
            last = start + step >= len(codes)
            flags = wire.Flags.EOS if last and not self._eos_alone else wire.Flags(0)
            yield wire.Packet(0, flags, part)
        if self._eos_alone or not len(codes):
            yield wire.Packet(0, wire.Flags.EOS, codes[:0])

    async def _send_packet(self, peer: Peer, utterance: int, seq: int, packet: wire.Packet) -> bool:
        """Send a packet through its faults; return False where generation fails instead."""
        codes = packet.codes
        times, cut = 1, 0
        for fault in self._faults_at(utterance, seq):
            if fault.kind == "stall":
                await asyncio.sleep(fault.seconds)
            elif fault.kind == "drop":
                times = 0
            elif fault.kind == "repeat":
                times = 2
            elif fault.kind == "truncate":
                cut = 1
            elif fault.kind == "code":
                codes = codes.copy()
                codes[:1, :1] = fault.value
            elif fault.kind == "error":
                await peer.send(
                    wire.ErrorMessage(fault.message, partial_audio=True, action="discard")
                )
                return False
            elif fault.kind == "close":
                await peer.socket.close(fault.value)
            elif fault.kind == "abort":
                peer.abort()
        data = wire.encode_packet(seq, codes, packet.flags)
        for _ in range(times):
            await peer.send(data[: len(data) - cut])
        return True

    def _faults_at(self, utterance: int, packet: int | None) -> Sequence[Fault]:
        return [
            fault
            for fault in self._faults
            if fault.utterance == utterance and (packet is None or fault.packet == packet)
        ]


class _Talker:
    """What a replay server keeps for one connection: the text so far, and requests in order."""

    def __init__(self, server: ReplayServer, peer: Peer) -> None:
        self._server = server
        self._peer = peer
        self._requests: asyncio.Queue[tuple[int, str, asyncio.Event]] = asyncio.Queue()
        self._flags: list[asyncio.Event] = []  # of the requests that are not answered yet
        self._flushed = 0
        self._task = asyncio.create_task(self._work())
        self.text = ""

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._flags)

    def flush(self) -> None:
        """Take the text as a request."""
        cancelled = asyncio.Event()
        self._flags.append(cancelled)
        self._requests.put_nowait((self._flushed, self.text, cancelled))
        self._flushed += 1
        self.text = ""

    async def cancel(self) -> None:
        """Abort what is in flight; with nothing in flight, drop the text and say so."""
        self.text = ""
        if not self.busy:
            await self._peer.send(wire.InputCancelled())
        for cancelled in self._flags:
            cancelled.set()

    async def stop(self) -> None:
        """End the work."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _work(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                index, text, cancelled = await self._requests.get()
                await self._server._generate(self._peer, index, text, cancelled)
                self._flags.remove(cancelled)
        except ConnectionClosed:
            pass  # the client left; its own matter
        except Exception as error:
            self._server.failures.append(error)
            await self._peer.socket.close(1011, "replay failed")
