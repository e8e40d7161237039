"""The client's side of a session, without I/O: messages in, events out.

A shell (``client.py``) moves bytes between a socket and a :class:`Session`; this module imports
no socket, no event loop, no thread and no clock, so every order of messages can be tested as it
is.

::

    session = Session(CodecGeometry(), "qwen3_tts_tokenizer_v2_12hz")
    session.configure(SessionConfig(voice="vivian"))
    session.send_text("Hello.")
    session.flush()
    for text in session.data_to_send(): ...      # to the socket
    for event in session.receive(message): ...   # from the socket

Both sides are state machines given as tables (``LOCAL`` and ``REMOTE``). A step that this
program may not take raises ``LocalProtocolError``. A step that the server may not take fails the
utterance, never the parser: the session then swallows what is still in flight, up to the server's
``session.done``, and the connection can go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from codecstream import wire
from codecstream.codes import check_codes
from codecstream.errors import (
    CodecStreamError,
    IncompleteError,
    InvalidCodesError,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StreamMismatchError,
    TooLongError,
    WireError,
)
from codecstream.events import (
    DecoderReset,
    Event,
    Frames,
    Notice,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.geometry import CodecGeometry
from codecstream.states import LOCAL, REMOTE, ClientState, Local, Remote, ServerState

__all__ = ["Session"]


_NO_MESSAGE = "the server reported an error without a message"


@dataclass(slots=True)
class _Sentence:
    """Counts of the sentence that is being received."""

    next_seq: int = 0
    frames: int = 0
    packets: int = 0
    eos: bool = False


@dataclass(slots=True)
class _Utterance:
    """What is known of the utterance in flight."""

    says_something: bool = False
    index: int | None = None
    sentence_index: int | None = None
    frames: int = 0
    sentences: int = 0
    proven_sentences: int = 0  # with EOS, and counts that match
    cancel_sent: bool = False
    cancel_confirmed: bool = False
    discarding: bool = False  # after a failure or a cancel: swallow until session.done
    failed: CodecStreamError | None = None  # reported at once
    fault: CodecStreamError | None = None  # reported at the end, after the audio
    sentence: _Sentence = field(default_factory=_Sentence)


class Session:
    """One connection's protocol state.

    Args:
        geometry: What the decoder artifact decodes; every ``codec.start`` is held against it.
        decoder_id: The artifact's codec, or None to accept any.
        on_gap: ``"stop"`` fails an utterance at the first missing packet, before any later frame
            is delivered. ``"reset"`` resets the decoder, goes on, and fails it at the end.
        max_frames: Frames of an utterance after which it is cut off, or None.
    """

    def __init__(
        self,
        geometry: CodecGeometry,
        decoder_id: str | None = None,
        *,
        on_gap: str = "stop",
        max_frames: int | None = None,
    ) -> None:
        if on_gap not in ("stop", "reset"):
            raise ValueError(f"on_gap must be 'stop' or 'reset', not {on_gap!r}")
        self._geometry = geometry
        self._decoder_id = decoder_id
        self._on_gap = on_gap
        self._max_frames = max_frames
        self._outgoing: list[str] = []
        self._utterance = _Utterance()
        self._splits_sentences = False
        self._unanswered_cancels = 0
        self._last_index: int | None = None  # of the utterances before this one
        self._last_error: str | None = None
        self.client_state = ClientState.IDLE
        self.server_state = ServerState.QUIET

    @property
    def frames_received(self) -> int:
        """Valid frames of the current or last utterance."""
        return self._utterance.frames

    @property
    def utterance_index(self) -> int | None:
        """The server's index of the current or last utterance, once known."""
        return self._utterance.index

    # This side's steps

    @property
    def in_utterance(self) -> bool:
        """Whether something was sent of an utterance that is not over."""
        return self.client_state not in (ClientState.IDLE, ClientState.CLOSED)

    @property
    def takes_text(self) -> bool:
        """Whether text of an utterance, or of the next one, can be sent now."""
        return self.client_state in (ClientState.IDLE, ClientState.COMPOSING)

    @property
    def has_data_to_send(self) -> bool:
        """Whether :meth:`data_to_send` has something."""
        return bool(self._outgoing)

    def data_to_send(self) -> list[str]:
        """Return the text messages to send now, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def configure(self, config: wire.SessionConfig) -> None:
        """Send ``session.config``; it holds for all utterances until the next one.

        Raises:
            LocalProtocolError: An utterance is in flight.
        """
        text = wire.encode_message(config)
        self._local(Local.CONFIG)
        self._splits_sentences = config.split_granularity in ("sentence", "clause")
        self._outgoing.append(text)

    def send_text(self, text: str) -> None:
        """Send text of an utterance, in as many messages as its length needs.

        Raises:
            LocalProtocolError: The utterance is flushed or cancelled, the session is closed, or
                the text cannot be encoded.
        """
        pieces = [wire.encode_message(wire.InputText(piece)) for piece in wire.split_text(text)]
        self._compose(Local.TEXT)
        self._utterance.says_something |= bool(text.strip())
        self._outgoing += pieces

    def flush(self) -> None:
        """Say that the utterance's text is complete."""
        self._compose(Local.FLUSH)
        self._outgoing.append(wire.encode_message(wire.InputDone()))

    def cancel(self) -> None:
        """Abort the utterance in flight; what still comes of it is swallowed. Idempotent.

        Raises:
            LocalProtocolError: No utterance is in flight.
        """
        self._local(Local.CANCEL)
        utterance = self._utterance
        utterance.discarding = True
        if not utterance.cancel_sent:
            utterance.cancel_sent = True
            self._outgoing.append(wire.encode_message(wire.InputCancel()))

    def close(self) -> None:
        """Say goodbye; does nothing where the session is closed already."""
        if self.client_state is not ClientState.CLOSED:
            self._local(Local.CLOSE)
            self._outgoing.append(wire.encode_message(wire.SessionClose()))

    # The server's steps

    def receive(self, message: str | bytes) -> list[Event]:
        """Return what ``message``, text or binary, means. Never raises on what it holds."""
        try:
            if isinstance(message, bytes):
                return self._packet(wire.decode_packet(message, self._geometry.codebooks))
            return self._message(wire.decode_message(message))
        except WireError as error:
            return self._unreadable(error)

    def receive_eof(self, code: int, reason: str = "") -> list[Event]:
        """Return what the end of the connection means, with the WebSocket's close code."""
        active, flushed = self.in_utterance, self.client_state is ClientState.FLUSHED
        self.client_state, self.server_state = ClientState.CLOSED, ServerState.CLOSED
        self._outgoing.clear()
        if not active:
            return []
        utterance = self._utterance
        if utterance.failed is not None:
            return [self._end(closing=True)]
        if utterance.cancel_sent:
            return [Notice(f"closed with code {code} while cancelling"), self._end(closing=True)]
        proven = utterance.proven_sentences == utterance.sentences > 0
        if proven and flushed and utterance.fault is None and not self._splits_sentences:
            return [Notice(f"closed with code {code} before session.done"), self._end(closing=True)]
        why = f": {reason}" if reason else f": {self._last_error}" if self._last_error else ""
        error = IncompleteError(
            f"the connection closed with code {code} after {utterance.frames} frames, "
            f"before the utterance was complete{why}",
            close_code=code,
            **self._progress(),
        )
        utterance.failed = error
        return [UtteranceFailed(error), self._end(closing=True)]

    def _compose(self, step: Local) -> None:
        """Take a step that begins an utterance where none is in flight."""
        begins = self.client_state is ClientState.IDLE
        self._local(step)
        if begins:
            self._utterance = _Utterance()

    def _local(self, step: Local) -> None:
        state = LOCAL.get((self.client_state, step))
        if state is None:
            raise LocalProtocolError(
                f"cannot send {step.value} now: the session has state {self.client_state.value!r}"
            )
        self.client_state = state

    def _remote(self, step: Remote) -> bool:
        """Take the server's step; return whether it was allowed."""
        state = REMOTE.get((self.server_state, step))
        if state is None or not self.in_utterance:
            return False
        self.server_state = state
        return True

    def _out_of_order(self, step: Remote) -> list[Event]:
        if not self.in_utterance:
            return [Notice(f"{step.value} outside an utterance was passed over")]
        return self._fail(
            RemoteProtocolError(
                f"the server sent {step.value} in state {self.server_state.value!r}",
                **self._progress(),
            )
        )

    def _unreadable(self, cause: WireError) -> list[Event]:
        if not self.in_utterance:
            return [Notice(str(cause))]
        error = RemoteProtocolError(str(cause), **self._progress())
        error.__cause__ = cause
        return self._fail(error)

    def _message(self, message: wire.ServerMessage | wire.UnknownMessage) -> list[Event]:
        if isinstance(message, wire.CodecStart):
            return self._start(message)
        if isinstance(message, wire.CodecDone):
            return self._done(message)
        if isinstance(message, wire.SessionDone):
            return self._session_done(message)
        if isinstance(message, wire.ErrorMessage):
            return self._error(message)
        if isinstance(message, wire.InputCancelled):
            return self._input_cancelled()
        return [Notice(f"message of unknown type {wire.elide(message.type)!r} was passed over")]

    def _start(self, start: wire.CodecStart) -> list[Event]:
        if not self._remote(Remote.START):
            return self._out_of_order(Remote.START)
        self._unanswered_cancels = 0  # the server answers in order: no answer comes any more
        utterance = self._utterance
        utterance.sentences += 1
        utterance.sentence = _Sentence()
        if utterance.discarding:
            if utterance.index is None:
                utterance.index = start.utterance_index
            return []
        if problem := self._index_problem(start):
            return self._fail(RemoteProtocolError(problem, **self._progress()))
        if start.utterance_index is not None:
            utterance.index = start.utterance_index
        utterance.sentence_index = start.sentence_index
        events: list[Event] = []
        wanted = {
            "version": wire.PROTOCOL_VERSION,
            "codebooks": self._geometry.codebooks,
            "codebook_size": self._geometry.codebook_size,
            "sample_rate": self._geometry.sample_rate_hz,
            "frame_rate_hz": self._geometry.frame_rate_hz,
            "header_format": wire.HEADER_FORMAT,
            "decoder_id": self._decoder_id,
        }
        for name, value in wanted.items():
            offered = getattr(start, name)
            if value is None or offered == value:
                continue
            if offered is None:
                events.append(Notice(f"codec.start has no {name}; taken to be {value!r}"))
                continue
            return events + self._fail(
                StreamMismatchError(
                    f"the stream does not fit the decoder artifact: {name} is {offered!r}, "
                    f"the artifact needs {value!r}",
                    field=name,
                    wanted=value,
                    offered=offered,
                    **self._progress(),
                )
            )
        return [*events, SentenceStarted(start)]

    def _index_problem(self, start: wire.CodecStart) -> str | None:
        """Say why a sentence does not belong here; an index that is not given fits anywhere."""
        utterance = self._utterance
        index, sentence = start.utterance_index, start.sentence_index
        if index is not None:
            if self._is_over(index):
                return f"codec.start is for utterance {index}, which is over"
            if utterance.index not in (None, index):
                return f"codec.start is for utterance {index} within utterance {utterance.index}"
        before = utterance.sentence_index
        if sentence is not None and before is not None and sentence <= before:
            return f"codec.start is for sentence {sentence}, after sentence {before}"
        return None

    def _is_over(self, index: int | None) -> bool:
        """Whether this is the index of an utterance before this one."""
        return index is not None and self._last_index is not None and index <= self._last_index

    def _is_late(self, index: int | None) -> bool:
        """Whether a message is of an utterance before this one, of which nothing has come yet."""
        utterance = self._utterance
        nothing_came = not utterance.sentences and utterance.failed is None
        return self.in_utterance and nothing_came and self._is_over(index)

    def _packet(self, packet: wire.Packet) -> list[Event]:
        step = Remote.EOS if packet.eos else Remote.PACKET
        if not self._remote(step):
            return self._out_of_order(step)
        utterance, sentence = self._utterance, self._utterance.sentence
        if utterance.discarding:
            return []
        events: list[Event] = []
        ahead = (packet.seq - sentence.next_seq) % (wire.MAX_SEQ + 1)
        if ahead:
            error = SequenceError(
                f"packet {sentence.next_seq} was expected, packet {packet.seq} came",
                expected=sentence.next_seq,
                received=packet.seq,
                **self._progress(),
            )
            repeated = ahead > wire.MAX_SEQ // 2  # behind, on a circle of 2**32 numbers
            if not repeated and self._on_gap == "stop":
                return self._fail(error)
            utterance.fault = utterance.fault or error
            if repeated:
                self._undo_eos(step)
                return [Notice(f"packet {packet.seq} came again and was dropped")]
            events += [Notice(str(error)), DecoderReset()]
        try:
            codes = check_codes(packet.codes, self._geometry, seq=packet.seq)
        except InvalidCodesError as error:
            return self._fail(error)
        sentence.next_seq = (packet.seq + 1) % (wire.MAX_SEQ + 1)
        sentence.packets += 1
        sentence.frames += len(codes)
        before = utterance.frames
        utterance.frames += len(codes)
        sentence.eos = packet.eos
        if wire.Flags.RESET in packet.flags:
            events.append(DecoderReset())
        limit = self._max_frames
        if limit is not None and utterance.frames > limit:
            if limit > before:
                events.append(Frames(codes[: limit - before], packet.seq))
            return events + self._cut_off(limit)
        if len(codes):
            events.append(Frames(codes, packet.seq))
        return events

    def _cut_off(self, limit: int) -> list[Event]:
        seconds = limit / self._geometry.frame_rate_hz
        error = TooLongError(
            f"the utterance was cut off at {limit} frames ({seconds:g} s of audio): the limit "
            f"that this program set; the server did not end it",
            limit_frames=limit,
            **self._progress(),
        )
        return self._fail(error, after_audio=True)

    def _undo_eos(self, step: Remote) -> None:
        """A repeated packet does not end the stream, whatever its flags."""
        if step is Remote.EOS:
            self.server_state = ServerState.STREAMING

    def _done(self, done: wire.CodecDone) -> list[Event]:
        if self._is_late(done.utterance_index):
            return [Notice(f"a late codec.done, of utterance {done.utterance_index}")]
        utterance, sentence = self._utterance, self._utterance.sentence
        if done.cancelled:
            utterance.cancel_confirmed = True
        if not self._remote(Remote.DONE):
            return self._out_of_order(Remote.DONE)
        if utterance.discarding:
            return []
        for name in ("utterance_index", "sentence_index"):
            claimed = getattr(done, name)
            known = utterance.index if name == "utterance_index" else utterance.sentence_index
            if None not in (claimed, known) and claimed != known:
                text = f"codec.done has {name} {claimed}, codec.start had {known}"
                return self._fail(RemoteProtocolError(text, **self._progress()))
        if done.error:
            return self._fail(ServerError(_NO_MESSAGE, **self._progress()))
        if done.cancelled:
            utterance.fault = utterance.fault or IncompleteError(
                f"the server cancelled the utterance after {utterance.frames} frames",
                **self._progress(),
            )
            return [SentenceEnded(done)]
        fault = self._count_fault(done)
        utterance.fault = utterance.fault or fault
        counted = done.total_frames is not None and done.seq_last is not None
        if not sentence.eos and done.total_frames is None and done.seq_last is None:
            fault = IncompleteError(
                f"the sentence ended after {sentence.frames} frames with neither EOS nor counts",
                **self._progress(),
            )
            utterance.fault = utterance.fault or fault
        events: list[Event] = []
        if not sentence.eos:
            events.append(Notice("the sentence ended without an EOS packet"))
        if not counted:
            events.append(Notice("codec.done without counts: nothing to hold the frames against"))
        if sentence.eos and counted and fault is None:
            utterance.proven_sentences += 1
        return [*events, SentenceEnded(done)]

    def _count_fault(self, done: wire.CodecDone) -> CodecStreamError | None:
        """Hold the server's counts against what arrived."""
        sentence = self._utterance.sentence
        last = (sentence.next_seq - 1) % (wire.MAX_SEQ + 1) if sentence.packets else -1
        claimed_last = done.seq_last
        if not sentence.packets and claimed_last == 0:
            claimed_last = -1  # of no packets, 0 is a way to say none
        claims = [
            ("total_frames", done.total_frames, sentence.frames),
            ("seq_last", claimed_last, last),
        ]
        for name, claimed, counted in claims:
            if claimed is None or claimed == counted:
                continue
            text = f"codec.done says {name} {claimed}, but {counted} was received"
            if claimed > counted:
                return IncompleteError(text, expected=claimed, received=counted, **self._progress())
            return RemoteProtocolError(f"{text}: more than the sentence has", **self._progress())
        return None

    def _session_done(self, done: wire.SessionDone) -> list[Event]:
        if self._is_late(done.utterance_index):
            return [Notice(f"a late session.done, of utterance {done.utterance_index}")]
        was_streaming = self.server_state in (ServerState.STREAMING, ServerState.ENDED)
        if not self._remote(Remote.SESSION_DONE):
            return self._out_of_order(Remote.SESSION_DONE)
        utterance = self._utterance
        events: list[Event] = []
        if not utterance.discarding:
            fault, notices = self._end_fault(done, was_streaming)
            utterance.fault = utterance.fault or fault
            events += notices
        # Where the server was done before it read our cancel, it may answer input.cancelled yet.
        unanswered = utterance.cancel_sent and not utterance.cancel_confirmed
        self._unanswered_cancels = int(unanswered)
        return [*events, self._end()]

    def _end_fault(
        self, done: wire.SessionDone, was_streaming: bool
    ) -> tuple[CodecStreamError | None, list[Event]]:
        """Return what makes this end no success, and what is merely odd about it."""
        utterance = self._utterance
        claimed, came = done.total_sentences, utterance.sentences
        fault: CodecStreamError | None = None
        notices: list[Event] = []
        if was_streaming:
            fault = IncompleteError(
                f"session.done came in mid-sentence, after {utterance.frames} frames",
                **self._progress(),
            )
        elif self.client_state is ClientState.COMPOSING:
            fault = RemoteProtocolError(
                "session.done came before the text was complete", **self._progress()
            )
        elif utterance.says_something and not came:
            fault = IncompleteError("no sentence came for the text", **self._progress())
        elif claimed is not None and claimed > came:
            fault = IncompleteError(
                f"session.done counts {claimed} sentences, {came} came",
                expected=claimed,
                received=came,
                **self._progress(),
            )
        elif claimed is not None and claimed < came:
            notices.append(Notice(f"session.done counts {claimed} sentences, {came} came"))
        return fault, notices

    def _error(self, message: wire.ErrorMessage) -> list[Event]:
        text = wire.elide(message.message or _NO_MESSAGE, 500)
        utterance = self._utterance
        if not self.in_utterance:
            self._last_error = text
            return [Notice(f"the server says: {text}")]
        if utterance.discarding:
            return []
        error = ServerError(text, refused=not utterance.sentences, **self._progress())
        return self._fail(error, abort=False)

    def _input_cancelled(self) -> list[Event]:
        if self._unanswered_cancels:
            self._unanswered_cancels = 0
            return []
        utterance = self._utterance
        if self.in_utterance and utterance.cancel_sent and self.server_state is ServerState.QUIET:
            utterance.cancel_confirmed = True
            return [self._end()]
        return [Notice("input.cancelled without a cancel was passed over")]

    def _fail(
        self, error: CodecStreamError, *, abort: bool = True, after_audio: bool = False
    ) -> list[Event]:
        """End the delivery now; with ``abort``, ask the server to stop as well."""
        if self._utterance.discarding:
            return []
        self._utterance.failed = error
        self._utterance.discarding = True
        if abort:
            self.cancel()
        return [UtteranceFailed(error, after_audio)]

    def _end(self, *, closing: bool = False) -> UtteranceEnded:
        utterance = self._utterance
        self._last_error = None
        if utterance.index is not None:
            self._last_index = utterance.index
        if not closing:
            self.client_state, self.server_state = ClientState.IDLE, ServerState.QUIET
        error = utterance.failed or (None if utterance.cancel_sent else utterance.fault)
        return UtteranceEnded(cancelled=utterance.cancel_sent and error is None, error=error)

    def _progress(self) -> dict[str, Any]:
        return {
            "utterance_index": self._utterance.index,
            "frames_received": self._utterance.frames,
        }
