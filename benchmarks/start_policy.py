"""The start policy against someone who knows the future, and against a fixed ramp, as tables.

    python benchmarks/start_policy.py [--sessions 1] [--expect] [--no-warm-up] [--json FILE]

Everything is simulated (codecstream.simulate) but the arrivals named "loopback", which were
measured (traces/loopback.json says how). A session is one policy and eight utterances of 2 to 10
seconds. Decoding n frames takes r * 80 ms * 25 / 25.8 * (n + 0.8), which is r times real time at
25 frames: a fixed part of 0.8 frames is what the table of README.md, "Decoding at the published
size", has. Every chunk's time varies by up to 5 % up or down.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from codecstream.policy import AdaptivePolicy
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream.simulate import Packet, clairvoyant_start_s, ramp_start_s, simulate

FRAME_S = 0.08
PACES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
COSTS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (60, 125, 25, 90, 40, 125, 75, 125)  # frames of a session's utterances
TRACES = Path(__file__).parent / "traces"
TOLERANCE_S = 0.002  # of the planner and of the policy's reserve: below it, two starts are the same

Lateness = Callable[[random.Random, int, float], list[float]]


@dataclass
class Row:
    """One simulated utterance. Times in seconds from the request."""

    arrivals: str
    pace: float
    cost: float
    utterance: int
    frames: int
    start_s: float
    optimum_s: float
    ramp_s: float  # the earliest for the fixed ramp in this very utterance, known in hindsight
    ramp_first_s: float  # when the ramp's first chunk is ready
    underruns: int
    stall_s: float
    foreseen: bool  # no frame came later than forecast when playback began


def main() -> None:
    options = parse_options()
    began_s = time.perf_counter()
    rows = [
        row
        for kind in KINDS
        for pace in PACES
        for cost in COSTS
        for session in range(options.sessions)
        for row in run_session(kind, pace, cost, session, options.expect, not options.no_warm_up)
    ]
    print(f"{len(rows)} utterances in {time.perf_counter() - began_s:.0f} s\n")
    first = [row for row in rows if row.utterance == 0]
    later = [row for row in rows if row.utterance > 0]
    for title, key in (
        ("pace", lambda row: row.pace),
        ("decoding", lambda row: row.cost),
        ("arrivals", lambda row: row.arrivals),
    ):
        print_table(title, key, first, later)
    print_goals(first, later)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


# Arrivals: how much later than its turn each frame is handed over; the order is kept.


def clean(rng: random.Random, frames: int, pace: float) -> list[float]:
    return [0.0] * frames


def wifi(rng: random.Random, frames: int, pace: float) -> list[float]:
    """A good Wi-Fi: 4 ms on average, exponential, and 30 to 120 ms for one packet in fifty."""
    return [
        rng.expovariate(1 / 0.004) + (rng.uniform(0.03, 0.12) if rng.random() < 0.02 else 0.0)
        for _ in range(frames)
    ]


def poor_wifi(rng: random.Random, frames: int, pace: float) -> list[float]:
    """The same, and about every 40 frames nothing comes through for 100 to 300 ms."""
    late_s = wifi(rng, frames, pace)
    held_until_s = 0.0
    for i in range(frames):
        turn_s = i * pace * FRAME_S
        if rng.random() < 1 / 40:
            held_until_s = turn_s + rng.uniform(0.1, 0.3)
        late_s[i] = max(late_s[i], held_until_s - turn_s)
    return late_s


def uneven_talker(rng: random.Random, frames: int, pace: float) -> list[float]:
    """Each step of the talker takes 60 to 140 % of the mean, so that lateness adds up."""
    late_s, total_s = [], 0.0
    for _ in range(frames):
        total_s += rng.uniform(-0.4, 0.4) * pace * FRAME_S
        late_s.append(total_s)
    return late_s


def bursts(size: int) -> Lateness:
    """The server sends so many frames at a time, when the last of them is made."""

    def late(rng: random.Random, frames: int, pace: float) -> list[float]:
        ends = [min(i // size * size + size, frames) - 1 for i in range(frames)]
        return [(end - i) * pace * FRAME_S for i, end in enumerate(ends)]

    return late


def random_bursts(rng: random.Random, frames: int, pace: float) -> list[float]:
    """Packets of one to six frames, with the jitter of a good Wi-Fi."""
    late_s: list[float] = []
    while len(late_s) < frames:
        size = min(rng.randint(1, 6), frames - len(late_s))
        delay_s = wifi(rng, 1, pace)[0]
        late_s += [(size - 1 - i) * pace * FRAME_S + delay_s for i in range(size)]
    return late_s


def loopback(rng: random.Random, frames: int, pace: float) -> list[float]:
    """Measured: one of the recorded utterances, less its even pace."""
    record = json.loads((TRACES / "loopback.json").read_text(encoding="utf-8"))
    times_ms = rng.choice(record["utterances_ms"])[:frames]
    turn_ms = record["pace"] * record["frame_ms"]
    late_ms = [time_ms - turn_ms * (i + 1) for i, time_ms in enumerate(times_ms)]
    return [late / 1000 for late in late_ms]


KINDS: dict[str, Lateness] = {
    "even": clean,
    "loopback": loopback,
    "good Wi-Fi": wifi,
    "poor Wi-Fi": poor_wifi,
    "uneven talker": uneven_talker,
    "bursts of 4": bursts(4),
    "bursts of 10": bursts(10),
    "random bursts": random_bursts,
}


def make_packets(kind: str, frames: int, pace: float, rng: random.Random) -> list[Packet]:
    """Return the arrivals: the talker needs ``pace`` * 80 ms per frame, from the request on."""
    packets: list[Packet] = []
    last_s = 0.0
    for i, late_s in enumerate(KINDS[kind](rng, frames, pace)):
        last_s = max(last_s, (i + 1) * pace * FRAME_S + late_s)
        packets.append((last_s, 1))
    return packets


# Simulation


class Witness(AdaptivePolicy):
    """Remembers what was forecast when playback began."""

    promise: tuple[int, list[float]] | None = None

    def begin(self) -> None:
        super().begin()
        self.promise = None

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        begin_s = super().begin_at_s(now_s, queued_s)
        if self.promise is None and queued_s and begin_s <= now_s + 1e-9:
            bounds_s = [] if self._ended else self._arrivals_s(now_s, at_least=0)
            assert bounds_s is not None
            self.promise = (self._forecast.frames - self._waiting, bounds_s)
        return begin_s

    def kept(self, packets: Sequence[Packet], offset_s: float) -> bool:
        assert self.promise is not None
        first, bounds_s = self.promise
        if not bounds_s:
            return True
        arrivals_s = [offset_s + time_s for time_s, _ in packets[first:]]
        if len(arrivals_s) > len(bounds_s):
            return False  # longer than was planned for
        return all(a <= b + 1e-9 for a, b in zip(arrivals_s, bounds_s, strict=False))


def run_session(
    kind: str, pace: float, cost: float, session: int, expect: bool, warm_up: bool
) -> Iterable[Row]:
    rng = random.Random(f"{kind} {pace} {cost} {session}")

    def exact(frames: int) -> float:
        return cost * FRAME_S * 25 / 25.8 * (frames + 0.8)

    def varied(frames: int) -> float:
        return exact(frames) * rng.uniform(0.95, 1.05)

    policy = Witness({n: varied(n) for n in DEFAULT_RAMP} if warm_up else None)
    for index, frames in enumerate(LENGTHS):
        packets = make_packets(kind, frames, pace, rng)
        if expect:
            policy = _expecting(policy, round(frames * rng.uniform(1.0, 1.3)))
        run = simulate(policy, packets, varied, offset_s=100.0 * index)
        assert sum(chunk.frames for chunk in run.chunks) == frames and run.start_s is not None
        sizes = Ramp().split(frames)
        yield Row(
            arrivals=kind,
            pace=pace,
            cost=cost,
            utterance=index,
            frames=frames,
            start_s=run.start_s,
            optimum_s=clairvoyant_start_s(packets, exact),
            ramp_s=ramp_start_s(packets, exact, sizes),
            ramp_first_s=packets[min(sizes[0], frames) - 1][0] + exact(sizes[0]),
            underruns=run.underruns,
            stall_s=run.stall_s,
            foreseen=policy.kept(packets, 100.0 * index),
        )


def _expecting(policy: Witness, frames: int) -> Witness:
    """Have the next utterance's length be told at its beginning."""
    begin = AdaptivePolicy.begin

    def begin_and_expect() -> None:
        begin(policy)
        policy.promise = None
        policy.expect(frames)

    policy.begin = begin_and_expect  # type: ignore[method-assign]
    return policy


