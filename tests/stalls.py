"""Stand the whole process still at random moments, as a busy machine does, to find unsteady tests.

    pytest --stalls 0.4 tests/test_codecstream

A test that relies on something taking less than that many seconds fails sooner or later.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time


def begin(longest_s: float) -> None:
    """Stall this process for up to ``longest_s`` seconds, about half of the time, until it ends."""
    # The standard C library as a Python one: calls into it keep the interpreter's lock.
    usleep = ctypes.PyDLL(None).usleep

    lengths = random.Random()  # not the one that hypothesis watches

    def stall() -> None:
        while True:
            time.sleep(lengths.uniform(0, longest_s))
            usleep(int(lengths.uniform(0, longest_s) * 1e6))

    threading.Thread(target=stall, name="stalls", daemon=True).start()
