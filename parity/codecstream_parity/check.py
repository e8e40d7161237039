"""From settings to an outcome: load, decode, compare. ``codecstream-parity`` without a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codecstream import demo
from codecstream.artifact import open_artifact
from codecstream.codes import check_codes, read_codes
from codecstream.errors import MissingDependencyError
from codecstream.geometry import ATTENTION_WINDOW_FRAMES, CodecGeometry
from codecstream.manifest import Manifest
from codecstream.runtimes import load_artifact
from codecstream.schedule import Ramp
from codecstream_parity.floors import COARSENESS, NO_FLOORS, Floors, floors_for
from codecstream_parity.outcome import Outcome, Subject
from codecstream_parity.references import (
    ArtifactReference,
    Reference,
    WavReference,
    checkpoint_reference,
)
from codecstream_parity.runs import WINDOWED_RANDOM_FRAMES, Run, check_program
from codecstream_parity.samples import check_sample, is_recording, read_samples, sample_subject

if TYPE_CHECKING:
    from codecstream_export.checkpoint import Checkpoint

__all__ = ["DEFAULT_FRAMES", "Settings", "check"]

# Eight layers of attention see back 568 frames: beyond, nothing of the start is left. With the
# usual ramp these are 27 chunks and a tail.
DEFAULT_FRAMES = 620


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to check, and how; the options of ``codecstream-parity``.

    Attributes:
        subject: An artifact's folder, or recorded utterances.
        checkpoint: A folder or an id on the hub; None where the reference needs none.
        codes: A codes file, ``demo``, or None for random codes.
        frames: How many; None for all of ``codes``, or 620.
        long: In bounded memory.
        seed: Of random codes and random chunk sizes.
        schedule: Frames per chunk; None for the artifact's ramp.
        reference: ``eager``, ``window`` or ``official``; None for the artifact's mode's own.
        reference_wav: A sound file as reference.
        reference_artifact: Another artifact as reference.
        context: Frames of history in a window; None for the artifact's.
        threads: Threads that decode; None for as many as are allowed.
        floors: Limits by name, in place of the precision's own.

    Raises:
        ValueError: They do not fit together.
    """

    subject: str | Path
    checkpoint: str | Path | None = None
    codes: str | Path | None = None
    frames: int | None = None
    long: bool = False
    seed: int = 0
    schedule: tuple[int, ...] | None = None
    reference: str | None = None
    reference_wav: str | Path | None = None
    reference_artifact: str | Path | None = None
    context: int | None = None
    threads: int | None = None
    floors: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen = [self.reference, self.reference_wav, self.reference_artifact]
        if sum(item is not None for item in chosen) > 1:
            raise ValueError("choose one reference: by name, a WAV file or another artifact")
        if self.checkpoint is None and not (self.reference_wav or self.reference_artifact):
            raise ValueError("--checkpoint is needed: the weights that the reference decodes with")
        if self.reference_wav is not None and (self.long or self.codes is None):
            raise ValueError(
                "a WAV file is compared with --codes, the codes that it was made of, and not "
                "in bounded memory"
            )
        for name, value in (("frames", self.frames), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.context is not None and self.context < 1:
            raise ValueError(f"a window has at least 1 frame of history, not {self.context}")


def check(settings: Settings, say: Say = lambda text: None) -> Outcome:
    """Decode and compare.

    Args:
        settings: What and how.
        say: Called with what is being done, for progress.

    Raises:
        CodecStreamError: The artifact, the checkpoint or the codes cannot be used, or a package
            is missing.
        ValueError: Settings do not fit the artifact.
        OSError: A file cannot be read.
    """
    if is_recording(settings.subject):
        return _check_recordings(settings, say)
    say("loading the artifact")
    artifact = open_artifact(settings.subject)
    manifest = artifact.manifest
    program = load_artifact(artifact, settings.threads)
    geometry = program.geometry
    ramp = Ramp.of(settings.schedule or manifest.ramp)
    if program.max_frames is not None and max(ramp.sizes) > program.max_frames:
        raise ValueError(
            f"the schedule asks for chunks of {max(ramp.sizes)} frames, the artifact takes at "
            f"most {program.max_frames}"
        )
    codes, codes_name = _read_codes(settings, geometry)
    notes: list[str] = []
    kind = settings.reference or ("window" if manifest.mode == "windowed" else "eager")
    checkpoint = _load_checkpoint(settings, geometry, say)
    if checkpoint is not None:
        _note_weights(manifest.source.get("weights_sha256"), checkpoint, notes)
        _note_length(len(codes), checkpoint, notes)
    reference = _reference(settings, kind, checkpoint, manifest.context, geometry)
    floors = _floors(settings, manifest.precision, manifest.mode, manifest.context, kind, reference)

    def progress(frames: int) -> None:
        say(f"decoding with {manifest.runtime}, and {reference.name}: {frames} frames")

    runs: list[Run] = []
    for run in check_program(
        program,
        reference,
        codes,
        ramp.sizes,
        floors,
        seed=settings.seed,
        random_frames=WINDOWED_RANDOM_FRAMES if kind == "window" else None,
        # A file has the sound of all frames, in one order.
        schedule_only=settings.long or settings.reference_wav is not None,
        progress=progress,
    ):
        runs.append(run)
    approximation = None
    if manifest.mode == "windowed" and kind == "window" and checkpoint is not None:
        whole = checkpoint_reference("eager", checkpoint, 0, long=settings.long)
        (run,) = check_program(
            program, whole, codes, ramp.sizes, NO_FLOORS, schedule_only=True, progress=progress
        )
        approximation = dataclasses.replace(run, name="all at once")
    return Outcome(
        _subject(settings.subject, manifest),
        reference.name,
        codes_name,
        ramp.sizes,
        runs,
        approximation,
        tuple(notes),
    )


def _check_recordings(settings: Settings, say: Say) -> Outcome:
    if any(
        given is not None
        for given in (settings.reference_wav, settings.codes, settings.frames, settings.schedule)
    ):
        raise ValueError(
            "recordings have codes, chunks and sound of their own: no --codes, --frames, "
            "--schedule, --long or WAV file"
        )
    samples = read_samples(settings.subject)
    about = samples[0].about
    if settings.checkpoint is None:
        geometry = open_artifact(str(settings.reference_artifact)).manifest.codec_geometry()
        checkpoint = None
    else:
        checkpoint = _load_checkpoint(settings, None, say)
        assert checkpoint is not None
        geometry = checkpoint.config.geometry
    for name in ("sample_rate_hz", "samples_per_frame"):
        if about.get(name) != getattr(geometry, name):
            raise ValueError(
                f"the recordings have {name} {about.get(name)}, the reference makes "
                f"{getattr(geometry, name)}"
            )
    mode = str(about.get("mode") or "stateful")
    kind = settings.reference or ("window" if mode == "windowed" else "eager")
    reference = _reference(settings, kind, checkpoint, about.get("context"), geometry)
    precision = str(about.get("precision") or "fp32")
    floors = _floors(settings, precision, mode, about.get("context"), kind, reference)
    notes: list[str] = []
    if checkpoint is not None:
        _note_weights(about.get("weights_sha256"), checkpoint, notes)
    runs = []
    for sample in samples:
        say(f"decoding {sample.name} again")
        runs.append(check_sample(sample, reference, floors, geometry))
    cut = sum(not sample.about.get("complete") for sample in samples)
    if cut:
        notes.append(f"{cut} of {len(samples)} recordings end before their utterance did")
    what = f"{len(samples)} recorded utterances, {sum(len(s.codes) for s in samples)} frames"
    subject = sample_subject(settings.subject, samples)
    return Outcome(subject, reference.name, what, None, runs, None, tuple(notes))


def _subject(path: str | Path, manifest: Manifest) -> Subject:
    return Subject(
        path=str(path),
        runtime=manifest.runtime,
        precision=manifest.precision,
        mode=manifest.mode,
        decoder_id=manifest.decoder_id,
        made_with=manifest.made_with,
    )


def _load_checkpoint(
    settings: Settings, geometry: CodecGeometry | None, say: Say
) -> Checkpoint | None:
    if settings.checkpoint is None or settings.reference_wav or settings.reference_artifact:
        return None
    try:
        from codecstream_export import load_checkpoint
        from codecstream_export.hub import resolve_checkpoint
    except ImportError as error:
        raise MissingDependencyError(
            f"the eager decoder needs torch ({error}): pip install 'codecstream[parity]'"
        ) from error
    say("loading the checkpoint")
    checkpoint = load_checkpoint(resolve_checkpoint(settings.checkpoint).folder)
    if geometry is not None and checkpoint.config.geometry != geometry:
        raise ValueError(
            f"the artifact is for {geometry}, the checkpoint for {checkpoint.config.geometry}"
        )
    return checkpoint


def _reference(
    settings: Settings,
    kind: str,
    checkpoint: Checkpoint | None,
    context: int | None,
    geometry: CodecGeometry,
) -> Reference:
    if settings.reference_wav is not None:
        return WavReference.read(settings.reference_wav, geometry.sample_rate_hz)
    if settings.reference_artifact is not None:
        other = open_artifact(settings.reference_artifact)
        if other.manifest.codec_geometry() != geometry:
            raise ValueError(f"{settings.reference_artifact} is for another codec")
        program = load_artifact(other, settings.threads)
        what = f"{other.manifest.runtime}, {other.manifest.precision}, {other.manifest.mode}"
        return ArtifactReference(f"the artifact {settings.reference_artifact} ({what})", program)
    assert checkpoint is not None  # Settings saw to it
    frames = settings.context or context or ATTENTION_WINDOW_FRAMES
    return checkpoint_reference(kind, checkpoint, frames, long=settings.long)


def _floors(
    settings: Settings,
    precision: str,
    mode: str,
    context: int | None,
    kind: str,
    reference: Reference,
) -> Floors:
    wav = isinstance(reference, WavReference)
    if isinstance(reference, ArtifactReference):
        # Neither can be closer to the other than it is to what both should compute.
        other: Manifest | None = getattr(reference.program, "manifest", None)
        approximate = other is not None and (mode, context) != (other.mode, other.context)
        if other is not None:
            # One without floors is refused below, whichever of both it is.
            order = (*COARSENESS, precision, other.precision)
            precision = max(precision, other.precision, key=order.index)
    else:
        approximate = (mode == "windowed") != (kind == "window" and not wav)
    return floors_for(precision, approximate=approximate, wav=wav).replaced(**settings.floors)


def _read_codes(settings: Settings, geometry: CodecGeometry) -> tuple[NDArray[np.int64], str]:
    """Return the codes to decode, int64 ``[frames, codebooks]``, and what they are in words."""
    if settings.codes is None:
        frames = settings.frames or DEFAULT_FRAMES
        source = np.random.default_rng(settings.seed)
        shape = (frames, geometry.codebooks)
        codes = source.integers(0, geometry.codebook_size, shape)
        return codes, f"{frames} random frames, seed {settings.seed}"
    if str(settings.codes) == "demo":
        speech = np.concatenate([item.codes for item in demo.utterances()])
        frames = settings.frames or DEFAULT_FRAMES
        repeated: NDArray[Any] = np.resize(speech, (frames, speech.shape[1]))
        return check_codes(repeated, geometry), f"the bundled speech, repeated, {frames} frames"
    path = Path(settings.codes)
    codes = read_codes(path, geometry)
    if settings.frames is not None:
        if settings.frames > len(codes):
            raise ValueError(f"{path} has {len(codes)} frames, {settings.frames} were asked for")
        codes = codes[: settings.frames]
    if not len(codes):
        raise ValueError(f"{path} has no frames: there is nothing to compare")
    return codes, f"{path.name}, {len(codes)} frames"


def _note_weights(sha256: object, checkpoint: Checkpoint, notes: list[str]) -> None:
    if sha256 is not None and sha256 != checkpoint.weights_sha256:
        notes.append(
            f"it was made of other weights (SHA-256 {str(sha256)[:12]}...) than the checkpoint's "
            f"({checkpoint.weights_sha256[:12]}...)"
        )


def _note_length(frames: int, checkpoint: Checkpoint, notes: list[str]) -> None:
    config = checkpoint.config
    seen = config.num_hidden_layers * (config.sliding_window - 1)
    if frames <= seen:
        notes.append(
            f"{frames} frames do not go beyond the {seen} that attention sees back: a decoder that "
            f"goes wrong there would pass"
        )
