"""What goes wrong in a session of the fault bench, and how each utterance of it may end.

A plan is drawn from a seed. ``FAULTS`` is the table: for every fault, where it strikes and the
ends that the struck utterance may have. All other utterances of the session must be complete,
but for those that the plan itself cancels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from support import expected_ledger, make_codes

from codecstream import Reconnect
from codecstream.fault_proxy import Link, MessageFault
from codecstream.testing import Fault, Recording
from codecstream.wire import encode_packet

Action = Literal["listen", "pause", "cancel", "cancel later", "abandon"]

LONG_S = 60.0  # longer than any time limit of the bench
SILENCE_S = 3.0  # after which a client gives up, where a fault is silence


@dataclass
class Speech:
    """One utterance of a session: what the server has to say, and what the listener does."""

    text: str
    sentences: list[NDArray[np.int64]]
    action: Action = "listen"
    action_chunk: int = 0
    action_s: float = 0.0
    ends: frozenset[str] = frozenset({"complete"})
    frames_per_packet: int = 1

    @property
    def frames(self) -> int:
        return sum(len(codes) for codes in self.sentences)

    @property
    def granularity(self) -> str:
        """What the server is asked for: else it has one sentence to say."""
        return "none" if len(self.sentences) == 1 else "sentence"

    @cached_property
    def reference(self) -> NDArray[np.float32]:
        """What is heard of it where nothing goes wrong."""
        return np.concatenate([expected_ledger(codes) for codes in self.sentences])

    @cached_property
    def messages(self) -> list[str]:
        """What the server sends for it, by kind; ``last`` is a packet with EOS."""
        kinds: list[str] = []
        for codes in self.sentences:
            packets = math.ceil(len(codes) / self.frames_per_packet)
            kinds += ["start", *["packet"] * (packets - 1), "last", "done"]
        return [*kinds, "session.done"]


@dataclass
class Plan:
    """A session: its utterances, its faults, its client."""

    seed: int
    shell: str
    fault: str
    speeches: list[Speech]
    struck: int
    options: dict[str, Any]
    server_faults: list[Fault] = field(default_factory=list)
    message_faults: list[MessageFault] = field(default_factory=list)
    link: dict[str, Any] = field(default_factory=dict)
    pace: float = 0.0
    frames_per_packet: int = 1
    one_connection: bool = False  # the protocol allows to go on with it
    may_not_connect: bool = False  # at the first try

    @property
    def victim(self) -> Speech:
        return self.speeches[self.struck]

    @property
    def recordings(self) -> list[Recording]:
        return [Recording(*speech.sentences, text=speech.text) for speech in self.speeches]

    @property
    def connection_link(self) -> Link:
        return Link(**self.link, messages=self.message_faults)

    def ends(self, *ends: str, on_same_connection: bool = True) -> None:
        """Say how the struck utterance may end."""
        self.victim.ends = frozenset(ends)
        # A cancelled utterance has other messages, its very end among those that may be struck.
        cancelled = self.victim.action not in ("listen", "pause")
        self.one_connection = on_same_connection and not cancelled

    def lost(self) -> None:
        """Say that the connection is lost in the struck utterance."""
        retried = self.options.get("reconnect") is not None
        self.ends("incomplete", *["complete"] * retried, on_same_connection=False)

    def anywhere(self, *ends: str) -> None:
        """Say that a fault may strike any utterance, or none."""
        for speech in self.speeches:
            speech.ends = frozenset(ends)


def draw(seed: int) -> Plan:
    """Return the plan of a seed. Faults and shells take turns; everything else is drawn."""
    generator = random.Random(f"session {seed}")
    fault = list(FAULTS)[seed // 2 % len(FAULTS)]
    frames_per_packet = generator.choice((1, 1, 1, 3))
    speeches = []
    for index in range(generator.randint(3, 4)):
        sentences = [
            make_codes(generator.choice((1, 2, 3, 7, 20, 40)), seed=1000 * seed + 10 * index + i)
            for i in range(generator.choice((1, 1, 1, 2)))
        ]
        speech = Speech(f"utterance {index}", sentences, frames_per_packet=frames_per_packet)
        speech.action = generator.choice(
            ("listen", "listen", "listen", "pause", "cancel", "cancel later", "abandon")
        )
        speech.action_chunk = generator.randint(0, 3)
        speech.action_s = generator.uniform(0, 0.05)
        speeches.append(speech)
    plan = Plan(
        seed=seed,
        shell=("asyncio", "threads")[seed % 2],
        fault=fault,
        speeches=speeches,
        struck=generator.randrange(len(speeches) - 1),  # at least one comes after it
        options={
            "schedule": generator.choice(((1,), (2, 4, 8, 16, 25), (25,))),
            "max_ahead_s": generator.choice((0.0, 0.5, 10.0)),
            "reconnect": generator.choice((None, Reconnect(attempts=3, first_delay_s=0.01))),
            "idle_timeout_s": 40.0,
            "stall_timeout_s": 30.0,
            "drain_timeout_s": 10.0,
        },
        pace=generator.choice((0.0, 0.02)),
        frames_per_packet=frames_per_packet,
    )
    if generator.random() < 0.6:  # else many a fault would never be seen
        plan.victim.action = generator.choice(("listen", "pause"))
    for speech in speeches[: plan.struck]:
        if speech.action == "cancel later":  # before its request, perhaps: faults count requests
            speech.action = "cancel"
    if generator.random() < 0.5:
        plan.link |= {"latency_ms": generator.uniform(0, 5), "jitter_ms": generator.uniform(0, 5)}
    if generator.random() < 0.3:
        plan.link["piece_bytes"] = generator.choice((1, 7, 64))
    if generator.random() < 0.2:
        plan.link["bytes_per_s"] = generator.uniform(20_000, 200_000)
    FAULTS[fault](plan, generator)
    return plan


def _server_fault(plan: Plan, generator: random.Random, kind: Any, **fields: Any) -> int:
    """Let the server do it at a packet of the first sentence; return which."""
    plan.victim.sentences = plan.victim.sentences[:1]
    packet = generator.randrange(_packets(plan))
    plan.server_faults = [Fault(kind, packet=packet, utterance=plan.struck, **fields)]
    return packet


def _packets(plan: Plan) -> int:
    """Return how many packets the struck utterance has."""
    return sum(kind in ("packet", "last") for kind in plan.victim.messages)


def _server_drops(plan: Plan, generator: random.Random) -> None:
    packet = _server_fault(plan, generator, "drop")
    plan.ends("incomplete" if packet == _packets(plan) - 1 else "failed")


def _server_drops_and_client_resets(plan: Plan, generator: random.Random) -> None:
    packet = _server_fault(plan, generator, "drop")
    plan.options["on_gap"] = "reset"
    codes = plan.victim.sentences[0]
    size = plan.frames_per_packet
    heard = [expected_ledger(codes[: packet * size]), expected_ledger(codes[(packet + 1) * size :])]
    plan.victim.reference = np.concatenate(heard)
    plan.ends("incomplete" if packet == _packets(plan) - 1 else "failed")


def _server_repeats(plan: Plan, generator: random.Random) -> None:
    _server_fault(plan, generator, "repeat")
    plan.ends("failed")


def _server_truncates(plan: Plan, generator: random.Random) -> None:
    _server_fault(plan, generator, "truncate")
    plan.ends("failed")


def _server_sends_bad_code(plan: Plan, generator: random.Random) -> None:
    _server_fault(plan, generator, "code", value=generator.choice((-1, 2048, 2150, 32767)))
    plan.ends("failed")


def _server_fails(plan: Plan, generator: random.Random) -> None:
    _server_fault(plan, generator, "error")
    plan.ends("failed")


def _server_miscounts(plan: Plan, generator: random.Random) -> None:
    value = generator.choice((-1, 1, 5))
    _server_fault(plan, generator, "count", value=value)
    plan.ends("incomplete" if value > 0 else "failed")


def _server_pauses(plan: Plan, generator: random.Random) -> None:
    _server_fault(plan, generator, "stall", seconds=generator.uniform(0, 0.2))
    plan.ends("complete")


def _message_fault(
    plan: Plan, generator: random.Random, kind: Any, *, among: Any = None, **fields: Any
) -> tuple[str, str]:
    """Strike one of the messages ``among`` these kinds; return its kind and the next one's."""
    kinds = plan.victim.messages
    kind_struck = generator.choice(sorted(set(among or kinds) & set(kinds)))
    place = generator.choice([i for i, name in enumerate(kinds) if name == kind_struck])
    plan.message_faults = [MessageFault(kind, message=place, request=plan.struck, **fields)]
    return kinds[place], kinds[place + 1] if place + 1 < len(kinds) else ""


