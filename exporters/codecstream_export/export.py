"""Checkpoint in, verified artifact out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import codecstream
from codecstream.artifact import (
    check_replaceable,
    describe_file,
    open_artifact,
    write_manifest,
    writing_artifact,
)
from codecstream.geometry import ATTENTION_WINDOW_FRAMES, QWEN3_TTS_12HZ
from codecstream.manifest import MAX_CHUNK_FRAMES, FileEntry, FrameRange, GeometryEntry, Manifest
from codecstream.runtimes import load_artifact
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream_export.arithmetic import flop_per_frame
from codecstream_export.checkpoint import Checkpoint, load_checkpoint
from codecstream_export.choices import MODES, PRECISIONS, RUNTIMES
from codecstream_export.errors import ExportError, ParityError
from codecstream_export.half import store_half
from codecstream_export.hub import resolve_checkpoint
from codecstream_export.int8 import Quantization, quantize_step
from codecstream_export.step import StepDecoder
from codecstream_export.targets import Written, load_target
from codecstream_export.tracing import step_interface, window_interface
from codecstream_export.verify import (
    FLOORS,
    Parity,
    RealTime,
    check_parity,
    check_real_time,
    check_windows,
)
from codecstream_export.window import WindowDecoder

__all__ = ["ExportResult", "export_artifact"]

UNVERIFIED_NAME = "manifest.unverified.json"  # under this name nothing loads by accident

Stage = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote.

    Attributes:
        folder: The artifact's folder.
        size_bytes: Of all its files but the manifest.
        parity: Its figures against the eager decoder.
        real_time: Whether this machine keeps up with it.
        manifest: What ``manifest.json`` says.
    """

    folder: Path
    size_bytes: int
    parity: list[Parity]
    real_time: RealTime
    manifest: Manifest


def export_artifact(
    checkpoint: str | Path,
    out: str | Path,
    *,
    runtime: str = "onnx",
    precision: str = "fp32",
    mode: str = "stateful",
    ramp: Sequence[int] = DEFAULT_RAMP,
    context: int = ATTENTION_WINDOW_FRAMES,
    calibration: torch.Tensor | None = None,
    min_snr_db: float | None = None,
    min_slice_snr_db: float | None = None,
    allow_undelegated: bool = False,
    decoder_id: str = QWEN3_TTS_12HZ,
    force: bool = False,
    stage: Stage = lambda text: nullcontext(),
) -> ExportResult:
    """Make a decoder artifact of a checkpoint.

    The artifact is reloaded from disk and compared with the eager decoder before it appears at
    ``out``.

    Args:
        checkpoint: A ``speech_tokenizer/`` folder, a folder above it, or an id on the hub.
        out: The artifact's folder.
        runtime: ``onnx``, ``executorch`` or ``torch_export``.
        precision: ``fp32``; ``fp16``, weights in 16 bits; ``int8``, the convolutions that stand
            it computed in int8, and for ONNX the other weights in 16 bits.
        mode: ``stateful``, exact; or ``windowed``, an approximation without state, for
            accelerators that need fixed shapes.
        ramp: Chunk sizes in frames that a client will use: for warm-up, and the sizes of windows.
        context: Frames that a window decodes again in front of the new ones.
        calibration: Codes to choose int8 grids on, int64 ``[frames, codebooks]``; None for seeded
            random ones.
        min_snr_db: What the artifact must reach overall, in place of its precision's own floor.
            For int8 this chooses the point on the curve of benchmarks/quantization.md.
        min_slice_snr_db: The same for the worst 80 ms.
        allow_undelegated: Accept products that ExecuTorch's accelerator did not take.
        decoder_id: Name of the codec; a client refuses a stream that announces another.
        force: Replace an artifact that is there.
        stage: Called with the name of each stage; entered while it runs, for progress.

    Raises:
        CheckpointError: The checkpoint is not usable.
        ParityError: The written program does not compute the eager decoder's audio.
        ExportError: The accelerator did not take all products.
        codecstream.ArtifactError: ``out`` must not be replaced.
        codecstream.MissingDependencyError: The runtime's tools are not installed.
        ValueError: The settings do not fit together.
    """
    sizes = Ramp(tuple(ramp)).sizes
    _check_settings(runtime, precision, mode, sizes, context, calibration)
    floor = FLOORS[precision].replaced(min_snr_db, min_slice_snr_db)
    check_replaceable(Path(out).absolute(), force=force)  # before minutes of work
    target = load_target(runtime)
    found = resolve_checkpoint(checkpoint)  # a download shows its own progress
    with stage("load the checkpoint"):
        source = load_checkpoint(found.folder)
    step = StepDecoder(source.decoder)
    quantization: Quantization | None = None
    if precision == "int8":
        with stage("choose the layers that stand int8"):
            quantization = quantize_step(
                step,
                source.decoder,
                calibration=calibration,
                min_snr_db=floor.snr_db,
                min_slice_snr_db=floor.slice_snr_db,
            )
    if precision == "fp16" or (precision == "int8" and runtime == "onnx"):
        store_half(step)  # with int8: what stays in float
    with writing_artifact(out, force=force) as folder:
        with stage(f"trace the decoder and write it for {runtime}"):
            if mode == "stateful":
                written = target.write_step(step, folder, max(sizes))
                interface = step_interface(step)
            else:
                windows = {n: WindowDecoder(step, context, n) for n in sorted(set(sizes))}
                written = target.write_windows(windows, context, folder)
                interface = window_interface(step)
                del windows
        _check_delegation(written, allow_undelegated)
        del step  # as large as the checkpoint
        with stage("hash and describe"):
            inputs, outputs, state = interface
            manifest = Manifest(
                runtime=runtime,
                precision=precision,
                mode=mode,
                decoder_id=decoder_id,
                geometry=_geometry(source),
                frames=FrameRange(max=max(sizes) if mode == "windowed" else written.max_frames),
                ramp=list(sizes),
                program=written.program,
                context=context if mode == "windowed" else None,
                windows=written.windows,
                inputs=inputs,
                outputs=outputs,
                state=state,
                files=_describe_files(folder),
                made_with={"codecstream": codecstream.__version__, **written.made_with},
                source={"weights_sha256": source.weights_sha256, **found.source},
                quantization=None if quantization is None else quantization.to_json(),
                delegation=None if written.delegation is None else written.delegation.to_json(),
                # A window decodes more than its new frames.
                flop_per_frame=flop_per_frame(source.config) if mode == "stateful" else None,
            )
            write_manifest(folder, manifest, UNVERIFIED_NAME)
        with stage("reload from disk"):
            loaded = load_artifact(open_artifact(folder, manifest_name=UNVERIFIED_NAME))
        with stage("compare with the eager decoder"):
            try:
                if mode == "stateful":
                    parity = check_parity(loaded, source.decoder, sizes, floor)
                else:
                    parity = check_windows(loaded, source.decoder, sizes, context, floor)
            except ParityError as error:
                if quantization is None:
                    raise
                raise ParityError(f"{error}; {quantization.explain()}") from error
        with stage("time it"):
            real_time = check_real_time(loaded, max(sizes))
        del loaded
        (folder / UNVERIFIED_NAME).unlink()
        measured = {item.order: item.to_json() for item in parity}
        manifest = msgspec.structs.replace(manifest, parity=measured)
        write_manifest(folder, manifest)
    size_bytes = sum(entry.bytes for entry in manifest.files.values())
    return ExportResult(Path(out).absolute(), size_bytes, parity, real_time, manifest)


