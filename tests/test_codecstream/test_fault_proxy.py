"""The fault proxy does to a connection what its link says, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest
from shells import both_shells, nothing_left, say
from speaking import CODES, replay
from support import LedgerProgram, expected_ledger
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

import codecstream
from codecstream import ConnectionFailedError, Reconnect
from codecstream.fault_proxy import FaultProxy, Link, MessageFault
from codecstream.testing import Peer, ScriptedServer
from codecstream.transport import failed_to_connect
from codecstream.wire import InputDone, InputText, SessionConfig, decode_packet, encode_message

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

SETTINGS = [encode_message(m) for m in (SessionConfig(), InputText("x"), InputDone())]


async def ask(socket: ClientConnection) -> None:
    for text in SETTINGS:
        await socket.send(text)


async def through(link: Link, frames: int = 5) -> tuple[list[str | bytes], int | None, FaultProxy]:
    """Return what a client hears of an utterance through ``link``, up to the close."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES[:frames])
        await peer.socket.close(1000)

    heard: list[str | bytes] = []
    code = None
    async with (
        ScriptedServer(script) as server,
        FaultProxy(server.url, [link]) as proxy,
        connect(proxy.url, proxy=None, ping_interval=None) as socket,
    ):
        await ask(socket)
        try:
            while True:
                heard.append(await asyncio.wait_for(socket.recv(), 20))
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else None
    assert server.failures == proxy.failures == []
    return heard, code, proxy


def seqs(heard: list[str | bytes]) -> list[int]:
    return [decode_packet(m, 16).seq for m in heard if isinstance(m, bytes)]


@pytest.mark.parametrize(
    "link",
    [
        Link(),
        Link(latency_ms=5, jitter_ms=5),
        Link(piece_bytes=1),
        Link(piece_bytes=7, messages=[MessageFault("drop", request=7)]),
        Link(bytes_per_s=50_000),
        Link(stall_after_bytes=300, stall_s=0.1),
    ],
)
async def test_nothing_is_lost_that_is_not_meant_to_be(link: Link) -> None:
    heard, code, _ = await through(link)
    assert (len(heard), seqs(heard), code) == (8, [0, 1, 2, 3, 4], 1000)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (MessageFault("drop", 2), [0, 2, 3, 4]),
        (MessageFault("duplicate", 2), [0, 1, 1, 2, 3, 4]),
        (MessageFault("swap", 2), [0, 2, 1, 3, 4]),
        (MessageFault("corrupt", 2, offset=0, value=4), [0, 5, 2, 3, 4]),
        (MessageFault("stall", 2, seconds=0.05), [0, 1, 2, 3, 4]),
    ],
)
async def test_faults_of_messages(fault: MessageFault, expected: list[int]) -> None:
    heard, code, proxy = await through(Link(messages=[fault]))
    assert (seqs(heard), code) == (expected, 1000)
    assert proxy.fired == [(0, fault.kind)]