def _message_dropped(plan: Plan, generator: random.Random) -> None:
    kind, after = _message_fault(plan, generator, "drop")
    if kind == "session.done":
        plan.options["stall_timeout_s"] = SILENCE_S
        plan.ends("stalled")
    elif kind == "last":
        _last_packet_is_lost(plan)
        plan.ends("incomplete")
    elif kind == "done" and after == "session.done":
        plan.ends("incomplete")
    else:
        plan.ends("failed")


def _last_packet_is_lost(plan: Plan) -> None:
    """Take the struck message, the last packet of its sentence, out of what is heard.

    Sentences behind it are heard: that one is missing shows at its sentence's end.
    """
    sentence = plan.victim.messages[: plan.message_faults[0].message].count("done")
    heard = list(plan.victim.sentences)
    frames = len(heard[sentence])
    heard[sentence] = heard[sentence][
        : (frames - 1) // plan.frames_per_packet * plan.frames_per_packet
    ]
    plan.victim.reference = np.concatenate([expected_ledger(codes) for codes in heard])


def _message_duplicated(plan: Plan, generator: random.Random) -> None:
    kind, _ = _message_fault(plan, generator, "duplicate")
    plan.ends("complete" if kind == "session.done" else "failed")


def _messages_swapped(plan: Plan, generator: random.Random) -> None:
    among = ("start", "packet", "last", "done")
    kind, after = _message_fault(plan, generator, "swap", among=among)
    plan.ends("incomplete" if (kind, after) == ("done", "session.done") else "failed")


