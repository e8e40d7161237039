"""The session's state machines, message by message, without a socket."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import GEOMETRY, make_codes

from codecstream import (
    IncompleteError,
    InvalidCodesError,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StreamMismatchError,
    wire,
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
from codecstream.protocol import Session
from codecstream.states import LOCAL, REMOTE, ClientState, Local, Remote, ServerState

DECODER_ID = "qwen3_tts_tokenizer_v2_12hz"
CLOSE_CODES = [1000, 1001, 1005, 1006, 1011, 1012]
CANCELLED = wire.encode_message(wire.InputCancelled())
CANCEL = wire.encode_message(wire.InputCancel())


# The server's messages, and what a session makes of them


def start(index: int = 0, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "version": 1,
        "codebooks": 16,
        "codebook_size": 2048,
        "frame_rate_hz": 12.5,
        "sample_rate": 24000,
        "decoder_id": DECODER_ID,
        "header_format": "<IHB",
        "utterance_index": index,
    }
    return wire.encode_message(wire.CodecStart(**{**fields, **changes}))


def packet(seq: int, codes: NDArray[Any] | int = 1, flags: int = 0) -> bytes:
    return wire.encode_packet(
        seq, make_codes(codes, seq) if isinstance(codes, int) else codes, flags
    )


def eos(seq: int, codes: NDArray[Any] | int = 0) -> bytes:
    return packet(seq, codes, wire.Flags.EOS)


def done(frames: int | None, seq_last: int | None, **fields: Any) -> str:
    return wire.encode_message(wire.CodecDone(total_frames=frames, seq_last=seq_last, **fields))


def session_done(sentences: int | None = 1) -> str:
    return wire.encode_message(wire.SessionDone(0, sentences))


def error(message: str = "out of tokens", **fields: Any) -> str:
    return wire.encode_message(wire.ErrorMessage(message, **fields))


def sentence(codes: NDArray[Any], index: int = 0) -> list[str | bytes]:
    """One packet per frame, EOS on the last one."""
    last = len(codes) - 1
    packets = [packet(i, codes[i : i + 1], int(i == last)) for i in range(len(codes))]
    return [start(index), *packets, done(len(codes), last)]


def new_session(on_gap: str = "stop") -> Session:
    return Session(GEOMETRY, DECODER_ID, on_gap=on_gap)


def speak(session: Session, text: str = "Hello.", *, flush: bool = True) -> Session:
    session.send_text(text)
    if flush:
        session.flush()
    session.data_to_send()
    return session


def receive(session: Session, *messages: str | bytes) -> list[Event]:
    return [event for message in messages for event in session.receive(message)]


def codes_in(events: list[Event]) -> NDArray[np.int64]:
    parts = [event.codes for event in events if isinstance(event, Frames)]
    return np.concatenate(parts) if parts else np.empty((0, 16), np.int64)


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def assert_speaks(session: Session) -> None:
    """The session is free, and a whole utterance comes through without a remark."""
    codes = make_codes(3, seed=7)
    events = receive(speak(session, "Next."), *sentence(codes, index=5), session_done())
    assert kinds(events) == [SentenceStarted, Frames, Frames, Frames, SentenceEnded, UtteranceEnded]
    assert np.array_equal(codes_in(events), codes)
    assert events[-1] == UtteranceEnded(cancelled=False, error=None)
    assert session.data_to_send() == []


def assert_failed(session: Session, event: Event, kind: type[Exception], match: str = "") -> Any:
    """``event`` reports a failure of this kind; the server's session.done ends it."""
    assert isinstance(event, UtteranceFailed)
    assert type(event.error) is kind
    assert match in str(event.error)
    assert receive(session, session_done()) == [UtteranceEnded(cancelled=False, error=event.error)]
    session.data_to_send()
    assert_speaks(session)
    return event.error


# Every cell of the two tables

LOCAL_STEPS: dict[Local, Callable[[Session], None]] = {
    Local.CONFIG: lambda session: session.configure(wire.SessionConfig()),
    Local.TEXT: lambda session: session.send_text("More."),
    Local.FLUSH: lambda session: session.flush(),
    Local.CANCEL: lambda session: session.cancel(),
    Local.CLOSE: lambda session: session.close(),
}
CLIENT_PATHS: dict[ClientState, list[Local]] = {
    ClientState.IDLE: [],
    ClientState.COMPOSING: [Local.TEXT],
    ClientState.FLUSHED: [Local.TEXT, Local.FLUSH],
    ClientState.WITHDRAWN: [Local.TEXT, Local.CANCEL],
    ClientState.CLOSED: [Local.CLOSE],
}
REMOTE_STEPS: dict[Remote, str | bytes] = {
    Remote.START: start(),
    Remote.PACKET: packet(0),
    Remote.EOS: eos(0),
    Remote.DONE: done(None, None),
    Remote.SESSION_DONE: session_done(None),
}
SERVER_PATHS: dict[ServerState, list[Remote]] = {
    ServerState.QUIET: [],
    ServerState.STREAMING: [Remote.START],
    ServerState.ENDED: [Remote.START, Remote.EOS],
}


