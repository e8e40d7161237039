"""``codecstream-bench``: does this device decode in real time."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
        parser.error("give an artifact, or --compare A B")
    try:
        if options.compare is not None:
            first, second = (_read(path) for path in options.compare)
            try:
                text = compare_text(first, second)
            except (AttributeError, LookupError, TypeError, ArithmeticError) as error:
                raise ValueError(f"a report lacks what is compared: {error!r}") from error
            sys.stdout.write(text)
            return EXIT_REAL_TIME
        return _measure(options)
    except (CodecStreamError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
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
    _check_places(options)
    report = run_bench(settings, lambda text: print(f"{text} ...", file=sys.stderr))
    text, document = report_text(report), json.dumps(report, indent=2, allow_nan=False) + "\n"
    (sys.stderr if options.json == "-" else sys.stdout).write(text)
    if options.json == "-":
        sys.stdout.write(document)
    elif options.json is not None:
        Path(options.json).write_text(document, encoding="utf-8")
    if options.out is not None:
        _write_folder(Path(options.out), {"report.txt": text, "report.json": document})
    return EXIT_REAL_TIME if report["verdict"]["real_time"] else EXIT_TOO_SLOW


def _check_places(options: argparse.Namespace) -> None:
    """Find out before half an hour of measuring whether its figures can be kept.

    Raises:
        ValueError: They cannot.
    """
    if options.out is not None and os.path.lexists(options.out):
        raise ValueError(f"--out {options.out} exists: name a new folder")
    if options.json not in (None, "-") and Path(options.json).is_dir():
        raise ValueError(f"--json {options.json} is a folder: name a file, or use --out")
    for option in ("out", "json"):
        place = getattr(options, option)
        if place in (None, "-"):
            continue
        parent = Path(place).absolute().parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(f"--{option} {place}: {parent} is not a folder that can be written to")


def _write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Make a folder that has all of the files, or none at all."""
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        part.chmod(0o755)
        for name, text in files.items():
            (part / name).write_text(text, encoding="utf-8")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _read(given: str) -> dict[str, Any]:
    path = Path(given, "report.json") if Path(given).is_dir() else Path(given)  # of --out
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of codecstream-bench")
    if report.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {report.get('format_version')!r}, "
            f"this codecstream compares {FORMAT_VERSION}"
        )
    return report


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


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
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="two reports, of --json or folders of --out: B over A",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