def _header_corrupted(plan: Plan, generator: random.Random) -> None:
    flips = {"offset": generator.randrange(6), "value": generator.randint(1, 255)}
    kind, _ = _message_fault(plan, generator, "corrupt", among=("packet", "last"), **flips)
    plan.ends("failed")
    if kind == "last" and flips["offset"] < 4:
        sentence = plan.victim.messages[: plan.message_faults[0].message].count("done")
        seq = (len(plan.victim.sentences[sentence]) - 1) // plan.frames_per_packet
        ahead = ((seq ^ flips["value"] << 8 * flips["offset"]) - seq) % (1 << 32)
        if ahead >= 1 << 31:  # a number that was before: taken for a repeated packet
            _last_packet_is_lost(plan)


def _code_corrupted(plan: Plan, generator: random.Random) -> None:
    flips = {"offset": 8 + 2 * generator.randrange(16), "value": generator.randint(8, 255)}
    _message_fault(plan, generator, "corrupt", among=("packet", "last"), **flips)
    plan.ends("failed")


def _text_corrupted(plan: Plan, generator: random.Random) -> None:
    among = ("start", "done", "session.done")
    _message_fault(plan, generator, "corrupt", among=among, offset=generator.randrange(9))
    plan.ends("failed")


def _message_truncated(plan: Plan, generator: random.Random) -> None:
    _message_fault(plan, generator, "truncate")
    plan.ends("failed")


def _stream_for_another_decoder(plan: Plan, generator: random.Random) -> None:
    name, value = generator.choice(
        (("codebooks", 8), ("sample_rate", 16000), ("version", 2), ("codebook_size", 4096))
    )
    fields = {"version": 1, "codebooks": 16, "sample_rate": 24000, "codebook_size": 2048}
    start = str({"type": "codec.start", **fields, name: value}).replace("'", '"')
    _message_fault(plan, generator, "replace", payload=start)
    plan.message_faults = [MessageFault("replace", request=plan.struck, payload=start)]
    plan.ends("refused")


def _unknown_message(plan: Plan, generator: random.Random) -> None:
    _message_fault(plan, generator, "insert", payload='{"type": "news", "text": "rain"}')
    plan.ends("complete")


def _error_inserted(plan: Plan, generator: random.Random) -> None:
    error = '{"type": "error", "message": "out of memory"}'
    _message_fault(plan, generator, "insert", payload=error)
    plan.ends("failed" if plan.message_faults[0].message else "refused")


def _stray_packet(plan: Plan, generator: random.Random) -> None:
    payload = encode_packet(generator.randrange(1 << 32), make_codes(1))
    _message_fault(plan, generator, "insert", among=("start", "session.done"), payload=payload)
    plan.ends("failed")