def session_in(client: ClientState, server: ServerState = ServerState.QUIET) -> Session:
    session = new_session()
    for step in CLIENT_PATHS[client]:
        LOCAL_STEPS[step](session)
    receive(session, *(REMOTE_STEPS[move] for move in SERVER_PATHS[server]))
    assert (session.client_state, session.server_state) == (client, server)
    session.data_to_send()
    return session


def test_what_this_side_may_not_do() -> None:
    """The rest of the table is legal; a slip in the table shows here."""
    idle, composing, flushed, withdrawn, closed = (
        ClientState.IDLE,
        ClientState.COMPOSING,
        ClientState.FLUSHED,
        ClientState.WITHDRAWN,
        ClientState.CLOSED,
    )
    assert set(itertools.product(ClientState, Local)) - set(LOCAL) == {
        (idle, Local.CANCEL),
        (composing, Local.CONFIG),
        (flushed, Local.CONFIG),
        (flushed, Local.TEXT),
        (flushed, Local.FLUSH),
        (withdrawn, Local.CONFIG),
        (withdrawn, Local.TEXT),
        (withdrawn, Local.FLUSH),
        *((closed, step) for step in Local),
    }


@pytest.mark.parametrize("step", Local)
@pytest.mark.parametrize("state", ClientState)
def test_local_cell(state: ClientState, step: Local) -> None:
    session = session_in(state)
    after = LOCAL.get((state, step))
    if after is not None:
        LOCAL_STEPS[step](session)
        assert session.client_state is after
        sent = session.data_to_send()
        again = (state, step) == (ClientState.WITHDRAWN, Local.CANCEL)
        assert [f'"type":"{step.value}"' in text for text in sent] == ([] if again else [True])
    elif (state, step) == (ClientState.CLOSED, Local.CLOSE):  # closing twice is no misuse
        session.close()
        assert session.data_to_send() == []
    else:
        with pytest.raises(LocalProtocolError, match=rf"{step.value} now.*{state.value}"):
            LOCAL_STEPS[step](session)
        assert session.client_state is state
        assert session.data_to_send() == []


def test_what_the_server_may_not_do() -> None:
    quiet, streaming, ended, closed = ServerState
    assert set(itertools.product(ServerState, Remote)) - set(REMOTE) == {
        (quiet, Remote.PACKET),
        (quiet, Remote.EOS),
        (quiet, Remote.DONE),
        (streaming, Remote.START),
        (ended, Remote.START),
        (ended, Remote.PACKET),
        (ended, Remote.EOS),
        *((closed, step) for step in Remote),
    }


@pytest.mark.parametrize("step", Remote)
@pytest.mark.parametrize("server", SERVER_PATHS)
@pytest.mark.parametrize("client", [ClientState.COMPOSING, ClientState.FLUSHED])
def test_remote_cell_in_an_utterance(
    client: ClientState, server: ServerState, step: Remote
) -> None:
    session = session_in(client, server)
    events = receive(session, REMOTE_STEPS[step])
    after = REMOTE.get((server, step))
    if after is not None:
        assert session.server_state is after
        assert UtteranceFailed not in kinds(events)
        over = step is Remote.SESSION_DONE
        assert session.client_state is (ClientState.IDLE if over else client)
        assert session.data_to_send() == []
    else:
        withdrawn = client is ClientState.COMPOSING
        assert session.client_state is (ClientState.WITHDRAWN if withdrawn else client)
        assert session.server_state is server
        assert session.data_to_send() == [CANCEL]
        (event,) = events
        assert_failed(session, event, RemoteProtocolError, f"{step.value} in state")


@pytest.mark.parametrize("step", Remote)
@pytest.mark.parametrize("end", ["nothing said", "utterance over", "session.close", "EOF"])
def test_remote_step_outside_an_utterance(end: str, step: Remote) -> None:
    session = new_session()
    if end == "utterance over":
        assert_speaks(session)
    elif end == "session.close":
        session.close()
    elif end == "EOF":
        receive(speak(session), start())
        session.receive_eof(1006)
    before = session.client_state, session.server_state
    (event,) = receive(session, REMOTE_STEPS[step])
    assert isinstance(event, Notice)
    assert step.value in event.text
    assert (session.client_state, session.server_state) == before


