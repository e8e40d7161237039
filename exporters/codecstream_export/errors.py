"""What can go wrong while a checkpoint becomes an artifact.

::

    codecstream.CodecStreamError
    └── ExportError
        ├── CheckpointError      the checkpoint is not what it should be
        └── ParityError          the written artifact does not compute the same audio
"""

from __future__ import annotations

from codecstream import CodecStreamError

__all__ = ["CheckpointError", "ExportError", "ParityError"]


class ExportError(CodecStreamError):
    """An export could not be done; the message says what to change."""


class CheckpointError(ExportError):
    """The checkpoint is missing, damaged or of another model; names the tensor or key."""


class ParityError(ExportError):
    """A written artifact was reloaded and its audio is too far from the eager decoder's."""
