"""A client's part, its policy and a real player on one fake clock, held against the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_sound import FakeSound
from one_clock import FRAME_S, Recorded, Rig, Speaker, cost, ended, paced, sentence_of, talk
from support import expected_ledger, make_codes

from codecstream.policy import AdaptivePolicy, FixedPolicy
from codecstream.simulate import simulate


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    return FakeSound().install(monkeypatch)


@pytest.mark.parametrize(
    ("pace", "decoding", "jitter_s", "device_hz"),
    [
        (0.5, 0.1, 0.0, 24_000),
        (0.5, 0.7, 0.06, 24_000),
        (0.9, 0.4, 0.06, 48_000),
        (1.0, 0.1, 0.06, 24_000),
        (1.0, 0.7, 0.0, 24_000),
        (1.15, 0.4, 0.06, 24_000),
    ],
)
def test_playback_begins_and_goes_on_as_simulated(
    monkeypatch: pytest.MonkeyPatch, pace: float, decoding: float, jitter_s: float, device_hz: int
) -> None:
    if device_hz != 24_000:
        pytest.importorskip("soxr")
    random = np.random.default_rng(round(1000 * (pace + decoding + jitter_s)))

    def chunk_cost(frames: int) -> float:
        return decoding * FRAME_S * (frames + 0.8)

    real, simulated = (AdaptivePolicy({1: chunk_cost(1), 25: chunk_cost(25)}) for _ in range(2))
    for index, frames in enumerate((40, 70, 50)):  # what one learns, the next uses
        request_s = 100.0 * (index + 1)
        times_s = paced(frames, pace, random.uniform(0, jitter_s, frames).tolist())
        events = ended(sentence_of(make_codes(frames), times_s, [1] * frames))
        sound = FakeSound().install(monkeypatch)
        sound.devices[0].rates_hz = (device_hz,)
        output = Speaker(sound)
        rig = Rig(events, real, chunk_cost, output, request_s=request_s).run()
        packets = [(time_s, 1) for time_s in times_s]
        expected = simulate(simulated, packets, chunk_cost, offset_s=request_s)
        assert expected.start_s is not None
        late_s = output.begin_s - expected.start_s
        assert -1e-6 <= late_s <= output.block_s + (0.06 if device_hz != 24_000 else 1e-6)
        assert output.player.stats.underruns <= expected.underruns
        assert np.array_equal(rig.pcm, expected_ledger(make_codes(frames)))
        if device_hz == 24_000:
            heard = sound.stream.given
            assert np.array_equal(heard[np.flatnonzero(heard)[0] :][: rig.pcm.size], rig.pcm)
        output.player.close()


def test_after_running_dry_playback_begins_again_when_the_policy_says(sound: FakeSound) -> None:
    """A hole of 2 s that nobody could foresee; then as before. Not the first chunk that comes."""
    times_s = paced(40)[:20] + [t + 2.0 for t in paced(40)[20:]]
    events = ended(sentence_of(make_codes(40), times_s, [1] * 40))
    output = Speaker(sound)
    policy = Recorded(costs_s={1: cost(1), 25: cost(25)})
    rig = Rig(events, policy, cost, output).run()
    assert output.player.stats.underruns == 1
    expected = simulate(AdaptivePolicy({1: cost(1), 25: cost(25)}), [(t, 1) for t in times_s], cost)
    assert expected.underruns == 1
    silent_s = output.player.stats.underrun_samples / 24_000
    assert silent_s == pytest.approx(expected.stall_s, abs=2 * output.block_s)
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(40)))
    begun_again = next(t for t, chunk in rig.heard if t > times_s[19] + 1.0)
    ready = next(c.t_ms / 1000 for _, c in rig.heard if c.t_ms / 1000 > times_s[19] + 1.0)
    assert begun_again > ready + 0.03, "it was there, and was held back"


def test_pausing_the_player_and_the_client_in_between(sound: FakeSound) -> None:
    output = Speaker(sound)
    rig = Rig(talk(80), AdaptivePolicy({1: cost(1), 25: cost(25)}), cost, output)

    def hold(paused: bool) -> Callable[[Rig], None]:
        def change(rig: Rig) -> None:
            rig.pipeline.paused = paused

        return change

    player = output.player
    rig.at = [
        (0.05, lambda _: player.pause()),  # before anything is there
        (0.30, lambda _: player.resume()),
        (1.00, lambda _: player.pause()),
        (1.90, lambda _: player.resume()),
        (2.50, hold(True)),
        (3.20, hold(False)),
    ]
    rig.run()
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(80)))
    heard = sound.stream.given
    assert np.array_equal(heard[heard != 0], rig.pcm[rig.pcm != 0])


def test_a_player_that_goes_on_at_once_finds_what_came_meanwhile(sound: FakeSound) -> None:
    output = Speaker(sound)
    rig = Rig(talk(100), AdaptivePolicy({1: cost(1), 25: cost(25)}), cost, output)
    for i in range(12):
        rig.at += [
            (1.0 + 0.3 * i, lambda _: output.player.pause()),
            (1.1 + 0.3 * i, lambda _: output.player.resume()),
        ]
    rig.run()
    assert output.player.stats.underruns == 0
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(100)))


def test_two_sentences_without_a_gap_play_on_without_one(sound: FakeSound) -> None:
    first = sentence_of(make_codes(30), paced(30, 0.8), [1] * 30)
    second = sentence_of(make_codes(30, 1), paced(30, 0.8, begin_s=30 * 0.8 * FRAME_S), [1] * 30)
    output = Speaker(sound)
    rig = Rig(ended(first + second), AdaptivePolicy(), cost, output).run()
    assert output.player.stats.underruns == 0
    assert len({chunk.sentence_index for _, chunk in rig.heard}) == 2


def test_a_cancel_while_chunks_are_held_back_lets_nothing_out(sound: FakeSound) -> None:
    output = Speaker(sound)
    rig = Rig(talk(40), FixedPolicy((2, 4), prebuffer_s=1.0), cost, output)
    rig.at = [(0.9, lambda rig: rig.pipeline.stop())]
    rig.run()
    assert rig.heard == [] and rig.pipeline.frames_decoded == 10


@pytest.mark.parametrize("policy", [AdaptivePolicy(), FixedPolicy((2, 4))])
def test_the_utterance_after_a_cancelled_one_is_whole(policy: Any) -> None:
    """The policy still has frames of the cancelled one, and a chunk that it never saw again."""
    for request_s in (100.0, 200.0):
        rig = Rig(talk(40), policy, cost, request_s=request_s)
        rig.at = [(0.55, lambda rig: rig.pipeline.stop())]
        rig.run()
    rig = Rig(talk(10), policy, cost, request_s=300.0).run()
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(10)))
