"""Hundreds of sessions with random faults: typed results, exact audio, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import Counter

import pytest
from fault_bench import run_sessions
from fault_plans import FAULTS, draw
from shells import leftovers, nothing_left

__all__ = ["nothing_left"]

SESSIONS = 510


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.case(53)
async def test_500_sessions_with_random_faults(caplog: pytest.LogCaptureFixture) -> None:
    unhandled: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unhandled.append(str(context))
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tally = await run_sessions(range(SESSIONS))
        await asyncio.sleep(0.1)  # for what the last connections still have to close
        gc.collect()
    assert tally.wrong == [], "\n".join(tally.wrong)
    assert tally.sessions == SESSIONS
    assert unhandled == []
    assert [str(warning.message) for warning in warned] == []
    assert leftovers() == set()
    current = asyncio.current_task()
    assert [task for task in asyncio.all_tasks() if task is not current] == []
    # What is logged is websockets' word on pings that nobody answered, and on cut handshakes.
    assert {record.name.split(".")[0] for record in caplog.records} <= {"websockets"}

    # A bench whose faults never strike shows nothing.
    for fault in FAULTS:
        if fault != "nothing":
            assert tally.fired[fault] >= 3, f"{fault!r} struck in {tally.fired[fault]} sessions"
    ends = Counter(status for _, status in tally.ends.elements())
    assert set(ends) == {
        "complete", "cancelled", "failed", "incomplete", "refused", "stalled", "too_long"
    }  # fmt: skip


def test_plans_are_the_same_for_the_same_seed_and_use_every_fault_in_both_shells() -> None:
    plans = [draw(seed) for seed in range(SESSIONS)]
    assert {(plan.fault, plan.shell) for plan in plans} == {
        (fault, shell) for fault in FAULTS for shell in ("asyncio", "threads")
    }
    for seed in (0, 17, 301):
        again = draw(seed)
        assert (again.options, again.link) == (plans[seed].options, plans[seed].link)
        assert again.message_faults == plans[seed].message_faults
        for speech, same in zip(again.speeches, plans[seed].speeches, strict=True):
            assert speech.reference.tolist() == same.reference.tolist()
