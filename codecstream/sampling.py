"""Keep the codes and the sound of every n-th utterance, to check a device's decoding later.

::

    sampler = UtteranceSampler("samples", every=100)
    decoder = codecstream.StreamDecoder(program, sampler=sampler)

Each file is one utterance: what was decoded, in which chunks, by which program, and the exact
float32 samples that came out. ``codecstream-parity samples --checkpoint ...`` decodes them again
on a bigger machine and compares. Nothing is kept unless a sampler is given, and no speech is late
or lost for its sake: what cannot be written is counted and logged.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import ArtifactError
from codecstream.manifest import MODES
from codecstream.monitor import new_lock

if TYPE_CHECKING:
    from codecstream.runtimes import Program

__all__ = ["Sample", "SampleRecorder", "UtteranceSampler", "find_samples", "read_sample"]

FORMAT, FORMAT_VERSION = "codecstream-sample", 1
SUFFIX = ".sample.npz"
MAX_SAMPLE_BYTES = 1 << 30  # of a file that is read: five hours of sound
_SAMPLES_PER_FRAME_MAX = 1 << 16

_log = logging.getLogger("codecstream.sampling")


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded utterance.

    Attributes:
        name: Of its file, without the suffix.
        codes: int64 ``[frames, codebooks]``.
        primed: int64 ``[frames, codebooks]``: frames that ran through the state before it.
        chunks: Frames per chunk.
        pcm: float32 ``[samples]``, as it was handed out.
        about: ``decoder_id``, ``runtime``, ``precision``, ``mode``, ``context``, ``made_with``,
            ``weights_sha256``, ``sample_rate_hz``, ``samples_per_frame``, ``complete`` and
            ``made_at``.
    """

    name: str
    codes: NDArray[np.int64]
    primed: NDArray[np.int64]
    chunks: tuple[int, ...]
    pcm: NDArray[np.float32] = field(repr=False)
    about: dict[str, Any]


class UtteranceSampler:
    """Decides which utterances are kept, and writes them. May serve several decoders and threads.

    An utterance is what a decoder decodes between two resets. It is written when it is finished, or
    when the decoder is reset in its middle, and then marked as not complete.

    Args:
        folder: Where the files go; made when the first is written.
        every: The first utterance is kept, and every n-th after it.
        max_files: So many files are kept; the oldest of the folder go.
        max_s: Longer utterances are kept up to here, marked as not complete.

    Raises:
        ValueError: A limit is not positive.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 100, max_files: int = 100, max_s: float = 120.0
    ) -> None:
        if min(every, max_files) < 1 or not max_s > 0:
            raise ValueError(
                f"every, max_files and max_s must be positive, not {every}, {max_files}, {max_s}"
            )
        self.folder = Path(folder).absolute()
        self.every = every
        self.max_files = max_files
        self.max_s = max_s
        self._lock = new_lock()
        self._utterances = 0
        self._written = 0
        self._failed = 0

    @property
    def written(self) -> int:
        """Utterances written."""
        return self._written

    @property
    def failed(self) -> int:
        """Utterances that could not be written."""
        return self._failed

    def begin(self, program: Program) -> SampleRecorder | None:
        """Count an utterance that begins; return its recorder when it is to be kept."""
        with self._lock:
            chosen = self._utterances % self.every == 0
            self._utterances += 1
        return SampleRecorder(self, program) if chosen else None

    def write(self, arrays: dict[str, Any]) -> None:
        """Write one file, whole or not at all, and remove the oldest ones. Raises nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Names sort by time, also those of two samplers within one second.
            now_s = time.time()
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_s))
            stamp += f".{int(now_s % 1 * 1000):03d}Z"
            with self._lock:
                number = self._written + self._failed
            name = f"{stamp}-{number:06d}-{secrets.token_hex(2)}{SUFFIX}"
            part = self.folder / f".{name}.part"
            try:
                with part.open("wb") as file:
                    np.savez(file, **arrays)
                os.replace(part, self.folder / name)
            finally:
                part.unlink(missing_ok=True)
            # Not the one just written, even where the clock was set back and it sorts first.
            others = [path for path in find_samples(self.folder) if path.name != name]
            for old in others[: max(0, len(others) + 1 - self.max_files)]:
                old.unlink(missing_ok=True)
        except OSError as error:
            with self._lock:
                self._failed += 1
            _log.warning("a sample could not be kept in %s: %s", self.folder, error)
        else:
            with self._lock:
                self._written += 1


