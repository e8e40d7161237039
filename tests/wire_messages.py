"""The server's messages, and what a session makes of them, for the tests of the protocol."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import GEOMETRY, make_codes

from codecstream import (
    wire,
)
from codecstream.events import (
    Event,
    Frames,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.protocol import Session
from codecstream.states import Local

_LATER = itertools.count(1000)  # utterance indices after any that a test uses
DECODER_ID = "qwen3_tts_tokenizer_v2_12hz"
CLOSE_CODES = [1000, 1001, 1005, 1006, 1011, 1012]
CANCELLED = wire.encode_message(wire.InputCancelled())
CANCEL = wire.encode_message(wire.InputCancel())


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


def session_done(sentences: int | None = 1, index: int | None = None) -> str:
    return wire.encode_message(wire.SessionDone(index, sentences))


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
    events = receive(speak(session, "Next."), *sentence(codes, index=next(_LATER)), session_done())
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


LOCAL_STEPS: dict[Local, Callable[[Session], None]] = {
    Local.CONFIG: lambda session: session.configure(wire.SessionConfig()),
    Local.TEXT: lambda session: session.send_text("More."),
    Local.FLUSH: lambda session: session.flush(),
    Local.CANCEL: lambda session: session.cancel(),
    Local.CLOSE: lambda session: session.close(),
}
