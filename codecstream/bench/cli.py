"""``codecstream-bench``: does this device decode in real time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from codecstream.bench.run import FORMAT, FORMAT_VERSION, Settings, run_bench
from codecstream.bench.table import compare_text, report_text
from codecstream.errors import CodecStreamError

__all__ = ["main"]

EXIT_REAL_TIME, EXIT_TOO_SLOW, EXIT_NOT_COMPLETED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 real-time, 1 completed but not real-time, 2 not completed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.artifact is None) == (options.compare is None):
        parser.error("give an artifact, or --compare A.json B.json")
    try:
        if options.compare is not None:
            first, second = (_read(path) for path in options.compare)
            try:
                text = compare_text(first, second)
            except (KeyError, TypeError, ZeroDivisionError) as error:
                raise ValueError(f"a report lacks what is compared: {error!r}") from error
            sys.stdout.write(text)
            return EXIT_REAL_TIME
        return _measure(options)
    except (CodecStreamError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_COMPLETED


def _measure(options: argparse.Namespace) -> int:
    settings = Settings(
        artifact=options.artifact,
        threads=options.threads,
        sizes=None if options.sizes is None else tuple(options.sizes),
        repeats=options.repeats,
        minutes=options.minutes,
        with_load=options.with_load,
        sweep=not options.no_sweep,
    )
    if options.out is not None:
        Path(options.out).mkdir(parents=True)  # fails where it exists: nothing is overwritten
    try:
        report = run_bench(settings, lambda text: print(f"{text} ...", file=sys.stderr))
    except BaseException:
        if options.out is not None:
            with suppress(OSError):
                Path(options.out).rmdir()  # the next try needs it as much
        raise
    text, document = report_text(report), json.dumps(report, indent=2, allow_nan=False) + "\n"
    if options.out is not None:
        (Path(options.out) / "report.txt").write_text(text, encoding="utf-8")
        (Path(options.out) / "report.json").write_text(document, encoding="utf-8")
    if options.json == "-":
        sys.stdout.write(document)
        sys.stderr.write(text)
    else:
        sys.stdout.write(text)
        if options.json is not None:
            Path(options.json).write_text(document, encoding="utf-8")
    return EXIT_REAL_TIME if report["verdict"]["real_time"] else EXIT_TOO_SLOW


def _read(path: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of codecstream-bench")
    if report.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {report.get('format_version')}, this codecstream compares "
            f"{FORMAT_VERSION}"
        )
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="codecstream-bench",
        description="Measure how fast this machine decodes. Exit status: 0 real-time, 1 completed "
        "and not real-time, 2 not completed.",
    )
    parser.add_argument("artifact", nargs="?", metavar="ARTIFACT", help="an artifact's folder")
    parser.add_argument("--threads", type=int, metavar="N", help="(default: all CPUs allowed)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        metavar="FRAMES",
        help="chunk sizes, beside those of the artifact's ramp (default: 1 2 4 8 16 25)",
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="chunks per size (%(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.5,
        metavar="M",
        help="decode on for so long, so that throttling shows; 30 qualifies a device (%(default)s)",
    )
    parser.add_argument(
        "--with-load", action="store_true", help="measure beside busy processes, too"
    )
    parser.add_argument("--no-sweep", action="store_true", help="no other numbers of threads")
    parser.add_argument("--json", metavar="FILE", help="all figures; - for standard output")
    parser.add_argument("--out", metavar="DIR", help="a new folder for the report in both forms")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="two reports: B over A"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
