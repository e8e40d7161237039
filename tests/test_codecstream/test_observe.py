"""What a client tells of itself: to a program's hook and to the log, in both shells."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shells import assert_whole, both_shells, say
from speaking import CODES, replay
from support import LedgerProgram

from codecstream import Observer, ServerError, UtteranceResult, wire
from codecstream.metrics import ChunkTime, summarise
from codecstream.observe import Observers, Progress, describe_message
from codecstream.testing import Fault

SECRET = "my secret words"


class Listener(Observer):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.progress: list[Progress] = []

    def connected(self, url: str) -> None:
        self.told.append(("connected", url))

    def sent(self, message: str) -> None:
        self.told.append(("sent", json.loads(message)["type"]))

    def received(self, message: str | bytes) -> None:
        packet = isinstance(message, bytes)
        self.told.append(("received", "packet" if packet else json.loads(message)["type"]))

    def disconnected(self, code: int, reason: str) -> None:
        self.told.append(("disconnected", code))

    def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
        self.told.append(("chunk", chunk))
        self.progress.append(progress)

    def utterance_ended(self, result: UtteranceResult) -> None:
        self.told.append(("ended", result))

    def of(self, kind: str) -> list[Any]:
        return [what for name, what in self.told if name == kind]


@both_shells
async def test_a_hook_sees_everything_in_order(shell: str) -> None:
    listener = Listener()
    async with replay() as server:
        url = server.url
        (outcome,) = await say(shell, url, LedgerProgram(), "Hello.", observer=listener)
    assert_whole(outcome)
    kinds = [name for name, _ in listener.told]
    assert kinds[0] == "connected"
    assert kinds[-1] == "disconnected"
    assert listener.of("connected") == [url]
    assert listener.of("sent")[:3] == ["session.config", "input.text", "input.done"]
    assert listener.of("received")[0] == "codec.start"
    assert listener.of("received").count("packet") >= len(CODES)
    assert listener.of("received")[-1] == "session.done"
    assert listener.of("chunk") == list(outcome.result.timeline)
    assert listener.of("ended") == [outcome.result]
    assert listener.of("disconnected") == [1000]
    assert kinds.index("ended") > max(i for i, kind in enumerate(kinds) if kind == "chunk")


@both_shells
async def test_progress_adds_up(shell: str) -> None:
    listener = Listener()
    async with replay() as server:
        (outcome,) = await say(shell, server.url, LedgerProgram(), "Hello.", observer=listener)
    last = listener.progress[-1]
    assert last.frames_decoded == last.frames_received == len(CODES)
    assert last.frames_waiting == 0
    assert last.decode_rtf == pytest.approx(outcome.result.metrics.decode_rtf)
    for before, after in zip(listener.progress, listener.progress[1:], strict=False):
        assert before.frames_decoded < after.frames_decoded
        assert before.frames_received <= after.frames_received
        assert before.elapsed_ms <= after.elapsed_ms
    for progress in listener.progress:
        assert progress.frames_handed_out <= progress.frames_decoded <= progress.frames_received
        assert progress.frames_waiting == progress.frames_received - progress.frames_decoded
        assert progress.audio_ready_s >= 0
    result = outcome.result
    assert 2 <= result.frames_waiting_max <= len(CODES)
    assert 0 < result.audio_ready_max_s <= len(CODES) * 0.08 + 1e-9
    assert [chunk.budget_ms for chunk in result.timeline] == pytest.approx(
        [chunk.frames * 80 for chunk in result.timeline]
    )


@both_shells
async def test_every_end_is_told_once(shell: str) -> None:
    listener = Listener()
    async with replay(Fault("error", packet=3)) as server:
        failed, whole = await say(shell, server.url, LedgerProgram(), "A.", "B.", observer=listener)
    assert isinstance(failed.error, ServerError)
    assert listener.of("ended") == [failed.result, whole.result]


@both_shells
async def test_a_hook_that_fails_disturbs_nothing(
    shell: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Observer):
        def received(self, message: str | bytes) -> None:
            raise RuntimeError("a bug of the program")

        def utterance_ended(self, result: UtteranceResult) -> None:
            raise KeyError("another")

    async with replay() as server:
        with caplog.at_level(logging.ERROR, "codecstream"):
            (outcome,) = await say(shell, server.url, LedgerProgram(), "A.", observer=Broken())
    assert_whole(outcome)
    assert caplog.text.count("an observer failed in received; it is told once") == 1
    assert "a bug of the program" in caplog.text


@both_shells
async def test_the_log_has_every_message_and_nobodys_words(
    shell: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with replay() as server:
        url = server.url + "?token=" + SECRET.replace(" ", "")
        with caplog.at_level(logging.DEBUG, "codecstream"):
            settings = {"voice": "vivian", "instructions": SECRET}
            await say(shell, url, LedgerProgram(), SECRET, settings=settings)
    log = caplog.text
    for text in (
        "connected to ws://",
        "> session.config ",
        "voice=vivian",
        f"> input.text text=({len(SECRET)} characters)",
        "> input.done",
        "< codec.start ",
        "< packet 0: 1 frames",
        "EOS",
        "< session.done ",
        "chunk 0: 2 frames in ",
        f"utterance complete: all {len(CODES)} frames",
        "connection closed with code 1000",
    ):
        assert text in log, text
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("codecstream"))
    for word in (SECRET, SECRET.replace(" ", "")):
        assert word not in ours


@both_shells
async def test_nothing_is_logged_unless_asked(shell: str, caplog: pytest.LogCaptureFixture) -> None:
    async with replay() as server:
        with caplog.at_level(logging.INFO, "codecstream"):
            await say(shell, server.url, LedgerProgram(), "A.")
    assert not [record for record in caplog.records if record.name.startswith("codecstream")]


# Lines


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ('{"type": "input.done"}', "input.done"),
        ('{"type": "input.text", "text": "Hello."}', "input.text text=(6 characters)"),
        ('{"type": "x", "voice": "a", "n": 3, "b": true, "l": [1, 2]}',
         "x voice=a n=3 b=True l=(2 items)"),
        ("{", "(1 characters that are no JSON)"),
        ("[]", "(2 characters that are no message)"),
        ('{"a": 1}', "(no type) a=1"),
        (b"", "(a packet has a header of 7 bytes, this message has 0 bytes)"),
        (wire.encode_packet(5, [[0] * 16], 0), "packet 5: 1 frames"),
        (wire.encode_packet(0, [[0] * 16] * 3, 5), "packet 0: 3 frames, EOS, RESET"),
    ],
)  # fmt: skip
def test_messages_in_a_line(message: str | bytes, line: str) -> None:
    assert describe_message(message) == line


@given(st.one_of(st.text(), st.binary(), st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
).map(json.dumps)))  # fmt: skip
def test_any_message_is_a_short_line(message: str | bytes) -> None:
    assert len(describe_message(message)) < 500


def test_a_long_message_is_cut() -> None:
    fields = {f"n{i}": i for i in range(1000)}
    line = describe_message(json.dumps({"type": "x", **fields}))
    assert line.startswith("x n0=0 n1=1")
    assert line.endswith("characters)")


def test_observers_have_the_observers_calls_only() -> None:
    observers = Observers(Listener())
    observers.connected("ws://x")
    with pytest.raises(AttributeError):
        observers.no_such_call()


# Budgets


def test_chunks_over_their_budget_by_hand() -> None:
    chunks = [
        ChunkTime(t_ms=200, samples=3840, decode_ms=80),  # half of 160 ms
        ChunkTime(t_ms=600, samples=7680, decode_ms=400),  # 1.25 of 320 ms
        ChunkTime(t_ms=700, samples=0, decode_ms=900),  # no audio: no budget
    ]
    figures = summarise(chunks, sample_rate_hz=24_000)
    assert (figures.chunks_over_budget, figures.worst_budget_share) == (1, 1.25)
    assert summarise([], 24_000).worst_budget_share is None


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_observer_cannot_keep_a_program_from_ending(kind: type[BaseException]) -> None:
    class Ending(Observer):
        def connected(self, url: str) -> None:
            raise kind

    observers = Observers(Ending())
    with pytest.raises(kind):
        observers.connected("ws://host")
    with ThreadPoolExecutor() as pool:
        pool.submit(observers.connected, "ws://host").result()
