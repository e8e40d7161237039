"""Capture files: what is written, what is left out, what a reader makes of damage."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from shells import both_shells, say
from speaking import CODES, replay
from support import LedgerProgram

import codecstream
from codecstream import CaptureError
from codecstream.capture import Capture, Record, read_capture
from codecstream.testing import Peer, ScriptedServer
from codecstream.wire import encode_packet

SECRET = "My name is Rumpelstiltskin."


@both_shells
async def test_messages_and_their_times_are_written(
    shell: str, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    async with replay(pace=0.05) as server:
        outcomes = await say(shell, server.url, ledger_program, "a", "b", capture=path)
    assert [outcome.result.status for outcome in outcomes] == ["complete", "complete"]
    capture = read_capture(path)
    (records,) = capture.connections()
    assert not capture.truncated and not capture.include_text
    kinds = [record.kind for record in records]
    assert kinds[:4] == ["open", "sent", "sent", "sent"]
    assert kinds.count("received") == 2 * (len(CODES) + 3)
    packets = [record for record in records if record.data is not None]
    assert packets[0].data == encode_packet(0, CODES[:1])
    assert packets[len(CODES) - 1].t_ms - packets[0].t_ms > 100  # 57 frames at 4 ms
    assert (records[-1].kind, records[-1].code) == ("closed", 1000)
    # In threads, the server may answer what is said last before the client closes.
    assert records[-1].by == "client" or (shell, records[-1].by) == ("threads", "server")
    assert json.loads(records[-2].message)["type"] == "session.close"


@both_shells
async def test_text_and_headers_stay_out_unless_asked(
    shell: str, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    async def script(peer: Peer) -> None:
        text = await peer.request()
        await peer.start(sentence_text=text)
        await peer.packet(0, CODES[:1])
        await peer.error(f"cannot say {text!r}: no")
        await peer.session_done()
        await peer.socket.close(4000, f"will not say {SECRET}")

    settings: dict[str, Any] = {
        "voice": "vivian",
        "instructions": "Like grandmother.",
        "ref_text": "Over the hills.",
        "ref_audio": "data:audio/wav;base64,UklGRg==",
        "speaker_embedding": [0.125, 0.625],
        "max_new_tokens": 77,
    }
    private = (SECRET, "grandmother", "hills", "UklGRg", "0.125", "Bearer", "token=1")
    async with ScriptedServer(script) as server:
        for include in (False, True):
            path = tmp_path / f"{include}.jsonl"
            with Capture(path, include_text=include, include_headers=include) as capture:
                await say(
                    shell,
                    server.url + "?token=1",
                    ledger_program,
                    SECRET,
                    settings=settings,
                    headers={"Authorization": "Bearer x"},
                    capture=capture,
                )
            written = path.read_text()
            assert [word for word in private if (word in written) != include] == []
            assert "vivian" in written and "77" in written and "cannot say" in written
            assert [r.redacted for r in read_capture(path).records if r.text].count(True) == (
                0 if include else 4  # session.config, input.text, codec.start, error
            )


async def test_what_cannot_be_read_is_left_out_and_stays_unreadable(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send('{"type": "codec.start", "sentence_text": "Rumpelstil')
        await peer.receive()

    path = tmp_path / "session.jsonl"
    async with ScriptedServer(script) as server:
        await say("asyncio", server.url, ledger_program, "x", capture=path, drain_timeout_s=0.1)
    (broken,) = [r for r in read_capture(path).records if r.kind == "received"]
    assert broken.text == "[52 characters that are no JSON left out]"


@both_shells
async def test_the_file_can_be_read_while_it_is_being_written(
    shell: str, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    seen: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES)
        seen.append(len(read_capture(path).records))
        await peer.receive()

    async with ScriptedServer(script) as server:
        await say(shell, server.url, ledger_program, "x", capture=path)
    assert server.failures == []
    assert seen[0] >= 4


@both_shells
async def test_an_existing_file_is_not_overwritten(
    shell: str, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_text("evidence")
    async with replay() as server:
        with pytest.raises(FileExistsError, match=r"evidence\.jsonl"):
            await say(shell, server.url, ledger_program, "x", capture=path)
    assert path.read_text() == "evidence"
    assert server.connections == 0


@both_shells
async def test_a_full_disk_costs_no_speech(
    shell: str, ledger_program: LedgerProgram, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "session.jsonl"
    capture = Capture(path)
    capture.open()
    file = capture._file
    assert file is not None

    class FullDisk:
        written = 0

        def write(self, data: memoryview) -> int:
            room = 1500 - self.written
            if room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.written += min(room, len(data))
            return file.write(data[:room])

        def close(self) -> None:
            file.close()

    capture._file = FullDisk()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        async with replay() as server:
            (outcome,) = await say(shell, server.url, ledger_program, "x", capture=capture)
    assert outcome.result.status == "complete"
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    captured = read_capture(path)
    assert captured.truncated
    assert capture.lost + len(captured.records) == 4 + len(CODES) + 3 + 2
    assert path.stat().st_size == 1500 + len((path.read_bytes()).split(b"\n")[0]) + 1


async def test_connections_that_failed_are_told(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    url = "ws://127.0.0.1:9/v1/audio/speech/stream?token=secret"
    with pytest.raises(codecstream.ConnectionFailedError):
        await say("asyncio", url, ledger_program, "x", capture=path)
    (record,) = read_capture(path).records
    assert record.kind == "failed" and record.reason
    assert "secret" not in path.read_text()


def test_a_path_or_a_capture_is_needed(ledger_program: LedgerProgram) -> None:
    for connect in (codecstream.connect, codecstream.sync_connect):
        with pytest.raises(ValueError, match="capture must be a path, a Capture or None, not 7"):
            connect("ws://x", ledger_program, capture=7)  # type: ignore[operator]


async def test_clients_share_a_capture_and_one_after_another_adds_to_it(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    capture = Capture(path)
    capture.close()  # nothing to close yet
    async with replay() as server:
        for _ in range(2):
            with capture:
                await say("asyncio", server.url, ledger_program, "x", capture=capture)
    assert capture.lost == 0
    connections = read_capture(path).connections()
    assert [len(records) for records in connections] == [4 + len(CODES) + 3 + 2] * 2


HEAD = b'{"capture":1,"client":"codecstream 0.1.0","include_text":false}\n'
OPEN = b'{"kind":"open","t_ms":1.0,"connection":0}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no capture of codecstream"),
        (b"RIFF\x00\x01", "no capture of codecstream"),
        (b'{"format": "har"}\n', "no capture of codecstream.*`capture`"),
        (HEAD.replace(b"1,", b"2,"), "format 2, written by 'codecstream 0.1.0'.*reads format 1"),
        (HEAD + b"\n", "line 2 is damaged"),
        (HEAD + OPEN + b'{"kind":"sent"}\n', "line 3 is damaged.*t_ms"),
        (HEAD + b'{"kind":"lost","t_ms":1,"connection":0}\n', "line 2 is damaged.*'lost'"),
        (HEAD + OPEN.replace(b"1.0", b"-1"), "line 2.*cannot be negative"),
        (HEAD + OPEN.replace(b"1.0", b"1e999"), "line 2"),
        (HEAD + OPEN.replace(b"1.0", b"NaN"), "line 2"),
        (HEAD + OPEN + OPEN.replace(b"1.0", b"0.5"), "line 3.*before that of line 2"),
        (
            HEAD + b'{"kind":"received","t_ms":1,"connection":7,"text":"x"}\n',
            "connection 7 was not opened",
        ),
        (HEAD + OPEN + b'{"kind":"received","t_ms":1,"connection":0}\n', "text or data"),
        (
            HEAD + OPEN + b'{"kind":"received","t_ms":1,"connection":0,"data":"?"}\n',
            "line 3 is damaged.*base64",
        ),
        (HEAD + OPEN + b'{"kind":"closed","t_ms":1,"connection":0}\n', "code and by"),
        (HEAD + b"[" * 100_000 + b"\n", "line 2 is damaged"),
    ],
)
def test_damage_is_told_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=message) as caught:
        read_capture(path)
    assert "damaged.jsonl" in str(caught.value)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_cut_off_last_line_is_left_away(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(HEAD + OPEN + OPEN[:cut])
    capture = read_capture(path)
    assert (len(capture.records), capture.truncated) == (1, True)


def test_huge_files_and_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_bytes(HEAD + OPEN)
    monkeypatch.setattr("codecstream.capture.MAX_FILE_BYTES", 100)
    with pytest.raises(CaptureError, match="106 bytes; a capture of more than 100 "):
        read_capture(path)
    monkeypatch.setattr("codecstream.capture.MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("codecstream.capture.MAX_LINE_BYTES", 40)
    with pytest.raises(CaptureError):
        read_capture(path)


def test_records_are_small_and_come_back_as_they_were(tmp_path: Path) -> None:
    record = Record(kind="received", t_ms=80.0, connection=0, data=encode_packet(7, CODES[:1]))
    line = msgspec.json.encode(record)
    assert len(line) < 120
    assert msgspec.json.decode(line, type=Record) == record
