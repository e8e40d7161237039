"""How a session's utterances end: cancel, lost connections, any order of messages."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_codes
from wire_messages import (
    CANCEL,
    CANCELLED,
    CLOSE_CODES,
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
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    wire,
)
from codecstream.events import (
    Event,
    Frames,
    Notice,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.states import REMOTE, ClientState, Local, Remote, ServerState

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
            return session_done(self.sentences, self.index)
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


# Ends that are no success


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


LATE = {
    "session.done": session_done(index=0),
    "codec.done": done(3, 2, utterance_index=0, sentence_index=0),
}


@pytest.mark.parametrize("late", list(LATE))
@pytest.mark.parametrize("ending", ["complete", "failed", "cancelled"])
def test_late_ends_of_an_utterance_do_not_end_the_next_one(late: str, ending: str) -> None:
    """Else the audio of every utterance after it would be that of the one before."""
    session = speak(new_session())
    if ending == "cancelled":
        session.cancel()
    broken = [packet(7)] if ending == "failed" else []
    codes = make_codes(3)
    receive(session, start(0), *broken, *sentence(codes)[1:], session_done(index=0))
    for index in (1, 2):
        speak(session)
        (notice,) = receive(session, LATE[late])
        assert isinstance(notice, Notice) and "of utterance 0" in notice.text
        events = receive(session, *sentence(make_codes(index), index), session_done(index=index))
        assert events[-1] == UtteranceEnded(cancelled=False, error=None)
        assert len(codes_in(events)) == index


def test_a_late_end_is_no_answer_to_a_cancel() -> None:
    session = speak(new_session())
    receive(session, *sentence(make_codes(3)), session_done(index=0))
    speak(session).cancel()
    assert kinds(receive(session, session_done(index=0))) == [Notice]
    ended = receive(session, start(1), eos(0), done(0, 0, cancelled=True), session_done(index=1))
    assert ended == [UtteranceEnded(cancelled=True, error=None)]
    assert_speaks(session)


def test_an_end_without_a_start_counts_whatever_its_index() -> None:
    """A server may not count the utterances that it refuses."""
    session = speak(new_session())
    receive(session, *sentence(make_codes(3)), session_done(index=0))
    speak(session)
    assert kinds(receive(session, error("no"), session_done(0, index=0)))[-1] is UtteranceEnded
    assert_speaks(session)


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
