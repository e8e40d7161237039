"""Speech from codec frames: the device's side of a text-to-speech split.

::

    program = codecstream.load_program("decoder-onnx")
    async with codecstream.connect(url, program) as client:
        async for chunk in client.speak("Hello.", voice="vivian"):
            play(chunk.pcm)                         # float32 [samples] at 24 kHz

``codecstream.sync_connect`` is the same for programs without asyncio, with ``with`` and ``for``.

Importing this package loads numpy and nothing heavier. A runtime, sounddevice and websockets load
when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from codecstream.accumulate import CodeAccumulator
from codecstream.decoder import StreamDecoder
from codecstream.errors import (
    ArtifactError,
    CaptureError,
    CodecStreamError,
    ConnectionFailedError,
    DecoderError,
    DecoderStateError,
    DeviceLostError,
    IncompleteError,
    InvalidCodesError,
    LocalProtocolError,
    MissingDependencyError,
    OutputError,
    PlaybackError,
    PolicyError,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StalledError,
    StreamMismatchError,
    TooLongError,
    UtteranceError,
    WireError,
)
from codecstream.geometry import CodecGeometry
from codecstream.runtimes import Program, load_program
from codecstream.schedule import DEFAULT_RAMP, Ramp

if TYPE_CHECKING:
    from codecstream.capture import Capture
    from codecstream.client import Client, Utterance, connect
    from codecstream.observe import Observer
    from codecstream.options import Reconnect
    from codecstream.pipeline import AudioChunk
    from codecstream.speech import UtteranceResult
    from codecstream.sync_client import SyncClient, SyncUtterance, sync_connect

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_RAMP",
    "ArtifactError",
    "AudioChunk",
    "Capture",
    "CaptureError",
    "Client",
    "CodeAccumulator",
    "CodecGeometry",
    "CodecStreamError",
    "ConnectionFailedError",
    "DecoderError",
    "DecoderStateError",
    "DeviceLostError",
    "IncompleteError",
    "InvalidCodesError",
    "LocalProtocolError",
    "MissingDependencyError",
    "Observer",
    "OutputError",
    "PlaybackError",
    "PolicyError",
    "Program",
    "Ramp",
    "Reconnect",
    "RemoteProtocolError",
    "SequenceError",
    "ServerError",
    "StalledError",
    "StreamDecoder",
    "StreamMismatchError",
    "SyncClient",
    "SyncUtterance",
    "TooLongError",
    "Utterance",
    "UtteranceError",
    "UtteranceResult",
    "WireError",
    "connect",
    "load_program",
    "sync_connect",
]

_LAZY = {
    "AudioChunk": "pipeline",
    "Capture": "capture",
    "Client": "client",
    "Observer": "observe",
    "Reconnect": "options",
    "SyncClient": "sync_client",
    "SyncUtterance": "sync_client",
    "Utterance": "client",
    "UtteranceResult": "speech",
    "connect": "client",
    "sync_connect": "sync_client",
}


def __getattr__(name: str) -> Any:
    """Load a client when it is first used: a device that decodes only needs neither."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"codecstream.{module}"), name)