# Tables


def print_table(
    title: str, key: Callable[[Row], object], first: Sequence[Row], later: Sequence[Row]
) -> None:
    print(
        f"| {title} | first: start / optimum, median (p90) | underrun, stall s "
        f"| later: start / optimum, median (p90) | start s, median | ramp s, median "
        f"| underrun, unforeseen, stall s |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for value in dict.fromkeys(key(row) for row in first):
        ones = [row for row in first if key(row) == value]
        rest = [row for row in later if key(row) == value]
        print(
            f"| {value} | {ratios(ones)} | {underrun(ones)} | {ratios(rest)} "
            f"| {statistics.median(row.start_s for row in rest):.2f} "
            f"| {statistics.median(row.ramp_s for row in rest):.2f} "
            f"| {underrun(rest, unforeseen=True)} |"
        )
    print()


def ratios(rows: Sequence[Row]) -> str:
    ordered = sorted(row.start_s / row.optimum_s for row in rows)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return f"{statistics.median(ordered):.2f} ({p90:.2f})"


def underrun(rows: Sequence[Row], unforeseen: bool = False) -> str:
    dry = [row for row in rows if row.underruns]
    surprised = f", {sum(not row.foreseen for row in dry)}" if unforeseen else ""
    return f"{len(dry)} of {len(rows)}{surprised}, {sum(row.stall_s for row in dry):.2f}"


def print_goals(first: Sequence[Row], later: Sequence[Row]) -> None:
    """Print the figures for the goals."""
    for name, rows in (("first utterances", first), ("later utterances", later)):
        for what, chosen in (
            ("pace up to 1", [row for row in rows if row.pace <= 1]),
            ("slower than real time", [row for row in rows if row.pace > 1]),
        ):
            dry = [row for row in chosen if row.underruns]
            foreseen = sum(row.foreseen for row in dry)
            prebuffers = fixed_prebuffers([*first, *later])
            fixed = [row.ramp_first_s + prebuffers[cell(row)] for row in chosen]
            after_fixed = sum(
                row.start_s > start_s + TOLERANCE_S
                for row, start_s in zip(chosen, fixed, strict=True)
            )
            after_ramp = sum(row.start_s > row.ramp_s + TOLERANCE_S for row in chosen)
            print(
                f"- {name}, {what}: {len(dry)} of {len(chosen)} run dry, {foreseen} of them "
                f"although all frames came as forecast; start / optimum {ratios(chosen)}; later "
                f"than the ramp with the cell's prebuffer: {after_fixed}, with this utterance's "
                f"own: {after_ramp}"
            )


def cell(row: Row) -> tuple[object, ...]:
    return row.arrivals, row.pace, row.cost


def fixed_prebuffers(rows: Sequence[Row]) -> dict[tuple[object, ...], float]:
    """Return the smallest prebuffer with which no utterance of a cell runs dry, by cell."""
    prebuffers: dict[tuple[object, ...], float] = {}
    for row in rows:
        needed_s = row.ramp_s - row.ramp_first_s
        prebuffers[cell(row)] = max(prebuffers.get(cell(row), 0.0), needed_s)
    return prebuffers


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=1, help="of each kind (%(default)s)")
    parser.add_argument("--expect", action="store_true", help="tell lengths, up to 30 %% too long")
    parser.add_argument("--no-warm-up", action="store_true", help="no costs to begin with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all utterances")
    return parser.parse_args()


if __name__ == "__main__":
    main()