def _closed_in_between(plan: Plan, generator: random.Random) -> None:
    code = generator.choice((1000, 1001, 1005, 1006, 1011, 1012, 1013, 4000))
    kind, _ = _message_fault(plan, generator, "close", value=code)
    plan.lost()
    if kind == "session.done" or (plan.message_faults[0].message == 0 and plan.struck > 0):
        # All was there but the goodbye; or a used connection ended before anything came.
        plan.ends("complete", "incomplete", on_same_connection=False)


def _silent_for_ever(plan: Plan, generator: random.Random) -> None:
    _message_fault(plan, generator, "stall", seconds=LONG_S)
    plan.options["stall_timeout_s"] = SILENCE_S
    plan.options["drain_timeout_s"] = SILENCE_S  # it will not answer a cancel either
    for speech in plan.speeches[: plan.struck]:
        speech.action = "listen"  # a cancel that takes too long would cost the connection
    plan.ends("stalled", on_same_connection=False)


def _silent_for_a_while(plan: Plan, generator: random.Random) -> None:
    _message_fault(plan, generator, "stall", seconds=generator.uniform(0, 0.2))
    plan.ends("complete")


def _somewhere(plan: Plan, generator: random.Random) -> int:
    """Return a place in the bytes of the session, sometimes within the handshake."""
    return generator.choice((generator.randrange(200), *[200 + generator.randrange(2500)] * 4))


def _cut(plan: Plan, generator: random.Random) -> None:
    plan.link |= {"cut_after_bytes": _somewhere(plan, generator)}
    plan.may_not_connect = True
    plan.anywhere("complete", "incomplete")


def _reset(plan: Plan, generator: random.Random) -> None:
    _cut(plan, generator)
    plan.link["reset"] = True


def _half_open(plan: Plan, generator: random.Random) -> None:
    plan.link["half_open_after_bytes"] = 400 + generator.randrange(2500)  # behind the handshake
    plan.options["drain_timeout_s"] = SILENCE_S
    if generator.random() < 0.5:
        plan.options["idle_timeout_s"] = SILENCE_S
    else:
        plan.options |= {"ping_interval_s": 0.5, "ping_timeout_s": SILENCE_S}
    plan.anywhere("complete", "incomplete")


def _bytes_stall(plan: Plan, generator: random.Random) -> None:
    plan.link |= {"stall_after_bytes": _somewhere(plan, generator), "stall_s": 0.2}
    plan.ends("complete")


def _refused(plan: Plan, generator: random.Random) -> None:
    plan.link["refuse"] = True
    plan.may_not_connect = True


def _too_long(plan: Plan, generator: random.Random) -> None:
    limit = generator.randint(1, 30)
    plan.options["max_audio_s"] = limit * 0.08 + 0.001
    plan.one_connection = True
    for speech in plan.speeches:
        if speech.frames > limit:
            speech.ends = frozenset({"too_long"})
            speech.reference = speech.reference[: limit * 1920]


def _nothing(plan: Plan, generator: random.Random) -> None:
    plan.one_connection = True


FAULTS: dict[str, Callable[[Plan, random.Random], None]] = {
    "nothing": _nothing,
    "server drops a packet": _server_drops,
    "server drops a packet, client resets": _server_drops_and_client_resets,
    "server repeats a packet": _server_repeats,
    "server truncates a packet": _server_truncates,
    "server sends a bad code": _server_sends_bad_code,
    "server fails": _server_fails,
    "server miscounts": _server_miscounts,
    "server pauses": _server_pauses,
    "message dropped": _message_dropped,
    "message duplicated": _message_duplicated,
    "messages swapped": _messages_swapped,
    "header corrupted": _header_corrupted,
    "code corrupted": _code_corrupted,
    "text corrupted": _text_corrupted,
    "message truncated": _message_truncated,
    "stream for another decoder": _stream_for_another_decoder,
    "unknown message": _unknown_message,
    "error inserted": _error_inserted,
    "stray packet": _stray_packet,
    "closed in between": _closed_in_between,
    "silent for ever": _silent_for_ever,
    "silent for a while": _silent_for_a_while,
    "cut": _cut,
    "reset": _reset,
    "half open": _half_open,
    "bytes stall": _bytes_stall,
    "connection refused": _refused,
    "too long": _too_long,
}