# Whole sessions


def test_what_this_side_sends() -> None:
    session = new_session()
    session.configure(wire.SessionConfig(voice="vivian"))
    session.send_text("a" * 100_000)
    session.send_text("b")
    session.flush()
    sent = [wire.decode_client_message(text) for text in session.data_to_send()]
    assert sent[0] == wire.SessionConfig(voice="vivian")
    assert sent[-1] == wire.InputDone()
    texts = [message.text for message in sent[1:-1] if isinstance(message, wire.InputText)]
    assert "".join(texts) == "a" * 100_000 + "b"
    assert session.data_to_send() == []


def test_utterances_of_several_sentences() -> None:
    session = new_session()
    codes = make_codes(9)
    for index in range(3):
        one, two = sentence(codes[:4], index), sentence(codes[4:], index)
        events = receive(speak(session), *one, *two, session_done(2))
        assert np.array_equal(codes_in(events), codes)
        assert [k for k in kinds(events) if k is not Frames] == [
            SentenceStarted, SentenceEnded, SentenceStarted, SentenceEnded, UtteranceEnded,
        ]  # fmt: skip
        assert events[-1] == UtteranceEnded(cancelled=False, error=None)
        assert session.frames_received == 9


@pytest.mark.case(1)
def test_case_1_a_second_utterance_starts_afresh() -> None:
    session, codes = new_session(), make_codes(40)
    first = receive(speak(session), *sentence(codes), session_done())
    second = receive(speak(session), *sentence(codes, index=1), session_done())
    assert kinds(first) == kinds(second)
    assert Notice not in kinds(second)
    assert np.array_equal(codes_in(second), codes)
    assert second[-1] == UtteranceEnded(cancelled=False, error=None)
    assert (session.utterance_index, session.frames_received) == (1, 40)


@pytest.mark.case(2)
def test_case_2_the_server_fails_in_mid_utterance() -> None:
    session = speak(new_session())
    receive(session, start(4), *(packet(i) for i in range(10)))
    failure = error("out of tokens", partial_audio=True, action="discard")
    (event,) = receive(session, failure, done(10, 9, error=True))
    assert session.data_to_send() == []  # the server has stopped by itself
    reported = assert_failed(session, event, ServerError, "out of tokens")
    assert (reported.utterance_index, reported.frames_received) == (4, 10)
    assert not reported.refused


@pytest.mark.case(2)
def test_case_2_codec_done_alone_reports_the_failure() -> None:
    session = speak(new_session())
    (event,) = receive(session, start(), packet(0), done(1, 0, error=True))[2:]
    assert_failed(session, event, ServerError, "without a message")


EOS_SHAPES: dict[str, Callable[[NDArray[Any]], list[bytes]]] = {
    "on the last packet": lambda c: [
        packet(0, c[:25]), packet(1, c[25:50]), eos(2, c[50:]),
    ],
    "alone": lambda c: [packet(0, c[:25]), packet(1, c[25:]), eos(2)],
    "with one last frame": lambda c: [packet(0, c[:25]), packet(1, c[25:56]), eos(2, c[56:])],
}  # fmt: skip


@pytest.mark.case(3)
@pytest.mark.parametrize("shape", EOS_SHAPES)
def test_case_3_eos_in_every_shape(shape: str) -> None:
    session, codes = speak(new_session()), make_codes(57)
    events = receive(session, start(), *EOS_SHAPES[shape](codes), done(57, 2), session_done())
    assert np.array_equal(codes_in(events), codes)
    assert Notice not in kinds(events)
    assert events[-1] == UtteranceEnded(cancelled=False, error=None)


@pytest.mark.case(3)
@pytest.mark.parametrize(
    ("frames", "seq_last", "kind", "numbers"),
    [
        (58, 2, IncompleteError, "total_frames 58, but 57"),
        (57, 3, IncompleteError, "seq_last 3, but 2"),
        (58, None, IncompleteError, "total_frames 58, but 57"),
        (56, 2, RemoteProtocolError, "total_frames 56, but 57"),
        (57, 1, RemoteProtocolError, "seq_last 1, but 2"),
    ],
)
def test_case_3_counts_that_do_not_match(
    frames: int, seq_last: int | None, kind: type[Exception], numbers: str
) -> None:
    session, codes = speak(new_session()), make_codes(57)
    packets = EOS_SHAPES["alone"](codes)
    events = receive(session, start(), *packets, done(frames, seq_last), session_done())
    assert np.array_equal(codes_in(events), codes)  # the audio is played, then the error told
    (ended,) = (event for event in events if isinstance(event, UtteranceEnded))
    assert type(ended.error) is kind
    assert numbers in str(ended.error)
    if isinstance(ended.error, IncompleteError):
        assert ended.error.expected == (58 if frames == 58 else 3)
        assert ended.error.received == (57 if frames == 58 else 2)
    assert_speaks(session)


