"""Sessions with random faults, each reproducible by its seed.

    python tests/fault_bench.py --seeds 0 500          # a table of faults and ends
    python tests/fault_bench.py --seeds 417 --verbose  # one session: its plan and its results

A replay server, a fault proxy and a client, all on loopback; half the sessions with asyncio, half
with threads. The decoder is a ledger: every sample tells its frame, so equality is exact.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fault_plans import Plan, Speech, draw
from shells import Outcome, outcome
from support import SAMPLES, LedgerProgram

import codecstream
from codecstream import AudioChunk, CodecStreamError, ConnectionFailedError
from codecstream.fault_proxy import FaultProxy
from codecstream.testing import ReplayServer

AT_ONCE = 16
PATIENCE_S = 90.0  # for one session; a hang, not a slow machine


@dataclass
class Tally:
    """What became of many sessions."""

    sessions: int = 0
    fired: Counter[str] = field(default_factory=Counter)  # sessions, by fault
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # (fault, status)
    wrong: list[str] = field(default_factory=list)


def wrong(plan: Plan, what: str) -> str:
    return (
        f"seed {plan.seed} ({plan.fault}, {plan.shell}): {what}; "
        f"again: python tests/fault_bench.py --seeds {plan.seed} --verbose"
    )


async def run_sessions(seeds: Iterable[int], at_once: int = AT_ONCE) -> Tally:
    """Run the sessions of these seeds, many at a time."""
    tally = Tally()
    free = asyncio.Semaphore(at_once)
    with ThreadPoolExecutor(at_once, "fault-bench") as threads:

        async def one(seed: int) -> None:
            async with free:
                plan = draw(seed)
                try:
                    await asyncio.wait_for(run_session(plan, tally, threads), PATIENCE_S)
                except Exception as error:
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    tally.wrong.append(wrong(plan, f"{error!r} at {at.name}(): {at.line}"))

        await asyncio.gather(*(one(seed) for seed in seeds))
    return tally


async def run_session(plan: Plan, tally: Tally, threads: ThreadPoolExecutor) -> list[Outcome]:
    """Run one session and check it; what is wrong goes to ``tally``."""
    problems: list[str] = []
    server = ReplayServer(
        plan.recordings,
        pace=plan.pace,
        faults=plan.server_faults,
        frames_per_packet=plan.frames_per_packet,
    )
    async with server, FaultProxy(server.url, [plan.connection_link], seed=plan.seed) as proxy:
        if plan.shell == "asyncio":
            outcomes = await with_asyncio(plan, proxy.url, problems)
        else:
            loop = asyncio.get_running_loop()
            outcomes = await loop.run_in_executor(threads, with_threads, plan, proxy.url, problems)
        if not await ends_soon(proxy):
            problems.append("the client left a connection open")
    for speech, heard in zip(plan.speeches, outcomes, strict=True):
        problems += check(speech, heard)
        tally.ends[plan.fault, heard.result.status] += 1
    if plan.one_connection and proxy.connections != 1:
        problems.append(f"{proxy.connections} connections, where one would do")
    problems += [f"server: {error!r}" for error in server.failures]
    problems += [f"proxy: {error!r}" for error in proxy.failures]
    tally.wrong += [wrong(plan, problem) for problem in problems]
    tally.sessions += 1
    cut_off = any(heard.result.status == "too_long" for heard in outcomes)
    tally.fired[plan.fault] += bool(proxy.fired or plan.server_faults or cut_off)
    return outcomes


async def ends_soon(proxy: FaultProxy) -> bool:
    """Wait until the client's connections are over; return False where one stays."""
    for _ in range(1000):
        if not proxy.open_connections:
            return True
        await asyncio.sleep(0.01)
    return False


def check(speech: Speech, heard: Outcome) -> list[str]:
    """Return what is wrong with what came of an utterance."""
    result = heard.result
    allowed = set(speech.ends)
    dropped = speech.action in ("cancel", "cancel later", "abandon")
    if dropped:
        allowed.add("cancelled")
    problems = []
    if result.status not in allowed:
        problems.append(
            f"{speech.text!r} ended {result.status!r} ({result.reason}), not {sorted(allowed)}"
        )
    pcm, reference = heard.pcm, speech.reference
    if not np.array_equal(pcm, reference[: pcm.size]):
        different = np.flatnonzero(pcm != np.resize(reference, pcm.size))
        problems.append(
            f"{speech.text!r} is not the reference from frame {different[0] // SAMPLES}"
        )
    if result.status == "complete" and pcm.size != reference.size:
        problems.append(f"{speech.text!r} is complete with {pcm.size} of {reference.size} samples")
    if result.frames_received > speech.frames:
        problems.append(f"{speech.text!r}: {result.frames_received} of {speech.frames} frames came")
    # These raise after the last chunk, but for a listener who wanted no more of them.
    audio_first = result.status in ("stalled", "too_long", "complete") and not dropped
    if audio_first and result.frames_handed_out != result.frames_decoded:
        problems.append(f"{speech.text!r}: {result.frames_decoded} frames decoded, not all taken")
    all_heard = result.frames_handed_out == result.frames_received
    if result.status == "stalled" and audio_first and not all_heard:
        problems.append(f"{speech.text!r} stalled and lost frames that had come")
    if result.status == "too_long" and audio_first and pcm.size != reference.size:
        problems.append(f"{speech.text!r} was not cut off where it should")
    return problems


