"""The session's state machines and whole sessions, message by message, without a socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import make_codes
from wire_messages import (
    CANCEL,
    DECODER_ID,
    LOCAL_STEPS,
    assert_failed,
    assert_speaks,
    codes_in,
    done,
    eos,
    error,
    kinds,
    new_session,
    packet,
    receive,
    sentence,
    session_done,
    speak,
    start,
)

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
    Frames,
    Notice,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.protocol import Session
from codecstream.states import LOCAL, REMOTE, ClientState, Local, Remote, ServerState

# Every cell of the two tables

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