@pytest.mark.case(5)
@pytest.mark.parametrize("repeat", [packet(2), eos(2, 1), packet(0)], ids=["2", "2 EOS", "0"])
def test_case_5_a_repeated_packet_is_dropped_and_told(repeat: bytes) -> None:
    session = speak(new_session())
    events = receive(session, start(), packet(0), packet(1), packet(2), repeat, eos(3))
    assert [type(e) for e in events if not isinstance(e, Frames)] == [SentenceStarted, Notice]
    assert [e.seq for e in events if isinstance(e, Frames)] == [0, 1, 2]
    ended = receive(session, done(3, 3), session_done())[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, SequenceError)
    assert (ended.error.expected, ended.error.received) == (3, int(repeat[0]))
    assert_speaks(session)


@pytest.mark.case(5)
def test_case_5_a_snapshot_among_deltas_is_no_success() -> None:
    session, codes = speak(new_session()), make_codes(4)
    deltas = [packet(i, codes[i : i + 1]) for i in range(3)]
    events = receive(session, start(), *deltas, eos(3, codes), done(4, 3), session_done())
    (ended,) = (event for event in events if isinstance(event, UtteranceEnded))
    assert type(ended.error) is RemoteProtocolError
    assert "total_frames 4, but 7" in str(ended.error)
    assert_speaks(session)


@pytest.mark.case(6)
def test_case_6_a_missing_packet_stops_the_utterance() -> None:
    session = speak(new_session())
    events = receive(session, start(2), *(packet(seq) for seq in (0, 1, 3, 4)))
    assert [e.seq for e in events if isinstance(e, Frames)] == [0, 1]
    assert session.data_to_send() == [CANCEL]
    reported = assert_failed(session, events[-1], SequenceError, "packet 2 was expected, packet 3")
    assert (reported.expected, reported.received) == (2, 3)
    assert (reported.utterance_index, reported.frames_received) == (2, 2)


@pytest.mark.case(6)
def test_case_6_on_gap_reset_goes_on_and_tells_at_the_end() -> None:
    session = speak(new_session(on_gap="reset"))
    receive(session, start(), packet(0), packet(1))
    assert kinds(receive(session, packet(3))) == [Notice, DecoderReset, Frames]
    assert kinds(receive(session, packet(4), eos(5))) == [Frames]
    ended = receive(session, done(5, 5), session_done())[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, SequenceError)
    assert session.data_to_send() == []
    assert_speaks(session)


@pytest.mark.case(6)
def test_case_6_the_sequence_number_wraps() -> None:
    """A new session gets near 2**32 by two gaps, each just short of half the circle."""
    session = speak(new_session(on_gap="reset"))
    receive(session, start())
    for gap in (2**31 - 1, 4294967295):
        assert kinds(receive(session, packet(gap))) == [Notice, DecoderReset, Frames]
    assert kinds(receive(session, packet(0), packet(1))) == [Frames, Frames]
    ended = receive(session, eos(2), done(4, 2), session_done())[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, SequenceError)
    assert (ended.error.expected, ended.error.received) == (0, 2**31 - 1)


@pytest.mark.case(7)
@pytest.mark.parametrize("codebook", [0, 15])
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
def test_case_7_codes_outside_the_codebook(value: int, codebook: int) -> None:
    session, bad = speak(new_session()), make_codes(3)
    bad[1, codebook] = value
    events = receive(session, start(), packet(0), packet(1, bad), packet(2))
    assert [e.seq for e in events if isinstance(e, Frames)] == [0]
    assert session.data_to_send() == [CANCEL]
    text = f"packet 1: frame 1, codebook {codebook}: id {value}"
    reported = assert_failed(session, events[-1], InvalidCodesError, text)
    where = (reported.seq, reported.frame, reported.codebook, reported.value)
    assert where == (1, 1, codebook, value)


