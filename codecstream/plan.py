"""The best way to cut frames into chunks, when their arrival and the cost of decoding are known.

One worker decodes chunk after chunk; a chunk begins when its last frame has arrived and the worker
is free, and must be ready when the first of its frames is to be heard. For given times this finds
the earliest moment at which playback may begin without ever running dry, and which chunks allow
it. :mod:`codecstream.policy` asks it about a forecast, :mod:`codecstream.simulate` about what
really came, which is the optimum of someone who knows the future.

>>> from codecstream.plan import earliest_due_s
>>> arrivals_s = [0.08 * (i + 1) for i in range(100)]           # in real time
>>> costs_s = {n: 0.02 + 0.03 * n for n in range(1, 26)}        # seconds to decode n frames
>>> round(earliest_due_s(arrivals_s, costs_s, frame_s=0.08), 3) # one frame at a time: 80 + 50 ms
0.13
>>> round(earliest_due_s(arrivals_s, costs_s, frame_s=0.08, free_s=0.5), 3)  # busy until then
0.55
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["earliest_due_s", "latest_free_s"]

TOLERANCE_S = 0.0005
"""How far above the smallest due time :func:`earliest_due_s` may answer."""


def latest_free_s(
    arrivals_s: Sequence[float], costs_s: Mapping[int, float], due_s: float, frame_s: float
) -> list[float]:
    """Return, for each number of frames decoded, when the worker must be free to go on in time.

    Args:
        arrivals_s: When each frame is there, in order; never falling.
        costs_s: Seconds that a chunk of so many frames takes; must hold 1. Sizes rise, times do not
            fall.
        due_s: When frame 0 is to be heard; frame ``k`` follows ``k * frame_s`` later.
        frame_s: Duration of a frame.

    Returns:
        ``len(arrivals_s) + 1`` times. Entry ``k`` is the latest time at which the worker, with
        frames ``0..k-1`` decoded, may take up the rest so that every chunk is ready in time;
        ``-inf`` where no cut into chunks is in time, ``inf`` after the last frame.
    """
    frames = len(arrivals_s)
    latest = [-math.inf] * frames + [math.inf]
    sizes = list(costs_s.items())
    for k in range(frames - 1, -1, -1):
        heard_s = due_s + k * frame_s
        best = -math.inf
        for size, cost_s in sizes:
            end = k + size
            if end > frames or heard_s - cost_s <= best:
                break  # larger chunks take longer still
            begin_s = min(heard_s, latest[end]) - cost_s
            if begin_s > best and arrivals_s[end - 1] <= begin_s:
                best = begin_s
        latest[k] = best
    return latest


def earliest_due_s(
    arrivals_s: Sequence[float],
    costs_s: Mapping[int, float],
    frame_s: float,
    free_s: float = 0.0,
) -> float:
    """Return the earliest time for frame 0 to be heard such that no later frame is late.

    Args:
        arrivals_s: As for :func:`latest_free_s`.
        costs_s: As there.
        frame_s: As there.
        free_s: When the worker is free.

    Returns:
        A time at which some cut into chunks is in time, at most :data:`TOLERANCE_S` after the
        first such; ``-inf`` where there are no frames.
    """
    if not arrivals_s:
        return -math.inf

    def in_time(due_s: float) -> bool:
        return free_s <= latest_free_s(arrivals_s, costs_s, due_s, frame_s)[0]

    # No chunk can be ready sooner than its first frame, decoded alone; all frames one by one, or
    # as soon as the last is there, always works.
    smallest_s = min(costs_s.values())
    low_s = max(free_s, arrivals_s[0]) + smallest_s
    low_s = max(low_s, max(a - k * frame_s for k, a in enumerate(arrivals_s)) + smallest_s)
    if in_time(low_s):
        return low_s
    step_s = frame_s
    high_s = low_s + step_s
    while not in_time(high_s):
        low_s, step_s = high_s, 2 * step_s
        high_s += step_s
    while high_s - low_s > TOLERANCE_S:
        middle_s = (low_s + high_s) / 2
        if in_time(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s
