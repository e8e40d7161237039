"""A few lines on a terminal that say how an utterance is doing, while it is spoken.

with live_view(utterance, player):      # nothing where the output is no terminal, or without rich
    async for chunk in utterance: ...
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from codecstream import SyncUtterance, Utterance
from codecstream.observe import Progress
from codecstream.playback import PlaybackStats, Player

FRAME_S = 0.08
BAR_COLUMNS = 30


def live_view(
    utterance: Utterance | SyncUtterance, player: Player | None = None, console: Any = None
) -> AbstractContextManager[Any]:
    """Return a context that shows the utterance's progress eight times per second."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        return nullcontext()
    console = console or Console()
    if not console.is_terminal:
        return nullcontext()

    def view() -> Text:
        return Text(describe(utterance.progress, None if player is None else player.stats))

    return Live(get_renderable=view, console=console, refresh_per_second=8, transient=True)


def describe(progress: Progress, stats: PlaybackStats | None, rate_hz: int = 24_000) -> str:
    """Return the view as text: one row per place where sound can wait."""
    received_s = progress.frames_received * FRAME_S
    decoded_s = progress.frames_decoded * FRAME_S
    rows = [("received", received_s), ("decoded", decoded_s)]
    if stats is None:
        rows.append(("taken", progress.frames_handed_out * FRAME_S))
    else:
        rows.append(("played", stats.played_samples / rate_hz))
    longest = max(received_s, 1.0)
    lines = [
        f"{name:>9} {seconds:6.2f} s {'#' * round(BAR_COLUMNS * seconds / longest)}"
        for name, seconds in rows
    ]
    rtf = "-" if progress.decode_rtf is None else f"{progress.decode_rtf:.2f}"
    buffered_s = progress.audio_ready_s if stats is None else stats.queued_samples / rate_hz
    lines.append(f"{'buffer':>9} {buffered_s:6.2f} s   decode RTF {rtf}")
    if stats is not None and stats.underruns:
        lines[-1] += f"   {stats.underruns} underruns, {stats.underrun_samples / rate_hz:.2f} s"
    return "\n".join(lines)