@pytest.mark.case(8)
@pytest.mark.parametrize(
    ("field", "wanted", "offered"),
    [
        ("codebooks", 16, 8),
        ("codebooks", 16, 32),
        ("codebook_size", 2048, 4096),
        ("sample_rate", 24000, 16000),
        ("frame_rate_hz", 12.5, 25.0),
        ("version", 1, 2),
        ("header_format", "<IHB", "<IHH"),
        ("decoder_id", DECODER_ID, "another"),
    ],
)
def test_case_8_a_stream_for_another_decoder(field: str, wanted: Any, offered: Any) -> None:
    session = speak(new_session())
    other = make_codes(2)[:, :8] if field == "codebooks" else make_codes(2)
    (event,) = receive(session, start(**{field: offered}), packet(0, other), eos(1, other))
    assert session.data_to_send() == [CANCEL]
    assert receive(session, done(4, 1)) == []
    text = f"{field} is {offered!r}, the artifact needs {wanted!r}"
    reported = assert_failed(session, event, StreamMismatchError, text)
    assert (reported.field, reported.wanted, reported.offered) == (field, wanted, offered)


@pytest.mark.case(8)
@pytest.mark.parametrize("field", ["decoder_id", "codebook_size", "frame_rate_hz", "header_format"])
def test_case_8_a_missing_optional_field_is_a_notice(field: str) -> None:
    session, missing = speak(new_session()), dict.fromkeys([field])
    notice, started = receive(session, start(0, **missing))
    assert isinstance(notice, Notice)
    assert field in notice.text
    assert isinstance(started, SentenceStarted)


@pytest.mark.parametrize("messages", [[start(), packet(0)], [start(), eos(0, 1)]])
def test_session_done_in_mid_sentence_is_no_success(messages: list[str | bytes]) -> None:
    ended = receive(speak(new_session()), *messages, session_done())[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, IncompleteError)
    assert ended.error.frames_received == 1


def test_reset_flag_comes_before_its_frames() -> None:
    session = speak(new_session())
    events = receive(session, start(), packet(0), packet(1, flags=wire.Flags.RESET))
    assert kinds(events) == [SentenceStarted, Frames, DecoderReset, Frames]


def test_blank_text() -> None:
    session = speak(new_session(), " ")
    assert receive(session, session_done(0)) == [UtteranceEnded(cancelled=False, error=None)]
    assert_speaks(session)


def test_a_mode_that_the_model_does_not_support() -> None:
    session = speak(new_session())
    (event,) = receive(session, error("codec_tokens is not supported"))
    reported = assert_failed(session, event, ServerError, "not supported")
    assert (reported.refused, reported.frames_received) == (True, 0)


@pytest.mark.parametrize("message", ["{", '{"type": "codec.start"}', b"", packet(0)[:-1]])
def test_an_unreadable_message(message: str | bytes) -> None:
    assert kinds(receive(new_session(), message)) == [Notice]
    session = speak(new_session())
    events = receive(session, start(), message)
    assert_failed(session, events[-1], RemoteProtocolError)


def test_a_message_of_an_unknown_type_is_a_notice() -> None:
    assert kinds(receive(speak(new_session()), '{"type": "codec.pause"}')) == [Notice]


# Cancel


def test_cancel_while_composing() -> None:
    session = speak(new_session(), flush=False)
    session.cancel()
    session.cancel()
    assert session.data_to_send() == [CANCEL]
    assert receive(session, CANCELLED) == [UtteranceEnded(cancelled=True, error=None)]
    assert_speaks(session)


@pytest.mark.case(10)
def test_case_10_cancel_while_streaming() -> None:
    session = speak(new_session())
    receive(session, start(), packet(0))
    session.cancel()
    assert session.data_to_send() == [CANCEL]
    late = [packet(seq) for seq in range(1, 21)]
    assert receive(session, *late, eos(21), done(21, 21, cancelled=True)) == []
    assert receive(session, session_done()) == [UtteranceEnded(cancelled=True, error=None)]
    assert_speaks(session)


@pytest.mark.case(10)
def test_case_10_cancel_crosses_the_servers_end() -> None:
    """The late input.cancelled belongs to the utterance before and disturbs no other one."""
    session = speak(new_session())
    receive(session, *sentence(make_codes(2)))
    session.cancel()
    assert receive(session, session_done()) == [UtteranceEnded(cancelled=True, error=None)]
    speak(session)
    assert receive(session, CANCELLED) == []
    session.cancel()  # of the utterance that is now in flight: its own answer ends it
    assert receive(session, CANCELLED) == [UtteranceEnded(cancelled=True, error=None)]
    session.data_to_send()
    assert_speaks(session)


def test_input_cancelled_that_nobody_asked_for() -> None:
    session = speak(new_session())
    assert kinds(receive(session, CANCELLED)) == [Notice]
    assert session.client_state is ClientState.FLUSHED


