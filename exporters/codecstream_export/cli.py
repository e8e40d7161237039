"""``codecstream-export``: make a decoder artifact from a checkpoint, and prove it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from codecstream.errors import CodecStreamError
from codecstream.geometry import QWEN3_TTS_12HZ
from codecstream.schedule import DEFAULT_RAMP
from codecstream_export.errors import ParityError

__all__ = ["main"]

EXIT_OK, EXIT_FALLS_SHORT, EXIT_WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 only for an artifact that was reloaded and met its floor."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)

    def say(text: str, style: str | None = None) -> None:
        # Messages hold paths and shapes: brackets in them are no markup, and no line is broken.
        console.print(text, style=style, markup=False, soft_wrap=True)

    # Heavy imports wait until the arguments are known to be right.
    from codecstream_export.export import export_artifact

    @contextmanager
    def stage(text: str) -> Iterator[None]:
        started = time.perf_counter()
        with console.status(f"{text} ..."):
            yield
        say(f"  done in {time.perf_counter() - started:5.1f} s: {text}")

    say(f"Exporting {options.checkpoint} for {options.runtime}, {options.precision}")
    try:
        result = export_artifact(
            options.checkpoint,
            options.out,
            ramp=options.ramp,
            decoder_id=options.decoder_id,
            force=options.force,
            stage=stage,
        )
    except ParityError as error:
        say(f"falls short: {error}", style="red")
        return EXIT_FALLS_SHORT
    except (CodecStreamError, ValueError, OSError) as error:
        say(f"error: {error}", style="red")
        return EXIT_WRONG_USE
    for item in result.parity:
        say(
            f"  {item.frames} frames in {item.order} order: {item.snr_db:.1f} dB, "
            f"worst 80 ms {item.worst_slice_snr_db:.1f} dB"
        )
    say(f"Wrote {result.folder} ({result.size_bytes / 1e6:.1f} MB)")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="codecstream-export", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="a speech_tokenizer/ folder, or a model folder that holds one",
    )
    parser.add_argument("--runtime", choices=("onnx",), required=True)
    parser.add_argument("--out", required=True, metavar="DIR", help="the artifact's folder")
    parser.add_argument("--precision", choices=("fp32",), default="fp32")
    parser.add_argument("--mode", choices=("stateful",), default="stateful")
    parser.add_argument(
        "--ramp",
        type=int,
        nargs="+",
        default=list(DEFAULT_RAMP),
        metavar="FRAMES",
        help="chunk sizes that clients will use (default: %(default)s)",
    )
    parser.add_argument(
        "--decoder-id",
        default=QWEN3_TTS_12HZ,
        help="name of the codec that clients compare with the stream's (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace an artifact at --out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