async def with_asyncio(plan: Plan, url: str, problems: list[str]) -> list[Outcome]:
    """Say everything through the asyncio client."""
    outcomes = []
    async with contextlib.AsyncExitStack() as stack:
        client = None
        for attempt in range(2):
            try:
                client = await stack.enter_async_context(
                    codecstream.connect(url, LedgerProgram(), **plan.options)
                )
                break
            except ConnectionFailedError as error:
                if attempt or not plan.may_not_connect:
                    raise
                if not error.transient:
                    problems.append(f"no passing failure: {error}")
        assert client is not None
        for speech in plan.speeches:
            outcomes.append(await _listen(client, speech, problems))
    return outcomes


async def _listen(client: Any, speech: Speech, problems: list[str]) -> Outcome:
    chunks: list[AudioChunk] = []
    error: CodecStreamError | None = None
    helpers: list[asyncio.Task[None]] = []

    async def later(seconds: float, act: Any) -> None:
        await asyncio.sleep(seconds)
        done = act()
        if done is not None:
            await done

    def resume() -> None:
        nonlocal paused
        paused = False
        client.resume()

    paused = False
    utterance = client.speak(speech.text, split_granularity=speech.granularity)
    if speech.action == "cancel later":
        helpers.append(asyncio.ensure_future(later(speech.action_s, client.cancel)))
    try:
        async for chunk in utterance:
            if paused:
                problems.append(f"{speech.text!r} went on while it was paused")
            chunks.append(chunk)
            if chunk.idx != speech.action_chunk:
                continue
            if speech.action == "abandon":
                break
            if speech.action == "cancel":
                await client.cancel()
            elif speech.action == "pause":
                client.pause()
                paused = True
                helpers.append(asyncio.ensure_future(later(speech.action_s, resume)))
    except CodecStreamError as caught:
        error = caught
    if speech.action == "abandon":
        await client.cancel()
    for helper in helpers:
        await helper
    return outcome(chunks, utterance.result, error or _told_later(speech, utterance))


def with_threads(plan: Plan, url: str, problems: list[str]) -> list[Outcome]:
    """Say everything through the threads' client."""
    outcomes = []
    with contextlib.ExitStack() as stack:
        client = None
        for attempt in range(2):
            try:
                client = stack.enter_context(
                    codecstream.sync_connect(url, LedgerProgram(), **plan.options)
                )
                break
            except ConnectionFailedError as error:
                if attempt or not plan.may_not_connect:
                    raise
                if not error.transient:
                    problems.append(f"no passing failure: {error}")
        assert client is not None
        for speech in plan.speeches:
            outcomes.append(_listen_in_thread(client, speech, problems))
    return outcomes


def _listen_in_thread(client: Any, speech: Speech, problems: list[str]) -> Outcome:
    chunks: list[AudioChunk] = []
    error: CodecStreamError | None = None
    helpers: list[threading.Timer] = []
    paused = False

    def resume() -> None:
        nonlocal paused
        paused = False
        client.resume()

    def later(seconds: float, act: Any) -> None:
        helpers.append(threading.Timer(seconds, act))
        helpers[-1].start()

    utterance = client.speak(speech.text, split_granularity=speech.granularity)
    if speech.action == "cancel later":
        later(speech.action_s, client.cancel)
    try:
        for chunk in utterance:
            if paused:
                problems.append(f"{speech.text!r} went on while it was paused")
            chunks.append(chunk)
            if chunk.idx != speech.action_chunk:
                continue
            if speech.action == "abandon":
                break
            if speech.action == "cancel":
                client.cancel()
            elif speech.action == "pause":
                client.pause()
                paused = True
                later(speech.action_s, resume)
    except CodecStreamError as caught:
        error = caught
    if speech.action == "abandon":
        client.cancel()
    for helper in helpers:
        helper.join()
    return outcome(chunks, utterance.result, error or _told_later(speech, utterance))


def _told_later(speech: Speech, utterance: Any) -> CodecStreamError | None:
    """Return the error of an utterance that was left before it could be raised."""
    error: CodecStreamError | None = utterance.result.error
    return error if speech.action == "abandon" else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 500], metavar="N", help="one, or first and end"
    )
    parser.add_argument("--verbose", action="store_true", help="print each plan")
    options = parser.parse_args()
    first, end = (*options.seeds, options.seeds[0] + 1)[:2]
    if options.verbose:
        for seed in range(first, end):
            print_plan(draw(seed))
    started_s = time.perf_counter()
    tally = asyncio.run(run_sessions(range(first, end)))
    took_s = time.perf_counter() - started_s
    print_ends(tally)
    print(f"\n{tally.sessions} sessions, {sum(tally.ends.values())} utterances in {took_s:.0f} s")
    if tally.wrong:
        raise SystemExit("\n".join(tally.wrong))


def print_plan(plan: Plan) -> None:
    print(
        f"seed {plan.seed}: {plan.fault}, {plan.shell}, pace {plan.pace:g}, "
        f"{plan.frames_per_packet} frames per packet"
    )
    for name in ("options", "link", "server_faults", "message_faults"):
        print(f"  {name}: {getattr(plan, name)}")
    for index, speech in enumerate(plan.speeches):
        struck = " (struck)" if index == plan.struck else ""
        sizes = [len(codes) for codes in speech.sentences]
        print(
            f"  {speech.text}{struck}: frames {sizes}, {speech.action} at chunk "
            f"{speech.action_chunk} or after {speech.action_s:.3f} s, may end {set(speech.ends)}"
        )


def print_ends(tally: Tally) -> None:
    statuses = sorted({status for _, status in tally.ends})
    print("| fault | struck in sessions | " + " | ".join(statuses) + " |")
    print("| --- |" + " ---: |" * (1 + len(statuses)))
    for fault in sorted({fault for fault, _ in tally.ends}):
        counts = " | ".join(str(tally.ends[fault, status]) for status in statuses)
        print(f"| {fault} | {tally.fired[fault]} | {counts} |")


if __name__ == "__main__":
    main()