def test_input_cancelled_does_not_end_what_still_streams() -> None:
    session = speak(new_session())
    receive(session, start(), packet(0))
    session.cancel()
    assert kinds(receive(session, CANCELLED)) == [Notice]
    assert receive(session, eos(1), done(1, 1, cancelled=True)) == []
    assert receive(session, session_done()) == [UtteranceEnded(cancelled=True, error=None)]


def test_a_failure_stays_a_failure_when_cancelled_afterwards() -> None:
    session = speak(new_session())
    (event,) = receive(session, error())
    session.cancel()
    assert_failed(session, event, ServerError)


def test_the_server_cancels_by_itself() -> None:
    session = speak(new_session())
    events = receive(session, start(), packet(0), eos(1), done(1, 1, cancelled=True))
    assert kinds(events) == [SentenceStarted, Frames, SentenceEnded]
    (ended,) = receive(session, session_done())
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, IncompleteError)


# The end of the connection


@pytest.mark.case(11)
def test_case_11_idle_timeout_is_no_fault_of_the_finished_utterance() -> None:
    session = new_session()
    assert_speaks(session)
    assert kinds(receive(session, error("Idle timeout: no message received"))) == [Notice]
    assert session.receive_eof(1000) == []
    with pytest.raises(LocalProtocolError, match="closed"):
        session.send_text("Again.")


WHOLE = sentence(make_codes(3))
FAILED = UtteranceFailed, UtteranceEnded
# What had come before the connection ended, and the kinds of events that the end makes.
PHASES: dict[str, tuple[list[str | bytes], tuple[type, ...]]] = {
    "nothing": ([], FAILED),
    "codec.start": ([start()], FAILED),
    "10 frames": ([start(), *(packet(i) for i in range(10))], FAILED),
    "EOS": (WHOLE[:-1], FAILED),
    "wrong counts": ([*WHOLE[:-1], done(4, 3)], FAILED),
    "second sentence": ([*WHOLE, start(), packet(0)], FAILED),
    "server cancelled": ([*WHOLE[:-1], done(3, 2, cancelled=True)], FAILED),
    "repeated packet": ([start(), packet(0), packet(0), eos(1), done(1, 1)], FAILED),
    "codec.done": (WHOLE, (Notice, UtteranceEnded)),
    "session.done": ([*WHOLE, session_done()], ()),
    "error": ([start(), error()], (UtteranceEnded,)),
    "error, session.done": ([start(), error(), session_done()], ()),
}


@pytest.mark.case(53)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("code", CLOSE_CODES)
def test_case_53_the_connection_ends(code: int, phase: str) -> None:
    session = speak(new_session())
    messages, expected = PHASES[phase]
    receive(session, *messages)
    events = session.receive_eof(code)
    assert tuple(kinds(events)) == expected
    if expected == FAILED:
        reported = events[0].error  # type: ignore[union-attr]
        assert isinstance(reported, IncompleteError)
        assert reported.close_code == code
        assert f"code {code} after {session.frames_received} frames" in str(reported)
    for event in events:
        if isinstance(event, UtteranceEnded):
            assert (event.error is None) == (phase == "codec.done")
            assert not event.cancelled
    assert session.receive_eof(code) == []
    assert (session.client_state, session.server_state) == (ClientState.CLOSED, ServerState.CLOSED)
    assert session.data_to_send() == []


@pytest.mark.case(53)
@pytest.mark.parametrize("code", CLOSE_CODES)
def test_case_53_the_connection_ends_before_the_text_does(code: int) -> None:
    session = speak(new_session(), flush=False)
    assert tuple(kinds(session.receive_eof(code))) == FAILED


@pytest.mark.case(53)
def test_case_53_one_of_several_sentences_is_not_all() -> None:
    session = new_session()
    session.configure(wire.SessionConfig(split_granularity="sentence"))
    receive(speak(session, "One. Two."), *WHOLE)
    assert tuple(kinds(session.receive_eof(1000))) == FAILED


@pytest.mark.case(53)
@pytest.mark.parametrize("code", CLOSE_CODES)
def test_case_53_the_connection_ends_while_cancelling(code: int) -> None:
    session = speak(new_session())
    receive(session, start(), packet(0))
    session.cancel()
    events = session.receive_eof(code)
    assert kinds(events) == [Notice, UtteranceEnded]
    assert events[1] == UtteranceEnded(cancelled=True, error=None)


def test_the_servers_last_words_are_in_the_message() -> None:
    session = speak(new_session())
    events = session.receive_eof(1011, "keepalive ping timeout")
    assert "keepalive ping timeout" in str(events[0])


