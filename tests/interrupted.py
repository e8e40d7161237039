"""A program for threads that is interrupted at one instruction after another.

    python tests/interrupted.py URL MODE STEP

Python looks for signals when it enters a function and when a function written in C returns. It
tells a profiler of just these moments, so a profiler that raises ``KeyboardInterrupt`` at the
n-th of them is Ctrl-C at the n-th moment, which real signals hit once in a thousand. Every
STEP-th is tried, until an utterance has no such moment any more. MODE:

    enter    it strikes between connecting and the end of the utterance
    loop     ... within the utterance, and leaves the 'with' block
    again    ... within the utterance, which is cancelled then, and another one is spoken
    close    ... while the client is closed, which is then closed again
    handler  nothing is raised: the signal's handler cancels the utterance, and another is spoken
    ending   the same while the client is closed

It prints a line per fault, and at last how many moments were tried.
"""

import faulthandler
import sys
import threading
import time

import numpy as np

import codecstream

PATIENCE_S = 20.0


class Silent:
    geometry, max_frames, decoder_id = codecstream.CodecGeometry(), None, None

    def initial_state(self):
        return None

    def step(self, codes, state):
        return np.zeros(len(codes) * 1920, np.float32), state


class Interrupt:
    """A profiler that calls ``strike`` at the n-th moment at which Python looks for signals.

    Starting a thread is left out: interrupted between two lines of ``Thread.start`` of the standard
    library, the thread hangs in that library before its first instruction.
    """

    def __init__(self, moment, strike):
        self._left, self._strike, self._starting = moment, strike, None
        self.where = None

    def __call__(self, frame, event, value):
        if self._starting is not None:
            if event == "return" and frame is self._starting:
                self._starting = None
        elif event == "call" and frame.f_code is threading.Thread.start.__code__:
            self._starting = frame
        elif event in ("call", "c_return"):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._strike()


def ctrl_c():
    raise KeyboardInterrupt


def frames_of(utterance):
    return sum(chunk.frames for chunk in utterance)


def whole_life(client, mode, interrupt):
    """Connect, speak and close, and be interrupted in between."""
    if mode == "enter":
        sys.setprofile(interrupt)
    with client:
        if mode in ("loop", "again", "handler"):
            sys.setprofile(interrupt)
        try:
            frames_of(client.speak("x"))
        except KeyboardInterrupt:
            if mode != "again":
                raise
            client.cancel()
        sys.setprofile(None)
        if mode in ("again", "handler"):
            utterance = client.speak("x")
            frames = frames_of(utterance)
            result = utterance.result
            assert (result.status, frames) == ("complete", result.frames_received), result
        sys.setprofile(interrupt if mode in ("close", "ending") else None)
    sys.setprofile(None)


def main(url, mode, step):
    """Interrupt one life after another, each one a bit later."""
    moment, tried = 1, 0
    while True:
        client = codecstream.sync_connect(url, Silent())
        interrupt = Interrupt(moment, client.cancel if mode in ("handler", "ending") else ctrl_c)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        try:
            whole_life(client, mode, interrupt)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            print(f"{interrupt.where}: {error!r}")
        sys.setprofile(None)
        if mode == "close":
            client.close()
        until_s = time.monotonic() + PATIENCE_S
        left = None
        while left != [] and time.monotonic() < until_s:
            left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if left:
            print(f"{interrupt.where}: {left} are left")
        faulthandler.cancel_dump_traceback_later()
        if interrupt.where is None:
            break
        moment, tried = moment + step, tried + 1
    print(tried)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