class SampleRecorder:
    """One utterance on its way to a file; belongs to the decoder that decodes it."""

    def __init__(self, sampler: UtteranceSampler, program: Program) -> None:
        geometry = program.geometry
        self._sampler = sampler
        self._program = program
        self._room = int(sampler.max_s * geometry.frame_rate_hz)
        self._empty = np.empty((0, geometry.codebooks), np.int32)
        self._primed: list[NDArray[np.int32]] = []
        self._codes: list[NDArray[np.int32]] = []
        self._pcm: list[NDArray[np.float32]] = []
        self._cut = False

    def prime(self, codes: NDArray[np.int64]) -> None:
        """Take frames that run through the state before the utterance."""
        self._primed.append(codes.astype(np.int32))

    def chunk(self, codes: NDArray[np.int64], pcm: NDArray[np.float32]) -> None:
        """Take a decoded chunk."""
        self._cut = self._cut or len(codes) > self._room
        if not self._cut:
            self._room -= len(codes)
            self._codes.append(codes.astype(np.int32))
            self._pcm.append(pcm.copy())  # it is the caller's now

    def end(self, *, complete: bool) -> None:
        """Write what was decoded; nothing when that is nothing."""
        if not self._codes:
            return
        about = json.dumps(self._about(complete and not self._cut))
        self._sampler.write(
            {
                "codes": np.concatenate(self._codes),
                "primed": np.concatenate([self._empty, *self._primed]),
                "chunks": np.array([len(codes) for codes in self._codes], np.int32),
                "pcm": np.concatenate(self._pcm),
                "about": np.frombuffer(about.encode(), np.uint8),
            }
        )

    def _about(self, complete: bool) -> dict[str, Any]:
        geometry = self._program.geometry
        manifest = getattr(self._program, "manifest", None)  # programs of an artifact have one
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "decoder_id": self._program.decoder_id,
            "runtime": getattr(manifest, "runtime", None),
            "precision": getattr(manifest, "precision", None),
            "mode": getattr(manifest, "mode", None),
            "context": getattr(manifest, "context", None),
            "made_with": getattr(manifest, "made_with", {}),
            "weights_sha256": getattr(manifest, "source", {}).get("weights_sha256"),
            "sample_rate_hz": geometry.sample_rate_hz,
            "samples_per_frame": geometry.samples_per_frame,
            "complete": complete,
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def find_samples(folder: str | Path) -> list[Path]:
    """Return the sample files in a folder, oldest first."""
    return sorted(path for path in Path(folder).glob(f"*{SUFFIX}") if path.is_file())


def read_sample(path: str | Path) -> Sample:
    """Read a file of :class:`UtteranceSampler`. It may have come from anywhere: nothing is trusted.

    Raises:
        ArtifactError: It is no such file, or what it holds does not fit together.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_SAMPLE_BYTES:
            raise ArtifactError(f"{path} would unpack to {size} bytes: not a sample")
        with np.load(path, allow_pickle=False) as arrays:
            codes, primed, chunks, pcm, raw = (
                arrays[name] for name in ("codes", "primed", "chunks", "pcm", "about")
            )
        about = json.loads(bytes(raw))
        _check(codes, primed, chunks, pcm, about)
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # numpy's reader, for one, raises errors of Python's tokenizer
        raise ArtifactError(f"{path} is not a recorded utterance: {error}") from error
    return Sample(
        name=path.name.removesuffix(SUFFIX),
        codes=codes.astype(np.int64),
        primed=primed.astype(np.int64),
        chunks=tuple(int(size) for size in chunks),
        pcm=pcm.astype(np.float32),
        about=about,
    )


def _check(
    codes: NDArray[Any],
    primed: NDArray[Any],
    chunks: NDArray[Any],
    pcm: NDArray[Any],
    about: object,
) -> None:
    """Raise ValueError where the parts of a sample do not fit together."""
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("it does not say that it is one")
    if about.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"format version {about.get('format_version')!r}, this codecstream reads "
            f"{FORMAT_VERSION}"
        )
    for name in ("decoder_id", "runtime", "precision", "weights_sha256"):
        if not isinstance(about.get(name), str | None):
            raise ValueError(f"{name} is {about[name]!r}")
    if about.get("mode") not in (None, *MODES):
        raise ValueError(f"mode is {about['mode']!r}")
    context = about.get("context")
    if context is not None and (type(context) is not int or context < 1):
        raise ValueError(f"context is {context!r}")
    if not isinstance(about.get("made_with"), dict):
        raise ValueError(f"made_with is {about.get('made_with')!r}")
    for name, array, kinds, dimensions in (
        ("codes", codes, "iu", 2),
        ("primed", primed, "iu", 2),
        ("chunks", chunks, "iu", 1),
        ("pcm", pcm, "f", 1),
    ):
        if array.dtype.kind not in kinds or array.ndim != dimensions:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
    per_frame = about.get("samples_per_frame")
    if not isinstance(per_frame, int) or not 0 < per_frame < _SAMPLES_PER_FRAME_MAX:
        raise ValueError(f"samples_per_frame is {per_frame!r}")
    # Each alone first: a sum of large numbers may come out right.
    sound = bool(((chunks >= 1) & (chunks <= len(codes))).all())
    if not len(codes) or not sound or int(chunks.sum()) != len(codes):
        raise ValueError(f"{len(codes)} frames in chunks of {int(chunks.sum())} frames together")
    if len(pcm) != len(codes) * per_frame or codes.shape[1] != primed.shape[1]:
        raise ValueError(f"{len(pcm)} samples for {len(codes)} frames of {per_frame}")
