"""The client over real sockets: whole utterances, settings, cancelling."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import numpy as np
import pytest
import trustme
from speaking import CODES, collect, fails, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import (
    CodecStreamError,
    ConnectionFailedError,
    LocalProtocolError,
    Program,
    ServerError,
)
from codecstream.testing import Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancel, SessionConfig


async def test_speaks_several_utterances_on_one_connection(ledger_program: LedgerProgram) -> None:
    recordings = [Recording(make_codes(n, seed=n), text=str(n)) for n in (1, 57, 130)]
    async with (
        ReplayServer(recordings, pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        for frames in (57, 1, 130):
            utterance = client.speak(str(frames))
            pcm = await collect(utterance)
            assert np.array_equal(pcm, expected_ledger(make_codes(frames, seed=frames)))
            result = utterance.result
            assert (result.status, result.frames_decoded, result.notices) == (
                "complete",
                frames,
                (),
            )
    assert (server.connections, server.failures) == (1, [])


@pytest.mark.case(1)
async def test_case_1_second_utterance_starts_fresh(tiny_program: Program) -> None:
    first, second = make_codes(40, seed=1), make_codes(40, seed=2)
    recordings = [Recording(first, text="first"), Recording(second, text="second")]
    async with ReplayServer(recordings, pace=0) as server:
        async with codecstream.connect(server.url, tiny_program) as client:
            await collect(client.speak("first"))
            again = [chunk async for chunk in client.speak("second")]
        async with codecstream.connect(server.url, tiny_program) as client:
            alone = await collect(client.speak("second"))
    assert again[0].frames == 2
    assert np.array_equal(np.concatenate([chunk.pcm for chunk in again]), alone)


@pytest.mark.case(3)
async def test_case_3_eos_alone_or_riding_sounds_the_same(tiny_program: Program) -> None:
    heard = []
    for options in ({"eos": "last"}, {"eos": "alone"}, {"frames_per_packet": 7}):
        async with (
            replay(**options) as server,
            codecstream.connect(server.url, tiny_program) as client,
        ):
            heard.append(await collect(client.speak("x")))
    assert {pcm.size for pcm in heard} == {109_440}
    assert all(np.array_equal(pcm, heard[0]) for pcm in heard)


async def test_sentences_each_start_with_a_fresh_decoder(tiny_program: Program) -> None:
    one, two = make_codes(9, seed=1), make_codes(31, seed=2)
    async with (
        ReplayServer([Recording(one, two), Recording(one), Recording(two)], pace=0) as server,
        codecstream.connect(server.url, tiny_program) as client,
    ):
        utterance = client.speak("both", split_granularity="sentence")
        chunks = [chunk async for chunk in utterance]
        apart = [await collect(client.speak(text)) for text in ("one", "two")]
    assert [chunk.sentence_index for chunk in chunks] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert utterance.result.sentences == 2
    assert np.array_equal(np.concatenate([c.pcm for c in chunks]), np.concatenate(apart))


async def test_blank_text_is_a_complete_utterance_without_sound(
    ledger_program: LedgerProgram,
) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak("  ")
        assert (await collect(utterance)).size == 0
        assert utterance.result.status == "complete"
        assert utterance.result.metrics.ttfa_ms is None


async def test_text_may_come_in_pieces(ledger_program: LedgerProgram) -> None:
    async def pieces() -> AsyncIterator[str]:
        for piece in ("Hel", "lo."):
            await asyncio.sleep(0)
            yield piece

    recordings = [Recording(make_codes(3), text="Bye."), Recording(CODES, text="Hello.")]
    async with (
        ReplayServer(recordings, pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        assert (await collect(client.speak(pieces()))).size == len(CODES) * SAMPLES


async def test_a_failing_text_iterator_reaches_the_caller(ledger_program: LedgerProgram) -> None:
    async def pieces() -> AsyncIterator[str]:
        yield "Hel"
        raise RuntimeError("the language model went away")

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        error = await fails(client.speak(pieces()), CodecStreamError)
        assert "language model went away" in str(error)
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_text_of_a_failed_utterance_does_not_join_the_next(
    ledger_program: LedgerProgram,
) -> None:
    said: list[str] = []
    heard, failed = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.receive()  # session.config
        await peer.receive()  # the first piece
        await peer.start()
        await peer.packet(0, CODES[:2])
        await heard.wait()
        await peer.error("generation failed")
        await peer.session_done(sentences=0)
        failed.set()
        said.append(await peer.request())
        await peer.speak(CODES, 1)
        await peer.receive()

    async def pieces() -> AsyncIterator[str]:
        yield "one "
        await failed.wait()
        await asyncio.sleep(0.05)  # until the news has reached the client
        for piece in ("two ", "three "):
            yield piece
            await asyncio.sleep(0)

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak(pieces())
        await anext(utterance)
        heard.set()
        await asyncio.sleep(0.2)  # the caller is busy elsewhere
        with pytest.raises(ServerError):
            await collect(utterance)
        await collect(client.speak("Next."))
    assert said == ["Next."]


async def test_reset_flag_starts_a_fresh_state_in_mid_stream(tiny_program: Program) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, CODES[:10])
        await peer.packet(1, CODES[10:], Flags.RESET | Flags.EOS)
        await peer.done(total_frames=57, seq_last=1)
        await peer.session_done()
        await peer.request()

    recordings = [Recording(CODES[:10]), Recording(CODES[10:])]
    async with (
        ScriptedServer(script) as scripted,
        ReplayServer(recordings, pace=0) as plain,
        codecstream.connect(scripted.url, tiny_program) as client,
        codecstream.connect(plain.url, tiny_program) as reference,
    ):
        pcm = await collect(client.speak("x"))
        parts = [await collect(reference.speak("x")) for _ in recordings]
    # The ramp restarts with the state, so even the chunks are the same.
    assert np.array_equal(pcm, np.concatenate(parts))


async def test_settings_are_sticky_and_sent_again_only_when_they_change(
    ledger_program: LedgerProgram,
) -> None:
    configs: list[SessionConfig] = []

    async def script(peer: Peer) -> None:
        for index in range(4):
            message = await peer.receive()
            if isinstance(message, SessionConfig):
                configs.append(message)
            await peer.request()
            await peer.speak(CODES[:1], index)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(
            server.url, ledger_program, config=SessionConfig(language="en")
        ) as client,
    ):
        for settings in ({}, {}, {"voice": "vivian"}, {}):
            await collect(client.speak("x", **settings))
    assert [(c.language, c.voice) for c in configs] == [
        ("en", None),
        ("en", "vivian"),
        ("en", None),
    ]


async def test_unknown_settings_are_refused_with_the_list(ledger_program: LedgerProgram) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        with pytest.raises(LocalProtocolError, match=r"volume.*settings are.*voice"):
            client.speak("x", volume=11)


async def test_wss_with_a_certificate_of_ones_own(ledger_program: LedgerProgram) -> None:
    authority = trustme.CA()
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    async with replay(ssl=server_tls) as server:
        assert server.url.startswith("wss://")
        async with codecstream.connect(server.url, ledger_program, ssl=client_tls) as client:
            assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
        with pytest.raises(ConnectionFailedError, match="certificate"):
            async with codecstream.connect(server.url, ledger_program):
                pass


@pytest.mark.case(9)
async def test_case_9_largest_packet_is_decoded_in_small_steps(
    ledger_program: LedgerProgram,
) -> None:
    codes = make_codes(65_535)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, codes, Flags.EOS)
        await peer.done(total_frames=65_535, seq_last=0)
        await peer.session_done()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        frames = 0
        async for chunk in client.speak("x"):
            expected = (
                expected_ledger(codes)[
                    chunk.first_frame * SAMPLES : (chunk.first_frame + chunk.frames) * SAMPLES
                ]
                if chunk.idx % 500 == 0
                else None
            )
            assert expected is None or np.array_equal(chunk.pcm, expected)
            frames += chunk.frames
    assert frames == 65_535
    assert max(ledger_program.calls) == 25


@pytest.mark.case(10)
async def test_case_10_cancel_ends_at_once_and_the_next_utterance_is_clean(
    ledger_program: LedgerProgram,
) -> None:
    swallowed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:40], eos=False)
        while not isinstance(await peer.receive(), InputCancel):
            pass
        await peer.packets(CODES[40:], first_seq=40, eos=False)
        await peer.packet(57, flags=Flags.EOS)
        await peer.done(total_frames=57, seq_last=57, cancelled=True)
        await peer.session_done()
        swallowed.set()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        heard = 0
        async for chunk in utterance:
            heard += chunk.frames
            if heard == 6:
                await client.cancel()
        assert swallowed.is_set()  # cancel() returns when the connection is free
        assert utterance.result.status == "cancelled"
        assert utterance.result.error is None
        assert (heard, utterance.result.frames_received) == (6, 40)
        assert sum(ledger_program.calls) <= 40
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert (server.connections, server.failures) == (1, [])


async def test_cancel_from_another_task_ends_a_waiting_iteration(
    ledger_program: LedgerProgram,
) -> None:
    async with (
        replay(pace=1.0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        task = asyncio.create_task(collect(utterance))
        await asyncio.sleep(0.3)
        await client.cancel()
        await asyncio.wait_for(task, 1)
        assert utterance.result.status == "cancelled"
        await client.cancel()  # nothing in flight: nothing happens


async def test_cancel_before_the_text_is_complete(ledger_program: LedgerProgram) -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "word "
            await asyncio.sleep(0.01)

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak(endless())
        task = asyncio.create_task(collect(utterance))
        await asyncio.sleep(0.1)
        await client.cancel()
        await asyncio.wait_for(task, 1)
        assert utterance.result.status == "cancelled"
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_two_utterances_at_once_are_refused(ledger_program: LedgerProgram) -> None:
    async with (
        replay(pace=0.5) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        first = client.speak("x")
        await anext(first)
        with pytest.raises(LocalProtocolError, match="still in flight"):
            await anext(client.speak("y"))
        assert first.over is False
