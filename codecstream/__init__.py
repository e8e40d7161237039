"""Speech from codec frames: the device's side of a text-to-speech split.

::

    program = codecstream.load_program("decoder-onnx")
    async with codecstream.connect(url, program) as client:
        async for chunk in client.speak("Hello.", voice="vivian"):
            play(chunk.pcm)                         # float32 [samples] at 24 kHz

Importing this package loads numpy and nothing heavier. A runtime, sounddevice and websockets load
when they are first used.
"""

from typing import TYPE_CHECKING, Any

from codecstream.accumulate import CodeAccumulator
from codecstream.decoder import StreamDecoder
from codecstream.errors import (
    ArtifactError,
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
    from codecstream.client import AudioChunk, Client, Utterance, UtteranceResult, connect

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_RAMP",
    "ArtifactError",
    "AudioChunk",
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
    "OutputError",
    "PlaybackError",
    "Program",
    "Ramp",
    "RemoteProtocolError",
    "SequenceError",
    "ServerError",
    "StalledError",
    "StreamDecoder",
    "StreamMismatchError",
    "TooLongError",
    "Utterance",
    "UtteranceError",
    "UtteranceResult",
    "WireError",
    "connect",
    "load_program",
]

_CLIENT = frozenset({"AudioChunk", "Client", "Utterance", "UtteranceResult", "connect"})


def __getattr__(name: str) -> Any:
    """Load the client when it is first used: a device that decodes only needs no asyncio."""
    if name not in _CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from codecstream import client

    return getattr(client, name)