# Any order of messages


class Server:
    """Sends messages, good and bad, and knows whether the utterance may count as a success."""

    def __init__(self) -> None:
        self.session = new_session()
        self.index = -1
        self.next_utterance()

    def next_utterance(self) -> None:
        speak(self.session)
        self.index += 1
        self.state = ServerState.QUIET
        self.clean = True  # nothing but right messages, in the right order
        self.sentences = self.seq = self.frames = self.claimed = 0
        self.events: list[Event] = []

    def natural_step(self) -> str:
        if self.state is ServerState.QUIET:
            return "session.done" if self.sentences else "start"
        return "EOS" if self.state is ServerState.STREAMING else "done"

    def take(self, step: str | bytes) -> None:
        step = self.natural_step() if step == "natural" else step
        if step == "cancel":
            self.clean = False
            self.session.cancel()
            return
        message = self.message(step)
        events = self.session.receive(message)
        self.events += events
        if any(isinstance(event, UtteranceEnded) for event in events):
            self.check_end()
            self.next_utterance()

    def message(self, step: str | bytes) -> str | bytes:
        if isinstance(step, bytes) or step in ODD_TEXTS:
            self.clean = self.clean and step in HARMLESS
            return step
        number = {"start": 0, "packet": 1, "two": 1, "EOS": 2, "done": 3, "session.done": 4}
        move = list(Remote)[number[step]]
        self.clean = self.clean and (self.state, move) in REMOTE
        if move is Remote.SESSION_DONE:
            self.clean = self.clean and self.state is ServerState.QUIET and self.sentences > 0
            return session_done(self.sentences)
        self.state = REMOTE.get((self.state, move), self.state)
        if move is Remote.START:
            self.sentences += 1
            self.seq = self.frames = 0
            return start(self.index)
        if move is Remote.DONE:
            self.claimed += self.frames
            return done(self.frames, self.seq - 1 if self.seq else None)
        frames = 2 if step == "two" else 1
        self.seq += 1
        self.frames += frames
        return packet(self.seq - 1, frames, int(step == "EOS"))

    def check_end(self) -> None:
        *before, ended = self.events
        assert isinstance(ended, UtteranceEnded)
        assert UtteranceEnded not in kinds(before)
        success = ended.error is None and not ended.cancelled
        assert success == self.clean
        assert not (ended.cancelled and ended.error)
        if success:
            assert len(codes_in(before)) == self.claimed == self.session.frames_received
        failures = [i for i, kind in enumerate(kinds(before)) if kind is UtteranceFailed]
        assert len(failures) <= 1
        if failures:
            after = before[failures[0] + 1 :]
            assert set(kinds(after)) <= {Notice}
            assert ended.error is before[failures[0]].error  # type: ignore[union-attr]


HARMLESS = {CANCELLED, '{"type": "codec.pause"}'}
ODD_TEXTS = [
    *HARMLESS,
    error(),
    start(codebooks=8),
    done(7, 7),
    done(0, 0, error=True),
    done(0, 0, cancelled=True),
    "{",
    '{"type": "codec.done", "total_frames": "1"}',
]
ODD_PACKETS = [b"", b"\0" * 6, packet(77), packet(2**32 - 1), packet(0, np.full((1, 16), 2048))]
STEPS = ["start", "packet", "two", "EOS", "done", "session.done", "cancel"]
NATURAL = ["natural", "natural", "natural", "packet"] * 8
sequences = st.lists(
    st.sampled_from([*NATURAL, *STEPS, *ODD_TEXTS, *ODD_PACKETS]), min_size=12, max_size=60
)


@settings(max_examples=300)
@given(sequences, st.sampled_from(CLOSE_CODES))
def test_any_order_of_messages(sequence: list[str | bytes], code: int) -> None:
    server = Server()
    for step in sequence:
        server.take(step)
    server.events += server.session.receive_eof(code)
    *_, ended = [event for event in server.events if isinstance(event, UtteranceEnded)]
    if ended.error is None and not ended.cancelled:
        assert server.clean
        assert len(codes_in(server.events)) == server.claimed


@given(sequences)
def test_after_any_messages_session_done_frees_the_session(sequence: list[str | bytes]) -> None:
    server = Server()
    for step in [*sequence, "session.done"]:
        server.take(step)
    receive(server.session, session_done())
    server.session.data_to_send()
    assert_speaks(server.session)


# Known faults: each becomes a plain test when the code is right


def test_an_utterance_that_was_not_flushed_is_no_success() -> None:
    session = speak(new_session(), flush=False)
    events = receive(session, session_done(0))
    assert UtteranceEnded(cancelled=False, error=None) not in events