async def test_messages_that_are_altered() -> None:
    faults = [
        MessageFault("truncate", 0),
        MessageFault("replace", 1, payload=b"other"),
        MessageFault("insert", 6, payload="news"),
        MessageFault("corrupt", 7, offset=3),
    ]
    heard, _, proxy = await through(Link(messages=faults))
    whole, _, _ = await through(Link())
    assert heard[0] == whole[0][: len(whole[0]) // 2]
    assert heard[1:3] == [b"other", whole[2]]
    assert heard[6] == "news"
    assert heard[8] == str(whole[7])[:3] + "}" + str(whole[7])[4:]
    assert [kind for _, kind in proxy.fired] == [fault.kind for fault in faults]


async def test_several_faults_of_one_message() -> None:
    faults = [MessageFault("duplicate", 2), MessageFault("drop", 2), MessageFault("truncate", 2)]
    heard, _, proxy = await through(Link(messages=faults))
    assert seqs(heard) == [0, 2, 3, 4]
    assert len(proxy.fired) == 3


@pytest.mark.parametrize("code", [1000, 1005, 1006, 1012, 4001])
async def test_any_close_code(code: int) -> None:
    heard, seen, _ = await through(Link(messages=[MessageFault("close", 2, value=code)]))
    assert len(heard) == 2
    assert seen == (None if code == 1006 else code)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_cut_is_at_the_byte(reset: bool) -> None:
    passed = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(bytes(10_000))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    links = [Link(cut_after_bytes=n, reset=reset) for n in (0, 1, 777)]
    async with FaultProxy(url, links) as proxy:
        port = int(proxy.url.split(":")[2].rstrip("/"))
        for _ in links:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello\n")
            try:
                passed.append(len(await reader.read(-1)))
            except ConnectionResetError:
                passed.append(-1)
            writer.close()
            await asyncio.sleep(0)
    server.close()
    await server.wait_closed()
    assert passed == ([-1] * 3 if reset else [0, 1, 777])
    assert proxy.fired == [(index, "cut") for index in range(3)]


async def test_rate_and_latency_take_their_time() -> None:
    for link, least_s in ((Link(latency_ms=150), 0.3), (Link(bytes_per_s=2000), 0.3)):
        started_s = time.perf_counter()
        await through(link)
        assert time.perf_counter() - started_s > least_s


@both_shells
async def test_a_half_open_connection_ends_by_the_clients_own_clock(
    shell: str, ledger_program: LedgerProgram
) -> None:
    async with (
        replay() as server,
        FaultProxy(server.url, [Link(half_open_after_bytes=900)]) as proxy,
    ):
        lost, complete = await say(
            shell, proxy.url, ledger_program, "x", "y", idle_timeout_s=0.5, drain_timeout_s=0.1
        )
        assert proxy.fired == [(0, "half-open")]
    assert "nothing came from the server for 0.5 s" in lost.result.reason
    assert complete.result.status == "complete"


@both_shells
async def test_a_refused_connection_is_a_passing_failure(
    shell: str, ledger_program: LedgerProgram
) -> None:
    """websockets tells a reset in the handshake in several ways: all are the network's."""
    async with replay() as server, FaultProxy(server.url, [Link(refuse=True)] * 20) as proxy:
        for _ in range(20):
            with pytest.raises(ConnectionFailedError) as caught:
                await say(shell, proxy.url, ledger_program, "x")
            assert caught.value.transient, caught.value
        (outcome,) = await say(shell, proxy.url, ledger_program, "x")
    assert outcome.result.status == "complete"


@pytest.mark.parametrize(
    "error", [ConnectionClosedError(None, None), ConnectionResetError(), EOFError(), TimeoutError()]
)
def test_every_loss_in_the_handshake_is_passing(
    error: Exception, ledger_program: LedgerProgram
) -> None:
    """Which of them is raised hangs on a race between the reset and websockets' threads."""
    options = codecstream.sync_connect("ws://127.0.0.1:9/", ledger_program)._options
    assert failed_to_connect(options, error).transient


@both_shells
async def test_a_client_that_reconnects_hears_all_of_it(
    shell: str, ledger_program: LedgerProgram
) -> None:
    links = [Link(cut_after_bytes=600), Link(messages=[MessageFault("close", 3, value=1012)])]
    async with replay(pace=0.05) as server, FaultProxy(server.url, links) as proxy:
        (outcome,) = await say(
            shell,
            proxy.url,
            ledger_program,
            "x",
            schedule=[25],
            reconnect=Reconnect(first_delay_s=0),
        )
    assert outcome.result.attempts == 3
    assert outcome.pcm.tolist() == expected_ledger(CODES).tolist()
    assert [fault for _, fault in proxy.fired] == ["cut", "close"]


def test_links_and_urls_are_checked() -> None:
    with pytest.raises(ValueError, match="latency_ms must be 0 or more, not -1"):
        Link(latency_ms=-1)
    with pytest.raises(ValueError, match="piece_bytes must be above 0, or None, not 0"):
        Link(piece_bytes=0)
    with pytest.raises(ValueError, match=r"one of drop, .*, not 'lose'"):
        MessageFault("lose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 to 255, not 256"):
        MessageFault("corrupt", value=256)
    with pytest.raises(ValueError, match="must be 0 or more"):
        MessageFault("drop", message=-1)
    with pytest.raises(ValueError, match="must start with ws://, not 'wss://x'"):
        FaultProxy("wss://x")


async def test_headers_pass_through() -> None:
    seen: list[str] = []

    async def script(peer: Peer) -> None:
        seen.append(peer.headers["Authorization"])

    link = Link(messages=[MessageFault("drop")])
    async with ScriptedServer(script) as server, FaultProxy(server.url, [link]) as proxy:
        headers = {"Authorization": "Bearer x"}
        async with connect(proxy.url, proxy=None, additional_headers=headers):
            pass
    assert seen == ["Bearer x"]


async def test_a_server_that_is_not_there(ledger_program: LedgerProgram) -> None:
    async with FaultProxy("ws://127.0.0.1:9/") as proxy:
        with pytest.raises(ConnectionFailedError):
            await say("asyncio", proxy.url, ledger_program, "x")
    assert proxy.failures == []
