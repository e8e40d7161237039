"""Latency figures of one utterance, from the times at which its chunks were ready.

Times count from the moment the request was sent.

>>> from codecstream.metrics import ChunkTime, summarise
>>> chunks = [ChunkTime(t_ms=200, samples=3840), ChunkTime(t_ms=500, samples=7680)]
>>> figures = summarise(chunks, sample_rate_hz=24000)
>>> figures.ttfa_ms, figures.playback_start_ms, figures.stall_at_ttfa_ms
(200, 340.0, 140.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ChunkTime", "Metrics", "summarise"]


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """When a chunk's audio was ready, how much it is, and what decoding it took.

    Attributes:
        t_ms: When it was decoded.
        samples: Samples of audio.
        idx: Index of the chunk within its utterance.
        frames: Codec frames that it was decoded from.
        arrival_ms: When the last of them had arrived.
        decode_ms: What decoding took.
        budget_ms: What it may take at most to keep up: the duration of its audio.
    """

    t_ms: float
    samples: int
    idx: int = 0
    frames: int = 0
    arrival_ms: float = 0.0
    decode_ms: float = 0.0
    budget_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one utterance; None where nothing was decoded.

    Attributes:
        ttfa_ms: When the first chunk with audio was ready.
        playback_start_ms: The earliest moment at which a player could start and never run dry.
        stall_at_ttfa_ms: Total silence of a player that starts at ``ttfa_ms``, each stall
            shifting what follows.
        audio_s: Duration of the audio.
        total_s: When the last chunk was ready.
        rtf: ``total_s / audio_s``; about the talker's pace when the device keeps up.
        decode_ms_total: Time spent decoding.
        decode_rtf: The same over the duration of the audio; below 1 the device keeps up.
        chunks_over_budget: Chunks that took longer to decode than they play.
        worst_budget_share: The largest share of its audio's duration that a chunk took.
    """

    ttfa_ms: float | None = None
    playback_start_ms: float | None = None
    stall_at_ttfa_ms: float | None = None
    audio_s: float = 0.0
    total_s: float | None = None
    rtf: float | None = None
    decode_ms_total: float = 0.0
    decode_rtf: float | None = None
    chunks_over_budget: int = 0
    worst_budget_share: float | None = None


def summarise(chunks: Iterable[ChunkTime], sample_rate_hz: int) -> Metrics:
    """Return the figures of an utterance's chunks, given in order."""
    timeline = [chunk for chunk in chunks if chunk.samples]
    if not timeline:
        return Metrics()
    ttfa_ms = timeline[0].t_ms
    playback_start_ms = ttfa_ms
    stall_ms = 0.0
    audio_ms = 0.0
    for chunk in timeline:
        playback_start_ms = max(playback_start_ms, chunk.t_ms - audio_ms)
        runs_dry_ms = ttfa_ms + stall_ms + audio_ms
        stall_ms += max(0.0, chunk.t_ms - runs_dry_ms)
        audio_ms += chunk.samples * 1000 / sample_rate_hz
    decode_ms = sum(chunk.decode_ms for chunk in timeline)
    shares = [chunk.decode_ms / (chunk.samples * 1000 / sample_rate_hz) for chunk in timeline]
    return Metrics(
        ttfa_ms=ttfa_ms,
        playback_start_ms=playback_start_ms,
        stall_at_ttfa_ms=stall_ms,
        audio_s=audio_ms / 1000,
        total_s=timeline[-1].t_ms / 1000,
        rtf=timeline[-1].t_ms / audio_ms,
        decode_ms_total=decode_ms,
        decode_rtf=decode_ms / audio_ms,
        chunks_over_budget=sum(share > 1 for share in shares),
        worst_budget_share=max(shares),
    )
