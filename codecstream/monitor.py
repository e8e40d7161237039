"""A lock, its condition and its threads, where one thread may be struck by Ctrl-C.

Python runs a signal's handler in the main thread, between two of its instructions, and what the
handler raises (``KeyboardInterrupt``) appears there. ``with condition:`` of the standard library is
two Python functions, so it may appear within them: the lock is taken, the block is not entered,
and nobody ever gives the lock back. Where threads compete for the lock, that is no rare moment:
a thread that has got it waits for the interpreter next, and the handler runs right afterwards.
``with lock:`` of a lock itself is one instruction up to Python 3.13. Since 3.14 it is not, and 39
of 100 interrupts of a program that did nothing else left the lock taken: see :func:`new_lock`.

::

    monitor = Monitor()
    with monitor.lock:                     # never: with some_condition
        monitor.wait_for(lambda: ready)

Before Python 3.13, a signal's handler that joins the thread whose join it has interrupted waits for
ever. So a thread of ours tells the monitor of its end, and whoever waits for it waits for that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Flag", "Guarded", "Monitor", "MonitoredThread", "new_lock"]

_WAIT_S = 1.0  # a wait without a limit cannot be interrupted on every system
_JOIN_S = 1.0  # for the last instructions of a thread that has told of its end


def new_lock() -> AbstractContextManager[Any]:
    """Return a lock for ``with``, which a thread that has it may take again."""
    return _for_with(threading.RLock())


class Guarded:
    """Takes ``lock``, an ``RLock``, for a ``with`` block, interrupted or not. From Python 3.11 on.

    What follows the call of ``acquire`` is a moment for signals, so it is within ``try``; the
    return of a Python function is none, unless something else than Python evaluates it (a
    profiler or compiler that hooks in there). What gives the lock back is no Python function, as
    the first instruction of one is such a moment, too.
    """

    __slots__ = ("__exit__", "_lock")

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.__exit__ = lock.__exit__

    def __enter__(self) -> None:
        times = self._lock._recursion_count()
        try:
            self._lock.acquire()
        except BaseException:
            if self._lock._recursion_count() > times:
                self._lock.release()
            raise


def _for_with(lock: Any) -> AbstractContextManager[Any]:
    return Guarded(lock) if sys.version_info >= (3, 14) else lock


class Monitor:
    """What threads share a state with: one at a time, and told when it has changed.

    Attributes:
        lock: Guards the state, and may be taken again by who has it. It is held while a method is
            called.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self.lock = _for_with(self._lock)

    def wait(self, timeout_s: float | None = None) -> None:
        """Let others have the lock, until :meth:`notify_all` or the end of the time.

        It may return before either: ask again what was waited for.
        """
        try:
            self._condition.wait(_WAIT_S if timeout_s is None else min(timeout_s, _WAIT_S))
        except BaseException:  # Ctrl-C, perhaps while others had the lock
            try:
                self._condition.notify(0)
            except RuntimeError:
                self._lock.acquire()  # which the caller's "with" is going to give back
            raise

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``holds()``; return False where it does not when the time is over."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        """Wake up everybody who waits."""
        self._condition.notify_all()

    def in_own_thread(self) -> bool:
        """Whether the caller is one of this monitor's threads, which cannot wait for their end."""
        thread = threading.current_thread()
        return isinstance(thread, MonitoredThread) and thread.monitor is self


class Flag:
    """What ``threading.Event`` is, for a thread that may be interrupted."""

    def __init__(self) -> None:
        self._monitor = Monitor()
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake up who waits for that."""
        with self._monitor.lock:
            self._set = True
            self._monitor.notify_all()

    def clear(self) -> None:
        """Take it back."""
        self._set = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; return False where it is not when the time is over."""
        with self._monitor.lock:
            return self._monitor.wait_for(self.is_set, timeout_s)


class MonitoredThread(threading.Thread):
    """A thread that tells a monitor of its end, whatever ends it.

    It is a daemon: a program that forgets to close what it has opened must be able to end.
    """

    def __init__(self, monitor: Monitor, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.monitor = monitor
        self._work = work
        self._over = False

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        finally:
            with self.monitor.lock:
                self._over = True
                self.monitor.notify_all()

    @property
    def over(self) -> bool:
        """Whether it has ended, or has not started."""
        return self._over or self.ident is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return False where the time is over before."""
        with self.monitor.lock:
            over = self.monitor.wait_for(lambda: self.over, timeout_s)
        if over and self.ident is not None:
            self.join(_JOIN_S)
        return over
