"""``codecstream-export``: make a decoder artifact from a checkpoint, and prove it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from codecstream.codes import read_codes
from codecstream.errors import CodecStreamError
from codecstream.geometry import ATTENTION_WINDOW_FRAMES, QWEN3_TTS_12HZ, CodecGeometry
from codecstream.schedule import DEFAULT_RAMP
from codecstream_export.choices import MODES, PRECISIONS, RUNTIMES
from codecstream_export.errors import ParityError

if TYPE_CHECKING:
    import torch

    from codecstream_export.export import ExportResult

__all__ = ["main"]

EXIT_OK, EXIT_FALLS_SHORT, EXIT_WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 only for an artifact that was reloaded and met its floor."""
    options = _parser().parse_args(arguments)
    # Heavy imports wait until the arguments are known to be right.
    try:
        from rich.console import Console

        from codecstream_export.export import export_artifact
    except ImportError as error:
        print(f"error: {error}: pip install 'codecstream[export]'", file=sys.stderr)
        return EXIT_WRONG_USE
    console = Console(stderr=True, highlight=False)

    def say(text: str, style: str | None = None) -> None:
        # Messages hold paths and shapes: brackets in them are no markup, and no line is broken.
        console.print(text, style=style, markup=False, soft_wrap=True)

    @contextmanager
    def stage(text: str) -> Iterator[None]:
        started = time.perf_counter()
        with console.status(f"{text} ..."):
            yield
        say(f"  done in {time.perf_counter() - started:5.1f} s: {text}")

    what = f"{options.runtime}, {options.precision}, {options.mode}"
    say(f"Exporting {options.checkpoint} for {what}")
    try:
        calibration = _read_calibration(options.calibration) if options.calibration else None
        result = export_artifact(
            options.checkpoint,
            options.out,
            runtime=options.runtime,
            precision=options.precision,
            mode=options.mode,
            ramp=options.ramp,
            context=options.context,
            calibration=calibration,
            min_snr_db=options.min_snr_db,
            min_slice_snr_db=options.min_slice_snr_db,
            allow_undelegated=options.allow_undelegated,
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
    _report(result, say)
    return EXIT_OK


def _report(result: ExportResult, say: Callable[[str], None]) -> None:
    """Print what was measured."""
    manifest = result.manifest
    if manifest.delegation is not None:
        left = sum(manifest.delegation["undelegated_operators"].values())
        products = manifest.delegation["undelegated_products"]
        say(
            f"  {manifest.delegation['backend']} took {manifest.delegation['node_share']:.0%} of "
            f"the operators and {manifest.delegation['arithmetic_share']:.1%} of the arithmetic; "
            f"left: {left} small operators, {len(products)} products"
        )
        for line in products:
            say(f"    not taken: {line}")
    if manifest.quantization is not None:
        layers = manifest.quantization["quantized"]
        share = manifest.quantization["arithmetic"]
        say(f"  in int8: {share:.0%} of the convolutions' arithmetic: {', '.join(layers)}")
    for item in result.parity:
        say(
            f"  {item.frames} frames in {item.order} order against {item.reference}: "
            f"{item.snr_db:.1f} dB, worst 80 ms {item.worst_slice_snr_db:.1f} dB"
        )
    speed = result.real_time
    verdict = "real time" if speed.passed else "NOT real time"
    say(
        f"  {verdict} on this machine: {speed.frames} frames in {speed.seconds:.2f} s, "
        f"{speed.audio_seconds:.2f} s of sound"
    )
    say(f"Wrote {result.folder} ({result.size_bytes / 1e6:.1f} MB)")


def _read_calibration(path: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(read_codes(path, CodecGeometry()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="codecstream-export", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="PATH_OR_HUB_ID",
        help="a speech_tokenizer/ folder, a model folder that holds one, or owner/name on the hub",
    )
    parser.add_argument("--runtime", choices=RUNTIMES, required=True)
    parser.add_argument("--out", required=True, metavar="DIR", help="the artifact's folder")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="stateful",
        help="windowed: no state and fixed shapes, for accelerators; an approximation",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=ATTENTION_WINDOW_FRAMES,
        metavar="FRAMES",
        help="windowed: frames decoded again before each chunk (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE.npy",
        help="int8: codes [frames, codebooks] to calibrate on (default: seeded random ones)",
    )
    parser.add_argument(
        "--min-snr-db",
        type=float,
        metavar="X",
        help="what the artifact must reach (default: fp32 90, fp16 60, int8 40); int8 is faster "
        "the less it must",
    )
    parser.add_argument(
        "--min-slice-snr-db",
        type=float,
        metavar="X",
        help="the same for the worst 80 ms (default: 80, 45, 25)",
    )
    parser.add_argument(
        "--allow-undelegated",
        action="store_true",
        help="executorch: accept convolutions that XNNPACK does not take",
    )
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
