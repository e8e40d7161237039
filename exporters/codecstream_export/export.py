"""Checkpoint in, verified artifact out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

import codecstream
from codecstream.artifact import (
    check_replaceable,
    describe_file,
    open_artifact,
    write_manifest,
    writing_artifact,
)
from codecstream.geometry import QWEN3_TTS_12HZ
from codecstream.manifest import (
    MAX_CHUNK_FRAMES,
    GeometryEntry,
    Manifest,
    StateEntry,
    TensorEntry,
)
from codecstream.runtimes import load_artifact
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream_export import onnx_target
from codecstream_export.checkpoint import Checkpoint, load_checkpoint
from codecstream_export.step import StepDecoder
from codecstream_export.verify import Parity, check_parity

__all__ = ["ExportResult", "export_artifact"]

UNVERIFIED_NAME = "manifest.unverified.json"  # under this name nothing loads by accident

Stage = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote: the artifact's folder, its size in bytes, its parity."""

    folder: Path
    size_bytes: int
    parity: list[Parity]


def export_artifact(
    checkpoint: str | Path,
    out: str | Path,
    *,
    ramp: Sequence[int] = DEFAULT_RAMP,
    decoder_id: str = QWEN3_TTS_12HZ,
    force: bool = False,
    stage: Stage = lambda text: nullcontext(),
) -> ExportResult:
    """Make the stateful float32 ONNX artifact of a checkpoint.

    The artifact is reloaded from disk and compared with the eager decoder before it appears at
    ``out``.

    Args:
        checkpoint: A ``speech_tokenizer/`` folder or a folder above it.
        out: The artifact's folder.
        ramp: Chunk sizes in frames that a client will use; recorded for warm-up.
        decoder_id: Name of the codec; a client refuses a stream that announces another.
        force: Replace an artifact that is there.
        stage: Called with the name of each stage; entered while it runs, for progress.

    Raises:
        CheckpointError: The checkpoint is not usable.
        ParityError: The written program does not compute the eager decoder's audio.
        codecstream.ArtifactError: ``out`` must not be replaced.
        ValueError: The ramp is no list of chunk sizes.
    """
    sizes = Ramp(tuple(ramp)).sizes
    if max(sizes) > MAX_CHUNK_FRAMES:
        raise ValueError(f"a chunk has at most {MAX_CHUNK_FRAMES} frames, not {max(sizes)}")
    check_replaceable(Path(out).absolute(), force=force)  # before minutes of work
    with stage("load the checkpoint"):
        source = load_checkpoint(checkpoint)
    with stage("trace the step module (torch.export)"):
        step = StepDecoder(source.decoder)
        program = onnx_target.export_program(step)
    with writing_artifact(out, force=force) as folder:
        with stage("translate to ONNX and write"):
            made_with = onnx_target.write_onnx(program, step, folder)
        interface = onnx_target.describe_interface(step)
        del program, step  # as large as the checkpoint, each
        with stage("hash and describe"):
            manifest = _describe(source, folder, sizes, decoder_id, interface, made_with)
            write_manifest(folder, manifest, UNVERIFIED_NAME)
        with stage("reload from disk"):
            loaded = load_artifact(open_artifact(folder, manifest_name=UNVERIFIED_NAME))
        with stage("compare with the eager decoder"):
            parity = check_parity(loaded, source.decoder, sizes)
        del loaded
        (folder / UNVERIFIED_NAME).unlink()
        measured = {item.order: item.to_json() for item in parity}
        write_manifest(folder, msgspec.structs.replace(manifest, parity=measured))
        size_bytes = sum(entry.bytes for entry in manifest.files.values())
    return ExportResult(Path(out).absolute(), size_bytes, parity)


def _describe(
    source: Checkpoint,
    folder: Path,
    ramp: Sequence[int],
    decoder_id: str,
    interface: tuple[list[TensorEntry], list[TensorEntry], list[StateEntry]],
    made_with: dict[str, str],
) -> Manifest:
    geometry = source.config.geometry
    inputs, outputs, state = interface
    return Manifest(
        runtime="onnx",
        precision="fp32",
        mode="stateful",
        decoder_id=decoder_id,
        geometry=GeometryEntry(
            codebooks=geometry.codebooks,
            codebook_size=geometry.codebook_size,
            frame_rate_hz=geometry.frame_rate_hz,
            sample_rate_hz=geometry.sample_rate_hz,
            samples_per_frame=geometry.samples_per_frame,
        ),
        frames=onnx_target.FRAMES,
        ramp=list(ramp),
        program=onnx_target.PROGRAM_NAME,
        inputs=inputs,
        outputs=outputs,
        state=state,
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
        made_with={"codecstream": codecstream.__version__, **made_with},
        source={"weights_sha256": source.weights_sha256},
    )
