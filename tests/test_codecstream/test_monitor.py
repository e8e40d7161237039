"""A monitor: one thread at a time, told of changes, and Ctrl-C leaves its lock free."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest
from interrupted import Interrupt, ctrl_c

from codecstream.monitor import Flag, Guarded, Monitor, MonitoredThread, new_lock

T = TypeVar("T")
needs_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="its lock cannot be asked")


def test_a_wait_ends_when_it_is_told_that_what_it_waits_for_holds() -> None:
    monitor, news = Monitor(), list[str]()

    def bring() -> None:
        with monitor.lock:
            news.append("here")
            monitor.notify_all()

    with ThreadPoolExecutor() as pool, monitor.lock:
        pool.submit(bring)
        assert monitor.wait_for(lambda: bool(news), 30.0)
        assert monitor.wait_for(lambda: bool(news), 0.0)


def test_a_wait_for_what_never_holds_ends_with_its_time() -> None:
    monitor = Monitor()
    began_s = time.monotonic()
    with monitor.lock:
        assert not monitor.wait_for(lambda: False, 0.05)
    assert time.monotonic() - began_s >= 0.05


def at_each_moment(make: Callable[[], T], use: Callable[[T], object]) -> Iterator[tuple[T, Any]]:
    """Interrupt ``use(make())`` at its first moment, the next one at its second, and so on."""
    profiler = sys.getprofile()  # somebody may measure what the tests cover
    for moment in itertools.count(1):
        thing, interrupt = make(), Interrupt(moment, ctrl_c)
        sys.setprofile(interrupt)
        try:
            use(thing)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(profiler)
        yield thing, interrupt.where
        if interrupt.where is None:
            break


def guarded_monitor() -> Monitor:
    monitor = Monitor()
    monitor.lock = Guarded(monitor._lock)
    return monitor


def within(monitor: Monitor) -> None:
    with monitor.lock:
        pass


def waiting(monitor: Monitor) -> None:
    with monitor.lock:
        monitor.wait(0.0)


def waiting_for_it(monitor: Monitor) -> None:
    with monitor.lock:
        monitor.wait_for(lambda: False, 0.0001)
        monitor.notify_all()


def within_twice(monitor: Monitor) -> None:
    with monitor.lock, monitor.lock:
        pass


@pytest.mark.parametrize("make", [Monitor, pytest.param(guarded_monitor, marks=needs_3_11)])
@pytest.mark.parametrize("use", [within, within_twice, waiting, waiting_for_it])
def test_ctrl_c_at_any_moment_leaves_the_lock_free(
    use: Callable[[Monitor], None], make: Callable[[], Monitor]
) -> None:
    """Also with the lock of Python 3.14 under those before it."""
    with ThreadPoolExecutor(1) as other:
        for monitor, where in at_each_moment(make, use):
            assert other.submit(monitor._lock.acquire, timeout=5.0).result(), where


@pytest.mark.parametrize(
    "make", [new_lock, pytest.param(lambda: Guarded(threading.RLock()), marks=needs_3_11)]
)
def test_a_lock_keeps_others_out_until_its_last_block_is_left(
    make: Callable[[], AbstractContextManager[Any]],
) -> None:
    lock, there = make(), list[str]()

    def enter() -> None:
        with lock:
            there.append("other")

    with ThreadPoolExecutor(1) as pool:
        with lock:
            with lock:
                other = pool.submit(enter)
            with pytest.raises(TimeoutError):
                other.result(timeout=0.1)
            assert there == []
        other.result(timeout=20.0)
    assert there == ["other"]


def test_a_flag_is_waited_for_until_it_is_set() -> None:
    flag = Flag()
    assert not flag.wait(0.01) and not flag.is_set()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(flag.wait, 20.0)
        flag.set()
        assert waits.result() and flag.is_set()
    flag.clear()
    assert not flag.wait(0.0)


def test_ctrl_c_in_a_wait_for_a_flag_keeps_nobody_from_setting_it() -> None:
    with ThreadPoolExecutor(1) as other:
        for flag, _ in at_each_moment(Flag, lambda flag: flag.wait(0.0001)):
            other.submit(flag.set).result(5.0)


def test_a_thread_that_never_started_is_not_waited_for() -> None:
    assert MonitoredThread(Monitor(), "never", print).wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_is_waited_for_whatever_ends_it() -> None:
    monitor, go = Monitor(), threading.Event()

    def work() -> None:
        go.wait()
        raise SystemExit

    thread = MonitoredThread(monitor, "works", work)
    thread.start()
    assert not thread.wait(0.0) and not thread.over
    go.set()
    assert thread.wait() and thread.over and not thread.is_alive()


def test_a_monitor_knows_its_own_threads() -> None:
    monitor, known = Monitor(), list[bool]()
    for of in (monitor, Monitor()):
        thread = MonitoredThread(of, "asks", lambda: known.append(monitor.in_own_thread()))
        thread.start()
        thread.wait()
    assert known == [True, False] and not monitor.in_own_thread()
