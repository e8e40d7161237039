"""The report as a table on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from codecstream_parity.outcome import Outcome
from codecstream_parity.report import Report

__all__ = ["ROWS", "Row", "cell", "print_outcome"]


@dataclass(frozen=True, slots=True)
class Row:
    """A figure: its name in words, how to read it from a report, and its floor in words."""

    title: str
    value: Callable[[Report], str | None]
    floor: Callable[[Report], str | None]
    figure: str  # the name that reasons and not_measured use


def _db(value: float | None) -> str | None:
    if value is None:
        return None
    return "exact" if value == math.inf else f"{value:.1f}"


def _at_least(name: str) -> Callable[[Report], str | None]:
    def floor(report: Report) -> str | None:
        limit = getattr(report.floors, name)
        return None if limit is None else f">= {limit:g}"

    return floor


def _at_most(name: str) -> Callable[[Report], str | None]:
    def floor(report: Report) -> str | None:
        limit = getattr(report.floors, name)
        return None if limit is None else f"<= {limit:g}"

    return floor


def _worst_slice(report: Report) -> str | None:
    worst = report.worst_slice
    return None if worst is None else f"{_db(worst.snr_db)} at {worst.time_s:.2f} s"


def _worst_seam(report: Report) -> str | None:
    seam = report.worst_seam
    if seam is None:
        return None
    time_s = seam.frame * report.samples_per_frame / report.sample_rate_hz
    return f"{seam.excess_db:+.1f} at {time_s:.2f} s"


def _seam_floor(report: Report) -> str | None:
    limit = report.floors.seam_excess_db
    return None if limit is None else f"<= {limit:g}"


def _seam_step(report: Report) -> str | None:
    seam = report.worst_seam
    return None if seam is None else f"{seam.step_db:.1f}"


def _seam_step_floor(report: Report) -> str | None:
    audible = report.floors.seam_step_db
    return None if audible is None else f"or <= {audible:g}"


def _length(report: Report) -> str:
    more = report.output_samples - report.reference_samples
    return f"{report.output_samples}" + (f" ({more:+d})" if more else "")


def _plain(name: str, form: str) -> Callable[[Report], str | None]:
    def value(report: Report) -> str | None:
        figure = getattr(report, name)
        return None if figure is None else f"{figure:{form}}"

    return value


def _snr(name: str) -> Callable[[Report], str | None]:
    return lambda report: _db(getattr(report, name))


def _snr_row(title: str, name: str) -> Row:
    return Row(title, _snr(name), _at_least(name), name)


def _upper_row(title: str, name: str, form: str) -> Row:
    return Row(title, _plain(name, form), _at_most(name), name)


ROWS = (
    Row("samples", _length, lambda report: f"= {report.reference_samples}", "length"),
    _snr_row("SNR, dB", "snr_db"),
    Row("worst 80 ms, dB", _worst_slice, _at_least("worst_slice_snr_db"), "worst_slice_snr_db"),
    _snr_row("1 % of slices below, dB", "slice_p1_snr_db"),
    _snr_row("first 160 ms, dB", "onset_snr_db"),
    _snr_row("last 160 ms, dB", "tail_snr_db"),
    Row("worst seam over usual, dB", _worst_seam, _seam_floor, "worst_seam"),
    Row("  its step over level, dB", _seam_step, _seam_step_floor, "worst_seam"),
    _upper_row("largest error", "max_abs_error", ".2g"),
    _upper_row("level of quiet slices, dB", "quiet_level_db", ".3f"),
    _upper_row("gain, dB", "gain_db", "+.5f"),
    _upper_row("DC", "dc_offset", "+.1e"),
    _upper_row("log-spectral distance, dB", "log_spectral_distance_db", ".4f"),
    _upper_row("lag, samples", "lag_samples", "d"),
    Row("correlation", _plain("correlation", ".6f"), lambda report: None, "correlation"),
    Row("NaN or Inf", _plain("nonfinite_samples", "d"), lambda report: "= 0", "nonfinite_samples"),
    Row("last minute - first, dB", _plain("drift_db", "+.2f"), _at_least("drift_db"), "drift_db"),
)


def cell(row: Row, report: Report) -> tuple[str, bool]:
    """Return what a table says of a figure, and whether the figure misses its floor."""
    value = row.value(report)
    if value is None:
        return "-", False
    return value, row.figure in report.missed


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print a table of all runs, and the verdict."""
    subject = outcome.subject
    what = ", ".join(x for x in (subject.runtime, subject.precision, subject.mode) if x)
    console.print(Text(f"{subject.path}: {what or 'recorded utterances'}"))
    console.print(Text(f"against {outcome.reference}"))
    console.print(Text(f"codes: {outcome.codes}"))
    runs = [*outcome.runs[:4]]
    if outcome.approximation is not None:
        runs.append(outcome.approximation)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(Text(run.name), justify="right")
    table.add_column("floor", no_wrap=True)
    for row in ROWS:
        cells = [cell(row, run.report) for run in runs]
        if all(value == "-" for value, _ in cells):
            continue
        table.add_row(
            row.title,
            # A mark as well as a colour: a log has none.
            *(Text(f"! {value}", style="red") if wrong else Text(value) for value, wrong in cells),
            Text(row.floor(runs[0].report) or ""),
        )
    console.print(table)
    for name, reason in outcome.runs[0].report.not_measured.items() if outcome.runs else ():
        if name in {row.figure for row in ROWS}:
            console.print(Text(f"not measured: {name}: {reason}", style="dim"), soft_wrap=True)
    if len(outcome.runs) > len(runs):
        console.print(Text(f"and {len(outcome.runs) - len(runs)} more recordings"))
    for note in outcome.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for reason in outcome.reasons:
        console.print(Text(reason, style="red"), soft_wrap=True)
    verdict = (
        Text("passed", style="bold green") if outcome.passed else Text("falls short", "bold red")
    )
    console.print(verdict)