def _check_settings(
    runtime: str,
    precision: str,
    mode: str,
    sizes: Sequence[int],
    context: int,
    calibration: torch.Tensor | None,
) -> None:
    for name, value, allowed in (
        ("runtime", runtime, RUNTIMES),
        ("precision", precision, PRECISIONS),
        ("mode", mode, MODES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
    if max(sizes) > MAX_CHUNK_FRAMES:
        raise ValueError(f"a chunk has at most {MAX_CHUNK_FRAMES} frames, not {max(sizes)}")
    if not ATTENTION_WINDOW_FRAMES <= context <= MAX_CHUNK_FRAMES:
        raise ValueError(
            f"the context of a window is {ATTENTION_WINDOW_FRAMES} to {MAX_CHUNK_FRAMES} frames, "
            f"not {context}: less than the decoder's attention window is audible as hiss"
        )
    if runtime == "torch_export" and precision == "int8":
        raise ValueError(
            "torch has no int8 convolution that a portable program could name: it would compute "
            "in float, slower than fp32. int8 is for onnx and executorch"
        )
    if runtime == "executorch" and precision == "fp16":
        raise ValueError(
            "XNNPACK stores its weights as float32 whatever the program's are, and its half "
            "precision also adds up in half (45 dB at one convolution): use fp32 or int8"
        )
    if calibration is not None and precision != "int8":
        raise ValueError(f"calibration codes are for int8, not for {precision}")


def _check_delegation(written: Written, allow_undelegated: bool) -> None:
    delegation = written.delegation
    if delegation is None or not delegation.undelegated_products or allow_undelegated:
        return
    products = delegation.undelegated_products
    listed = "".join(f"\n  {line}" for line in products)
    raise ExportError(
        f"{delegation.backend} did not take {len(products)} products, which would run in slow "
        f"reference code; --allow-undelegated accepts that:{listed}"
    )


def _geometry(source: Checkpoint) -> GeometryEntry:
    geometry = source.config.geometry
    return GeometryEntry(
        codebooks=geometry.codebooks,
        codebook_size=geometry.codebook_size,
        frame_rate_hz=geometry.frame_rate_hz,
        sample_rate_hz=geometry.sample_rate_hz,
        samples_per_frame=geometry.samples_per_frame,
    )


def _describe_files(folder: Path) -> dict[str, FileEntry]:
    files = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    return {path.name: describe_file(path) for path in files}
