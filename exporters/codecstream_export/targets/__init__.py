"""One module per runtime that writes its program files; the same two verbs in each.

::

    write_step(step, folder, largest) -> Written             # stateful
    write_windows(windows, context, folder) -> Written       # one program per chunk size
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from codecstream.errors import MissingDependencyError
from codecstream.manifest import WindowEntry
from codecstream_export.step import StepDecoder
from codecstream_export.tracing import quiet
from codecstream_export.window import WindowDecoder

if TYPE_CHECKING:
    from codecstream_export.targets.delegation import Delegation

__all__ = ["Target", "Written", "load_target"]


@dataclass(frozen=True, slots=True)
class Written:
    """What a target wrote into the artifact's folder.

    Attributes:
        made_with: Versions of the tools, for the manifest.
        program: File of the stateful program, or None.
        max_frames: The largest chunk that it takes, or None for any.
        windows: Windowed programs, by rising number of frames.
        delegation: What an accelerator took of the program, where the runtime has one.
    """

    made_with: dict[str, str]
    program: str | None = None
    max_frames: int | None = None
    windows: list[WindowEntry] = field(default_factory=list)
    delegation: Delegation | None = None


class Target(Protocol):
    """A runtime's module in this package."""

    def write_step(self, step: StepDecoder, folder: Path, largest: int) -> Written:
        """Write the stateful program for chunks of 1 to at least ``largest`` frames."""

    def write_windows(
        self, windows: Mapping[int, WindowDecoder], context: int, folder: Path
    ) -> Written:
        """Write the windowed programs, by number of new frames."""


def load_target(runtime: str) -> Target:
    """Import a runtime's target, and with it the tools that it needs.

    Raises:
        MissingDependencyError: A tool is not installed; the message has the pip line.
    """
    try:
        with quiet():  # libraries of theirs that this machine has no use for
            module = importlib.import_module(f"{__name__}.{runtime}")
    except ImportError as error:
        extra = "export-executorch" if runtime == "executorch" else "export"
        raise MissingDependencyError(
            f"exporting for {runtime} needs more packages ({error}): "
            f"pip install 'codecstream[{extra}]'"
        ) from error
    return cast(Target, module)