def test_eof_before_the_text_was_complete_is_no_success() -> None:
    session = speak(new_session(), flush=False)
    receive(session, *WHOLE)
    assert tuple(kinds(session.receive_eof(1000))) == FAILED


@pytest.mark.case(53)
@pytest.mark.parametrize(
    "messages",
    [[start(), packet(0), done(1, 0)], [start(), packet(0), eos(1), done(None, None)]],
    ids=["no EOS", "no counts"],
)
def test_case_53_only_eos_and_matching_counts_do_without_session_done(
    messages: list[str | bytes],
) -> None:
    session = speak(new_session())
    receive(session, *messages)
    assert tuple(kinds(session.receive_eof(1000))) == FAILED


@pytest.mark.parametrize("messages", [[], WHOLE], ids=["none came", "one came"])
def test_missing_sentences_are_no_success(messages: list[str | bytes]) -> None:
    ended = receive(speak(new_session()), *messages, session_done(3))[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, IncompleteError)


def test_a_sentence_that_lost_every_packet_is_no_success() -> None:
    ended = receive(speak(new_session()), start(), done(None, 5), session_done())[-1]
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, IncompleteError)


@pytest.mark.parametrize("step", [Local.TEXT, Local.FLUSH])
def test_nothing_is_said_after_a_cancel(step: Local) -> None:
    session = speak(new_session(), flush=False)
    session.cancel()
    with contextlib.suppress(LocalProtocolError):
        LOCAL_STEPS[step](session)
    assert session.data_to_send() == [CANCEL]


def test_a_cancel_that_was_never_answered_is_forgotten() -> None:
    """The cancel met a sentence's very end: no cancelled flag, and no input.cancelled either."""
    session = speak(new_session())
    receive(session, *sentence(make_codes(2)))
    session.cancel()
    receive(session, session_done())
    session.data_to_send()
    assert_speaks(session)  # the server has answered all that came before this
    speak(session, flush=False).cancel()
    assert receive(session, CANCELLED) == [UtteranceEnded(cancelled=True, error=None)]


def test_an_old_error_is_not_told_as_a_new_one() -> None:
    session = new_session()
    receive(session, error("Unknown message type"))
    failed = receive(speak(session), start(), done(0, None, error=True))[-1]
    assert isinstance(failed, UtteranceFailed)
    assert "Unknown message type" not in str(failed.error)


def test_text_that_is_no_unicode_changes_nothing() -> None:
    session = new_session()
    with pytest.raises(LocalProtocolError):
        session.send_text("a\ud800")
    assert session.client_state is ClientState.IDLE


INDEX_FAULTS: dict[str, tuple[list[str | bytes], str]] = {
    "an utterance that is over": ([start(0)], "for utterance 0, which is over"),
    "two utterances in one": ([start(4), eos(0, 1), done(1, 0), start(5)], "5 within utterance 4"),
    "a sentence twice": (
        [start(4, sentence_index=1), eos(0, 1), done(1, 0), start(4, sentence_index=1)],
        "for sentence 1, after sentence 1",
    ),
    "another utterance's end": (
        [start(4), eos(0, 1), done(1, 0, utterance_index=3)],
        "codec.done has utterance_index 3, codec.start had 4",
    ),
    "another sentence's end": (
        [start(4, sentence_index=2), eos(0, 1), done(1, 0, sentence_index=1)],
        "codec.done has sentence_index 1, codec.start had 2",
    ),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_message_of_another_utterance_or_sentence_is_a_fault(fault: str) -> None:
    messages, text = INDEX_FAULTS[fault]
    session = new_session()
    receive(speak(session), *sentence(make_codes(2), index=0), session_done())
    *_, failed = receive(speak(session), *messages)
    assert isinstance(failed, UtteranceFailed)
    assert type(failed.error) is RemoteProtocolError
    assert text in str(failed.error)


def test_indices_may_be_left_out() -> None:
    session = new_session()
    for _ in range(2):
        bare = [start(utterance_index=None), eos(0, 1), done(1, 0)]
        *_, ended = receive(speak(session), *bare, *bare, session_done(2))
        assert ended == UtteranceEnded(cancelled=False, error=None)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([session_done(0)], "no sentence came for the text"),
        ([start(), packet(0), done(None, None), session_done()], "neither EOS nor counts"),
    ],
)
def test_an_end_that_proves_nothing_is_no_success(messages: list[str | bytes], text: str) -> None:
    *_, ended = receive(speak(new_session()), *messages)
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(ended.error, IncompleteError)
    assert text in str(ended.error)
