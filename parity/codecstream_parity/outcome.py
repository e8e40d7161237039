"""All runs of one check, and their common verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from codecstream_parity.runs import Run

__all__ = ["FORMAT_VERSION", "Outcome", "Subject"]

FORMAT_VERSION = 1  # of the JSON


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose output it is: an artifact, or recorded utterances of one.

    ``precision`` and ``mode`` are those of the manifest; None where recordings do not say.
    """

    path: str
    runtime: str | None
    precision: str | None
    mode: str | None
    decoder_id: str | None
    made_with: dict[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``codecstream-parity`` found.

    Attributes:
        subject: Whose output it is.
        reference: What it was held against.
        codes: Which codes, in words.
        schedule: Frames per chunk, as a client would ask for; None for recordings.
        runs: The decodings; all of them must pass.
        approximation: A windowed program against all frames at once: measured, not required.
        notes: What a reader should know.
    """

    subject: Subject
    reference: str
    codes: str
    schedule: tuple[int, ...] | None
    runs: Sequence[Run]
    approximation: Run | None = None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every run passes, and there is one."""
        return bool(self.runs) and not any(run.reasons for run in self.runs)

    @property
    def reasons(self) -> list[str]:
        """Why not, each with the name of its run."""
        if not self.runs:
            return ["nothing was decoded"]
        return [f"{run.name}: {reason}" for run in self.runs for reason in run.reasons]

    @property
    def worst_run(self) -> Run:
        """The run that a picture should show: one that fails, or else the first."""
        return next((run for run in self.runs if run.reasons), self.runs[0])

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON: the figures of the first run on top, and those of all in ``runs``."""
        document = {
            "format_version": FORMAT_VERSION,
            "artifact": self.subject.path,
            "runtime": self.subject.runtime,
            "precision": self.subject.precision,
            "mode": self.subject.mode,
            "decoder_id": self.subject.decoder_id,
            "made_with": self.subject.made_with,
            "reference": self.reference,
            "codes": self.codes,
            "schedule": None if self.schedule is None else list(self.schedule),
        }
        because = {
            name: "recordings do not say" for name, value in document.items() if value is None
        }
        first = _run_json(self.runs[0]) if self.runs else {}
        return {
            **document,
            **{key: value for key, value in first.items() if key not in ("run", "chunks")},
            "passed": self.passed,
            "reasons": self.reasons,
            "runs": [_run_json(run) for run in self.runs],
            "approximation": None if self.approximation is None else _run_json(self.approximation),
            "notes": list(self.notes),
            "null_because": {
                **because,
                **first.get("null_because", {}),
                **_absent(self.approximation is None, "approximation", "only for windows"),
            },
        }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "chunks": list(run.chunks),
        **run.report.to_json(),
        "passed": not run.reasons,
        "reasons": list(run.reasons),
    }


def _absent(absent: bool, name: str, reason: str) -> dict[str, str]:
    return {name: reason} if absent else {}
