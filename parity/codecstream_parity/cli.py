"""``codecstream-parity``: prove that a device decodes what the eager decoder decodes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codecstream.errors import CodecStreamError
from codecstream.geometry import ATTENTION_WINDOW_FRAMES
from codecstream_parity.check import DEFAULT_FRAMES, Settings, check

if TYPE_CHECKING:
    from codecstream_parity.outcome import Outcome

__all__ = ["main"]

EXIT_OK, EXIT_FALLS_SHORT, EXIT_WRONG_USE = 0, 1, 2
FILE_COLUMNS = 110
REFERENCES = ("eager", "window", "official")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 passed, 1 falls short, 2 wrong use."""
    options = _parser().parse_args(arguments)
    try:
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        print(f"error: {error}: pip install 'codecstream[parity]'", file=sys.stderr)
        return EXIT_WRONG_USE
    errors = Console(stderr=True, highlight=False)
    report = errors if options.json == "-" else Console(highlight=False)
    if not report.is_terminal:
        report.width = FILE_COLUMNS  # nobody's window is too narrow

    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        settings = Settings(**_settings(options))
        with (
            Progress(*columns, console=errors, transient=True)
            if errors.is_terminal
            else (nullcontext()) as progress
        ):
            outcome = check(settings, _say_in(progress))
        _write(outcome, options, report)
    except (CodecStreamError, ValueError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return EXIT_WRONG_USE
    return EXIT_OK if outcome.passed else EXIT_FALLS_SHORT


def _say_in(progress: Any) -> Callable[[str], None]:
    """Return a function that shows what is being done."""
    if progress is None:
        return lambda text: None
    task = progress.add_task("")
    return lambda text: progress.update(task, description=text)


def _write(outcome: Outcome, options: argparse.Namespace, console: Any) -> None:
    from codecstream_parity.table import print_outcome

    print_outcome(outcome, console)
    if options.json:
        text = json.dumps(outcome.to_json(), indent=2, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if options.plot or options.html:
        from codecstream_parity.plots import plot_run

        if options.plot:
            Path(options.plot).write_bytes(plot_run(outcome.worst_run, outcome.subject.path))
        if options.html:
            from codecstream_parity.page import html_page

            Path(options.html).write_text(html_page(outcome), encoding="utf-8")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    files = [Path(file).absolute() for file in (options.json, options.plot, options.html) if file]
    if len(set(files)) < len(files):
        raise ValueError("--json, --plot and --html are written to files of their own")
    if options.long is not None and options.frames is not None:
        raise ValueError("--long says how many frames: --frames does not go with it")
    floors = dict(_floor(text) for text in options.floor)
    for name, value in (
        ("snr_db", options.min_snr_db),
        ("worst_slice_snr_db", options.min_slice_snr_db),
    ):
        if value is not None:
            floors[name] = value
    return {
        "subject": options.subject,
        "checkpoint": options.checkpoint,
        "codes": options.codes,
        "frames": options.long if options.long is not None else options.frames,
        "long": options.long is not None,
        "seed": options.seed,
        "schedule": tuple(options.schedule) if options.schedule else None,
        "reference": options.reference,
        "reference_wav": options.reference_wav,
        "reference_artifact": options.reference_artifact,
        "context": options.context,
        "threads": options.threads,
        "floors": floors,
    }


def _floor(text: str) -> tuple[str, float | None]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--floor takes NAME=VALUE or NAME=none, not {text!r}")
    try:
        return name, None if value.lower() == "none" else float(value)
    except ValueError:
        raise ValueError(f"--floor {name}: {value!r} is not a number, and not none") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="codecstream-parity",
        description="Decode with an artifact, in chunks as a client does, and compare the sound "
        "with a reference. Exit status: 0 passed, 1 falls short, 2 wrong use.",
    )
    parser.add_argument(
        "subject",
        metavar="ARTIFACT",
        help="an artifact's folder; or utterances that a device recorded (a folder or a file of "
        "codecstream.sampling)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="PATH_OR_HUB_ID",
        help="the weights that the reference decodes with; not needed for another artifact or a "
        "WAV file as reference",
    )
    codes = parser.add_argument_group("what is decoded")
    codes.add_argument(
        "--codes",
        metavar="FILE.npy",
        help="integers [frames, codebooks]; or 'demo' for the bundled speech, repeated "
        "(default: seeded random codes)",
    )
    codes.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help=f"how many frames (default: all of --codes, else {DEFAULT_FRAMES}, which is beyond "
        "the 568 that attention can see back)",
    )
    codes.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    codes.add_argument(
        "--schedule",
        type=int,
        nargs="+",
        metavar="FRAMES",
        help="frames per chunk, the last repeats (default: the artifact's ramp)",
    )
    codes.add_argument(
        "--long",
        type=int,
        metavar="N",
        help="decode N frames in bounded memory, and report how the last minute differs from the "
        "first; an hour is 45000",
    )
    references = parser.add_argument_group("what it is compared with")
    references.add_argument(
        "--reference",
        choices=REFERENCES,
        help="eager: the float32 decoder, all frames at once. window: the same, each chunk behind "
        "--context frames of history. official: the class of qwen-tts (default: eager; for a "
        "windowed artifact window, and eager is reported beside it)",
    )
    references.add_argument(
        "--reference-wav",
        metavar="FILE",
        help="what a server made of --codes; shifts up to 4000 samples are taken out and reported",
    )
    references.add_argument("--reference-artifact", metavar="DIR", help="another artifact")
    references.add_argument(
        "--context",
        type=int,
        metavar="FRAMES",
        help=f"history of a window (default: the artifact's, else {ATTENTION_WINDOW_FRAMES})",
    )
    floors = parser.add_argument_group("what it must reach (default: by precision)")
    floors.add_argument("--min-snr-db", type=float, metavar="X", help="fp32 90, fp16 60, int8 40")
    floors.add_argument(
        "--min-slice-snr-db", type=float, metavar="X", help="the worst 80 ms: 80, 45, 25"
    )
    floors.add_argument(
        "--floor",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other, by its name in the JSON's 'floors'; NAME=none for no limit",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="all figures; - for standard output")
    output.add_argument("--plot", metavar="FILE.png", help="a picture of the worst run")
    output.add_argument("--html", metavar="FILE", help="table, pictures and sound in one page")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads that decode (default: all CPUs allowed)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
