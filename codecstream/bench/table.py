"""The report in words and columns, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["compare_text", "report_text"]


def report_text(report: dict[str, Any]) -> str:
    """Return the report as text; the last line is the verdict."""
    artifact, host, settings = report["artifact"], report["host"], report["settings"]
    lines = [
        f"{artifact['path']}: {artifact['runtime']}, {artifact['precision']}, {artifact['mode']}, "
        f"{artifact['mb']:.1f} MB",
        f"{host['cpu'] or host['architecture']}, {host['usable_cpus']} of {host['cpus']} CPUs, "
        f"{settings['threads']} threads, {report['made_at']}",
        "",
        *_sizes(report["sizes"]),
    ]
    if report["with_load"] is not None:
        count = report["with_load"]["busy_processes"]
        lines += ["", f"beside {count} busy processes:", *_sizes(report["with_load"]["sizes"])]
    cold = report["cold_start"]
    names = ("import", "open", "load", "warm_up", "first_chunk")
    parts = ", ".join(f"{name.replace('_', ' ')} {cold[f'{name}_ms']:.0f}" for name in names)
    lines += ["", f"cold start, ms: {parts}"]
    memory = report["memory"]
    if memory["resident_mb"] is not None:
        lines.append(
            f"memory, MB: {memory['resident_mb']:.0f} resident, {memory['peak_mb']:.0f} at most, "
            f"{memory['growth_mb']:+.1f} while decoding on"
        )
    sustained = report["sustained"]
    if sustained["rtf"]:
        factors = " ".join(f"{rtf:.2f}" for rtf in sustained["rtf"])
        lines.append(
            f"{sustained['minutes']:g} minutes without a pause, RTF every "
            f"{sustained['interval_s']:.0f} s: {factors}"
        )
        if sustained["resident_mb"] is not None:
            held = " ".join(f"{resident:.0f}" for resident in sustained["resident_mb"])
            lines.append(f"resident then, MB: {held}")
    for item in report["threads"] or ():
        sizes = ", ".join(
            f"{size['frames']} frames {size['p50_ms']:.0f} ms" for size in item["sizes"]
        )
        lines.append(f"{item['threads']} threads: {sizes}")
    lines += ["", *_playback(report["playback"])]
    peak = report["peak"]
    if peak["gflops"]:
        share = "" if peak["share"] is None else f", of which decoding reaches {peak['share']:.2f}"
        lines += ["", f"float32 matrix product: {peak['gflops']:.0f} GFLOP/s{share}"]
    return "\n".join([*lines, "", report["verdict"]["text"]]) + "\n"


def compare_text(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return how two reports differ: second over first, so below 1 the second is faster."""
    lines = [
        f"A: {_name(first)}",
        f"B: {_name(second)}",
    ]
    if first["host"] != second["host"]:
        lines.append("The hosts differ: times compare two machines, not two artifacts.")
    rows = []
    other = {item["frames"]: item for item in second["sizes"]}
    for item in first["sizes"]:
        if item["frames"] in other:
            b = other[item["frames"]]
            rows.append(
                (
                    str(item["frames"]),
                    *(
                        f"{b[key] / item[key]:.2f}"
                        for key in ("min_ms", "p50_ms", "p90_ms", "p99_ms")
                    ),
                )
            )
    if not rows:
        raise ValueError("the reports have no chunk size in common")
    lines += ["", *_columns(("frames", "min B/A", "p50 B/A", "p90 B/A", "p99 B/A"), rows)]
    for title, path in (
        ("resident memory", ("memory", "resident_mb")),
        ("load", ("cold_start", "load_ms")),
        ("matrix product", ("peak", "gflops")),
    ):
        a, b = (report[path[0]][path[1]] for report in (first, second))
        if a and b:
            lines.append(f"{title}: {b / a:.2f}")
    lines += [f"A: {first['verdict']['text']}", f"B: {second['verdict']['text']}"]
    return "\n".join(lines) + "\n"


def _name(report: dict[str, Any]) -> str:
    artifact = report["artifact"]
    return (
        f"{artifact['path']} ({artifact['runtime']}, {artifact['precision']}, "
        f"{report['settings']['threads']} threads), {report['host']['cpu']}, {report['made_at']}"
    )


def _sizes(sizes: Iterable[dict[str, Any]]) -> list[str]:
    rows = [
        (
            str(item["frames"]),
            *(f"{item[key]:.1f}" for key in ("min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")),
            f"{item['rtf']:.2f}",
            f"{item['p99_ms'] / item['budget_ms']:.2f}",
            "yes" if item["fits"] else "NO",
        )
        for item in sizes
    ]
    head = ("frames", "min ms", "p50", "p90", "p99", "max", "RTF", "p99 of budget", "fits")
    return _columns(head, rows)


def _playback(items: Iterable[dict[str, Any]]) -> list[str]:
    """A table of who plays from when, and how often it runs dry."""
    rows = []
    for item in items:
        late = f"({item['unavoidable_ms']:.0f} if decoding took no time)"
        for who, played, note in (
            ("the ramp, after a fixed delay", item, late if item["unavoidable_ms"] else ""),
            ("AdaptivePolicy, first utterance", item["adaptive"], ""),
        ):
            figures = (played[key] for key in ("start_ms", "underruns", "silence_ms"))
            rows.append((f"{item['pace']:g}", who, *(f"{value:.0f}" for value in figures), note))
    return _columns(
        ("talker's pace", "player", "plays from ms", "underruns", "silence ms", ""), rows
    )


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
