"""An utterance's bookkeeping and decoding pipeline: pure, so every order of calls can be tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import GEOMETRY, SAMPLES, LedgerProgram, expected_ledger, make_codes
from wire_messages import CANCEL, done, eos, error, packet, receive, sentence, session_done, start

from codecstream import (
    CodecStreamError,
    ConnectionFailedError,
    DecoderError,
    IncompleteError,
    InvalidCodesError,
    LocalProtocolError,
    Ramp,
    Reconnect,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StalledError,
    StreamDecoder,
    StreamMismatchError,
    TooLongError,
    wire,
)
from codecstream.events import (
    DecoderReset,
    Frames,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.options import Options
from codecstream.pipeline import DecodePipeline, Job
from codecstream.protocol import Session
from codecstream.speech import Speech, status_of

CODES = make_codes(57)
LOST = IncompleteError("gone", close_code=1006)


def make_options(**changes: Any) -> Options:
    fields: dict[str, Any] = {
        "url": "ws://localhost/x",
        "program": LedgerProgram(),
        "schedule": Ramp(),
        "config": wire.SessionConfig(),
        "headers": {},
        "ssl": None,
        "proxy": None,
        "compression": None,
        "on_gap": "stop",
        "open_timeout_s": 10.0,
        "idle_timeout_s": 30.0,
        "stall_timeout_s": 20.0,
        "drain_timeout_s": 2.0,
        "ping_interval_s": 20.0,
        "ping_timeout_s": 20.0,
        "reconnect": None,
        "max_audio_s": None,
        "max_ahead_s": 10.0,
        "max_message_bytes": wire.MAX_PACKET_BYTES,
    }
    return Options(**{**fields, **changes})


def make_pipeline(program: LedgerProgram | None = None, ahead_s: float = 10.0) -> DecodePipeline:
    program = program or LedgerProgram()
    return DecodePipeline(lambda: StreamDecoder(program), GEOMETRY, ahead_s)


def run_job(pipeline: DecodePipeline, job: Job | None = None) -> bool:
    job = job or pipeline.next_job()
    if job is None:
        return False
    pipeline.finish_job(job, job.run(), 0.0, 0.0)
    return True


def events_of(codes: NDArray[Any]) -> list[Any]:
    frames = [Frames(codes[i : i + 1], i) for i in range(len(codes))]
    ends = [SentenceEnded(wire.CodecDone()), UtteranceEnded(False, None)]
    begins = wire.decode_message(start())
    assert isinstance(begins, wire.CodecStart)
    return [SentenceStarted(begins), *frames, *ends]


# The pipeline

calls = st.lists(
    st.sampled_from(["feed", "feed", "feed", "job", "work", "take", "take", "pause", "resume"])
)


@settings(max_examples=200)
@given(calls, st.integers(0, 60), st.floats(0, 6), st.booleans())
def test_whatever_the_order_of_calls_the_audio_is_all_there_once(
    order: list[str], frames: int, ahead_s: float, restart: bool
) -> None:
    pipeline = make_pipeline(ahead_s=ahead_s)
    codes = make_codes(frames)
    waiting = events_of(codes)
    heard: list[NDArray[np.float32]] = []
    job: Job | None = None
    if restart:  # what came of an attempt before, and a job of it that is still out
        for event in events_of(make_codes(9, seed=4))[:-1]:
            pipeline.feed(event, 0.0)
        stale = pipeline.next_job()
        assert stale is not None
        pcm = stale.run()
        pipeline.restart()
        pipeline.finish_job(stale, pcm, 0.0, 0.0)
        assert (pipeline.frames_decoded, pipeline.busy) == (0, False)
    everything = [*order, "resume"] + ["feed", "job", "work", "take"] * (frames + 5)
    for call in everything:
        if call == "feed" and waiting:
            pipeline.feed(waiting.pop(0), 0.0)
        elif call == "job" and job is None:
            job = pipeline.next_job()
            if job is not None:
                assert pipeline.next_job() is None  # one at a time: each starts from the last state
        elif call == "work" and job is not None:
            pipeline.finish_job(job, job.run(), 0.0, 0.0)
            job = None
        elif call == "take":
            chunk = pipeline.take()
            if chunk is not None:
                assert not pipeline.paused
                heard.append(chunk.pcm)
        elif call in ("pause", "resume"):
            pipeline.paused = call == "pause"
        ahead = (pipeline.frames_decoded - pipeline.frames_taken) / GEOMETRY.frame_rate_hz
        assert ahead < ahead_s + 2.0 + 1e-9  # less than a chunk beyond the bound
    assert pipeline.over and pipeline.error is None
    assert pipeline.take() is None
    assert np.array_equal(np.concatenate([np.empty(0, np.float32), *heard]), expected_ledger(codes))


def test_a_bound_of_nothing_still_lets_one_chunk_through() -> None:
    pipeline = make_pipeline(ahead_s=0)
    for event in events_of(CODES):
        pipeline.feed(event, 0.0)
    sizes = []
    while run_job(pipeline):
        assert pipeline.next_job() is None
        chunk = pipeline.take()
        assert chunk is not None
        sizes.append(chunk.frames)
    assert sizes == [2, 4, 8, 16, 25, 2]


def test_a_reset_decodes_what_is_pending_first() -> None:
    pipeline = make_pipeline()
    events = events_of(CODES)
    for event in [*events[:11], DecoderReset(), *events[11:]]:
        pipeline.feed(event, 0.0)
    while run_job(pipeline):
        pass
    chunks = list(iter(pipeline.take, None))
    assert [chunk.frames for chunk in chunks] == [2, 4, 4, 2, 4, 8, 16, 17]
    parts = [expected_ledger(CODES[:10]), expected_ledger(CODES[10:])]
    assert np.array_equal(np.concatenate([c.pcm for c in chunks]), np.concatenate(parts))


@pytest.mark.parametrize("after_audio", [False, True])
def test_a_failure_drops_audio_or_comes_after_it(after_audio: bool) -> None:
    pipeline = make_pipeline()
    for event in events_of(CODES)[:8]:  # 7 frames
        pipeline.feed(event, 0.0)
    assert run_job(pipeline)
    job = pipeline.next_job()  # and one is being decoded just now
    assert job is not None
    failure = ServerError("no")
    pipeline.feed(UtteranceFailed(failure, after_audio), 0.0)
    pipeline.feed(UtteranceEnded(False, failure), 0.0)
    assert pipeline.finished != after_audio
    pipeline.finish_job(job, job.run(), 0.0, 0.0)
    while run_job(pipeline):
        pass
    heard = sum(chunk.frames for chunk in iter(pipeline.take, None))
    assert heard == (7 if after_audio else 0)
    assert pipeline.over and pipeline.error is failure


def test_sentences_count_when_they_arrive_and_not_when_they_are_decoded() -> None:
    pipeline = make_pipeline()
    for event in [*events_of(CODES), *events_of(CODES)]:
        pipeline.feed(event, 0.0)
    assert pipeline.sentences == 2
    job = pipeline.next_job()
    assert job is not None
    pipeline.finish_job(job, job.run(), 0.0, 0.0)
    chunk = pipeline.take()
    assert chunk is not None and chunk.sentence_index == 0
    pipeline.feed(UtteranceFailed(ServerError("no")), 0.0)
    assert pipeline.sentences == 2


def test_a_job_that_fails_ends_it_and_names_the_cause() -> None:
    pipeline = make_pipeline()
    for event in events_of(CODES):
        pipeline.feed(event, 0.0)
    job = pipeline.next_job()
    assert job is not None
    pipeline.fail_job(job, ZeroDivisionError("of a runtime"))
    assert isinstance(pipeline.error, DecoderError)
    assert isinstance(pipeline.error.__cause__, ZeroDivisionError)
    assert pipeline.over and pipeline.next_job() is None


def test_a_job_from_before_a_stop_counts_for_nothing() -> None:
    pipeline = make_pipeline()
    for event in events_of(CODES):
        pipeline.feed(event, 0.0)
    job = pipeline.next_job()
    assert job is not None
    pipeline.stop()
    pipeline.finish_job(job, job.run(), 0.0, 0.0)
    assert (pipeline.frames_decoded, pipeline.take(), pipeline.error) == (0, None, None)


# The ends

ENDS: list[tuple[CodecStreamError | None, bool, str]] = [
    (None, False, "complete"),
    (None, True, "cancelled"),
    (ServerError("x"), False, "failed"),
    (ServerError("x", refused=True), False, "refused"),
    (StreamMismatchError("x", field="version", wanted=1, offered=2), False, "refused"),
    (RemoteProtocolError("x"), False, "failed"),
    (SequenceError("x", expected=1, received=2), False, "failed"),
    (InvalidCodesError("x"), False, "failed"),
    (DecoderError("x"), False, "failed"),
    (LocalProtocolError("x"), False, "failed"),
    (IncompleteError("x"), False, "incomplete"),
    (ConnectionFailedError("x"), False, "incomplete"),
    (StalledError("x", waited_s=1.0), False, "stalled"),
    (TooLongError("x", limit_frames=1), False, "too_long"),
]


@pytest.mark.parametrize(("failure", "cancelled", "status"), ENDS)
def test_each_end_has_its_status(
    failure: CodecStreamError | None, cancelled: bool, status: str
) -> None:
    assert status_of(failure, cancelled) == status


def begun(*, fresh: bool = True, **changes: Any) -> tuple[Speech, Session]:
    """Return an utterance whose request went out at second 100, and its session."""
    options = make_options(**changes)
    speech, session = Speech(options.config, options), Session(GEOMETRY)
    speech.say("Hello.")
    speech.complete_text()
    speech.begin(fresh_connection=fresh, now_s=100.0)
    speech.transmit(session, 100.0)
    return speech, session


def hear(speech: Speech, session: Session, now_s: float, *messages: str | bytes) -> None:
    for event in receive(session, *messages):
        speech.receive(event, session, now_s)


def test_a_result_before_the_end_is_refused() -> None:
    speech, session = begun()
    hear(speech, session, 100.0, start(), packet(0, 2))
    with pytest.raises(LocalProtocolError, match="no result before"):
        _ = speech.result
    speech.stop()
    result = speech.result
    assert (result.status, result.frames_received) == ("cancelled", 2)
    assert result.reason == "this program ended it after 2 frames"


# Silence


@given(st.floats(0.1, 60), st.none() | st.floats(0.1, 60), st.floats(0, 100), st.floats(0, 100))
def test_silence_is_idle_or_stalled_exactly_when_its_time_is_over(
    idle_s: float, stall_s: float | None, frame_age_s: float, message_age_s: float
) -> None:
    message_age_s = min(message_age_s, frame_age_s)  # a frame is a message, too
    speech, session = begun(idle_timeout_s=idle_s, stall_timeout_s=stall_s)
    hear(speech, session, 1000.0, start(), packet(0))
    now_s = 1000.0 + frame_age_s
    failure, wait_s = speech.check_silence(session, now_s - message_age_s, now_s)
    silent = message_age_s >= idle_s
    stalled = stall_s is not None and frame_age_s >= stall_s
    assume(abs(message_age_s - idle_s) > 1e-6)  # not within what adding up seconds rounds off
    assume(stall_s is None or abs(frame_age_s - stall_s) > 1e-6)
    if silent:
        assert failure is not None and isinstance(failure.error, IncompleteError)
        assert failure.error.connection_lost
    elif stalled:
        assert failure is not None and isinstance(failure.error, StalledError)
        assert failure.error.frames_received == 1
    else:
        assert failure is None
        later_s = now_s + wait_s + 1e-5  # with nothing more until then, it is over
        failure, _ = speech.check_silence(session, now_s - message_age_s, later_s)
        assert failure is not None
    assert failure is not None and failure.after_audio


def test_a_stall_is_told_once_and_final() -> None:
    """Its audio may wait for a paused caller for long, and the connection be lost meanwhile."""
    speech, session = begun(reconnect=Reconnect())
    hear(speech, session, 100.0, start(), packet(0, 6))
    failure, _ = speech.check_silence(session, 110.0, 121.0)
    assert failure is not None and isinstance(failure.error, StalledError)
    speech.give_up_waiting(failure, 121.0)
    assert speech.check_silence(session, 110.0, 1000.0) == (None, 20.0)
    for event in session.receive_eof(1006):
        speech.receive(event, session, 1000.0)
    assert speech.retry_delay_s is None
    while run_job(speech.pipeline):
        pass
    assert sum(chunk.frames for chunk in iter(speech.take, None)) == 6
    assert speech.result.status == "stalled"


def test_what_was_cut_off_is_not_asked_for_again() -> None:
    speech, _ = begun(reconnect=Reconnect())
    session = Session(GEOMETRY, max_frames=4)
    session.send_text("Hello.")
    session.flush()
    hear(speech, session, 100.0, start(), packet(0, 6))
    assert speech.check_silence(session, 100.0, 1000.0) == (None, 20.0)
    for event in session.receive_eof(1006):
        speech.receive(event, session, 1000.0)
    while run_job(speech.pipeline):
        pass
    assert sum(chunk.frames for chunk in iter(speech.take, None)) == 4
    assert speech.result.status == "too_long"


def test_the_servers_turn_begins_when_the_text_is_complete() -> None:
    options = make_options(stall_timeout_s=5.0, idle_timeout_s=5.0)
    speech, session = Speech(options.config, options), Session(GEOMETRY)
    speech.begin(fresh_connection=True, now_s=0.0)
    for now_s in (0.0, 50.0):
        speech.say("word ")
        speech.transmit(session, now_s)
    assert speech.check_silence(session, 0.0, 100.0) == (None, 5.0)
    speech.complete_text()
    speech.transmit(session, 100.0)
    assert speech.check_silence(session, 0.0, 104.0) == (None, 1.0)
    failure, _ = speech.check_silence(session, 0.0, 105.0)
    assert failure is not None


# Asking again

TRANSIENT = ConnectionFailedError("refused", transient=True)
FINAL = ConnectionFailedError("404")


@given(
    st.lists(st.sampled_from(["lost", "refused", "heard", "taken", "cancel", "404"]), max_size=12),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
def test_it_is_asked_for_again_only_while_nothing_was_taken_and_a_try_is_left(
    happenings: list[str], attempts: int | None, fresh: bool
) -> None:
    reconnect = None if attempts is None else Reconnect(attempts=attempts, jitter=0)
    speech, session = begun(fresh=fresh, reconnect=reconnect)
    left = attempts or 0
    stale = not fresh
    taken = cancelled = False
    for happening in happenings:
        if happening == "heard":
            frames = session.frames_received
            hear(speech, session, 101.0, *([] if frames else [start()]), packet(frames, 1))
            stale = False
        elif happening == "taken":
            while run_job(speech.pipeline):
                pass
            taken |= speech.take() is not None
        elif happening == "cancel":
            speech.stop()
            cancelled = True
        else:
            failure = {"lost": LOST, "refused": TRANSIENT, "404": FINAL}[happening]
            speech.lose(failure)
            again = happening != "404" and not taken and not cancelled and (stale or left > 0)
            assert (speech.retry_delay_s is not None) == again
            if not again:
                assert speech.over
                assert cancelled or speech.pipeline.error is failure
                return
            if not stale:
                left -= 1
            assert (speech.retry_delay_s == 0) == stale
            stale = False
            assert speech.take() is None
            speech.begin_again()
            session = Session(GEOMETRY)
            speech.begin(fresh_connection=True, now_s=102.0)
            speech.transmit(session, 102.0)
            assert [m for m in session.data_to_send() if "Hello." in m]  # all of it, again
        if cancelled:
            return


def test_what_still_comes_of_a_lost_attempt_is_not_heard() -> None:
    speech, session = begun(reconnect=Reconnect())
    hear(speech, session, 101.0, start(), packet(0, 6))
    old = speech.pipeline.next_job()
    assert old is not None
    for event in session.receive_eof(1006):
        speech.receive(event, session, 101.0)
    assert speech.retry_delay_s is not None
    hear(speech, session, 101.0, packet(1, 6))
    speech.begin_again()
    speech.pipeline.finish_job(old, old.run(), 0.0, 0.0)
    assert speech.pipeline.frames_decoded == 0
    session = Session(GEOMETRY)
    speech.begin(fresh_connection=True, now_s=102.0)
    speech.transmit(session, 102.0)
    hear(speech, session, 103.0, *sentence(CODES), session_done())
    while run_job(speech.pipeline):
        pass
    chunks = list(iter(speech.take, None))
    assert np.array_equal(np.concatenate([c.pcm for c in chunks]), expected_ledger(CODES))
    result = speech.result
    assert (result.status, result.attempts, result.frames_received) == ("complete", 2, 57)
    (notice,) = result.notices
    assert notice.startswith("attempt 1 was lost: the connection closed with code 1006 after 6 ")


def test_a_failure_of_the_server_is_never_asked_for_again() -> None:
    speech, session = begun(fresh=False, reconnect=Reconnect())
    hear(speech, session, 101.0, start(), packet(0), error())
    assert (speech.retry_delay_s, speech.failed_remotely) == (None, True)
    assert speech.result.status == "failed"


# Too long


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 60))
def test_a_limit_cuts_within_a_packet_and_keeps_what_is_before_it(
    packets: list[int], limit: int
) -> None:
    speech, _ = begun()
    session = Session(GEOMETRY, max_frames=limit)
    session.send_text("x")
    session.flush()
    session.data_to_send()
    total = sum(packets)
    codes = make_codes(total)
    messages: list[str | bytes] = [start()]
    at = 0
    for seq, size in enumerate(packets):
        messages.append(packet(seq, codes[at : at + size]))
        at += size
    messages += [eos(len(packets)), done(total, len(packets)), session_done()]
    hear(speech, session, 101.0, *messages)
    while run_job(speech.pipeline):
        pass
    pcm = [chunk.pcm for chunk in iter(speech.take, None)]
    assert np.array_equal(np.concatenate(pcm), expected_ledger(codes[:limit]))
    result = speech.result
    if total > limit:
        assert isinstance(result.error, TooLongError) and result.status == "too_long"
        assert result.error.limit_frames == limit
        assert session.data_to_send() == [CANCEL]
        assert f"{limit * 0.08:g} s" in result.reason
    else:
        assert result.status == "complete"
    assert result.frames_handed_out * SAMPLES == sum(part.size for part in pcm)


# Options


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "http://x"}, "must start with ws://"),
        ({"open_timeout_s": 0}, "open_timeout_s must be above 0, not 0"),
        ({"idle_timeout_s": float("inf")}, "idle_timeout_s must be above 0"),
        ({"stall_timeout_s": -1}, "stall_timeout_s must be above 0, or None, not -1"),
        ({"drain_timeout_s": 0}, "drain_timeout_s must be above 0"),
        ({"ping_interval_s": 0}, "ping_interval_s must be above 0, or None"),
        ({"ping_timeout_s": 0}, "ping_timeout_s must be above 0, or None"),
        ({"max_audio_s": 0}, "max_audio_s must be above 0, or None"),
        ({"max_audio_s": 0.05}, "max_audio_s of 0.05 is less than one frame"),
        ({"max_ahead_s": -1}, "max_ahead_s must be 0 or more"),
        ({"max_message_bytes": 0}, "max_message_bytes must be above 0"),
        ({"compression": "gzip"}, "compression must be 'deflate' or None, not 'gzip'"),
        ({"on_gap": "ignore"}, "on_gap must be 'stop' or 'reset', not 'ignore'"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_options(**changes)
