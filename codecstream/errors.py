"""Everything that codecstream raises on purpose.

::

    CodecStreamError                     root of all
    ├── InvalidCodesError                codes outside the codebook, of a wrong dtype or shape
    ├── DecoderError                     the decoder could not turn good codes into sound
    │   ├── DecoderStateError            a call that the decoder's state does not allow
    │   └── OutputError                  short or long output, NaN or Inf: never played
    ├── ArtifactError                    an artifact is missing, damaged or not for this runtime
    ├── MissingDependencyError           an optional package is not installed; names the extra
    ├── PlaybackError                    no sound device, or it failed
    │   └── DeviceLostError              the sound device went away while it played
    ├── CaptureError                     a capture file is damaged, or none
    ├── WireError                        a message is not what the wire format allows
    ├── ConnectionFailedError            no connection to the server could be made
    ├── LocalProtocolError               this program misused the client
    ├── PolicyError                      the start policy failed, or asked for what cannot be
    └── UtteranceError                   an utterance did not end well; says how far it got
        ├── RemoteProtocolError          the server broke the protocol
        │   ├── SequenceError            a packet is missing or repeated
        │   └── StreamMismatchError      the stream is not for this decoder artifact
        ├── ServerError                  the server reported a failure
        ├── IncompleteError              the stream ended early; what came was not all
        ├── StalledError                 no frame came for too long; the server may be alive
        └── TooLongError                 more audio came than this program allows
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArtifactError",
    "CaptureError",
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
    "PolicyError",
    "RemoteProtocolError",
    "SequenceError",
    "ServerError",
    "StalledError",
    "StreamMismatchError",
    "TooLongError",
    "UtteranceError",
    "WireError",
]


class CodecStreamError(Exception):
    """Root of all errors of this package."""


class InvalidCodesError(CodecStreamError, ValueError):
    """Codes that must not reach a decoder.

    Attributes:
        seq: Packet in which they came, or None when they did not come from the wire.
        frame: Index of the first bad frame within the codes given, or None.
        codebook: Index of the first bad codebook in that frame, or None.
        value: The bad id, or None when dtype or shape is the problem.
    """

    def __init__(
        self,
        message: str,
        *,
        seq: int | None = None,
        frame: int | None = None,
        codebook: int | None = None,
        value: int | None = None,
    ) -> None:
        super().__init__(message)
        self.seq = seq
        self.frame = frame
        self.codebook = codebook
        self.value = value


class DecoderError(CodecStreamError):
    """The decoder program failed on valid codes. The state stays as before the failed chunk."""


class DecoderStateError(DecoderError):
    """A call out of order, such as ``push`` after ``finish`` without ``reset``."""


class OutputError(DecoderError):
    """The program returned audio of a wrong length, or NaN or Inf; it is not handed out."""


class ArtifactError(CodecStreamError):
    """A decoder artifact cannot be used; the message names the file and what to do."""


class MissingDependencyError(CodecStreamError, ImportError):
    """An optional package is missing; the message has the pip line."""


class PlaybackError(CodecStreamError):
    """Sound cannot be played; everything but playing still works."""


class DeviceLostError(PlaybackError):
    """The sound device went away, or stopped to ask for samples; open another one.

    Attributes:
        device: The lost device's name.
        unplayed_samples: Samples that were written and not played, at the rate of the audio.
    """

    def __init__(self, message: str, *, device: str, unplayed_samples: int) -> None:
        super().__init__(message)
        self.device = device
        self.unplayed_samples = unplayed_samples


class CaptureError(CodecStreamError):
    """A file is no capture, or a damaged one; the message names the line."""


class WireError(CodecStreamError):
    """Bytes or text that are no message of the protocol; the message has the byte counts."""


class ConnectionFailedError(CodecStreamError):
    """No connection to the server could be made; nothing of an utterance was lost.

    Attributes:
        transient: Whether trying again later may help: the network or a busy server, rather than
            a wrong address, a certificate or a refusal.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class LocalProtocolError(CodecStreamError):
    """This program asked for something that the protocol does not allow now."""


class PolicyError(CodecStreamError):
    """The policy that this program gave the client failed, or asked for what cannot be."""


class UtteranceError(CodecStreamError):
    """An utterance did not end well.

    Attributes:
        utterance_index: The server's count on this connection, or None when it never started.
        frames_received: Valid frames that had arrived.
    """

    def __init__(
        self, message: str, *, utterance_index: int | None = None, frames_received: int = 0
    ) -> None:
        super().__init__(message)
        self.utterance_index = utterance_index
        self.frames_received = frames_received


class RemoteProtocolError(UtteranceError):
    """The server sent something that the protocol does not allow."""


class SequenceError(RemoteProtocolError):
    """Packets are missing or repeated.

    Attributes:
        expected: The sequence number that should have come.
        received: The one that came.
    """

    def __init__(self, message: str, *, expected: int, received: int, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.expected = expected
        self.received = received


class StreamMismatchError(RemoteProtocolError):
    """The offered stream is not what the loaded artifact decodes; nothing was decoded.

    Attributes:
        field: The field of ``codec.start``.
        wanted: What the artifact needs.
        offered: What the server offers.
    """

    def __init__(
        self, message: str, *, field: str, wanted: object, offered: object, **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.field = field
        self.wanted = wanted
        self.offered = offered


class ServerError(UtteranceError):
    """The server reported a failure; its message is the text.

    Attributes:
        refused: True when it failed before any ``codec.start``, such as a mode that is not
            supported.
    """

    def __init__(self, message: str, *, refused: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.refused = refused


class IncompleteError(UtteranceError):
    """The stream ended before the utterance was complete.

    Attributes:
        connection_lost: Whether the connection is to blame: it ended, or went silent.
        close_code: The WebSocket's close code when the connection ended, else None.
        expected: What ``codec.done`` claimed, when that is what does not match.
        received: What arrived.
    """

    def __init__(
        self,
        message: str,
        *,
        connection_lost: bool = False,
        close_code: int | None = None,
        expected: int | None = None,
        received: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(message, **kwargs)
        self.connection_lost = connection_lost or close_code is not None
        self.close_code = close_code
        self.expected = expected
        self.received = received


class StalledError(UtteranceError):
    """No frame came for too long, whatever else came: pings, other messages.

    Attributes:
        waited_s: How long no frame had come, in seconds.
    """

    def __init__(self, message: str, *, waited_s: float, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.waited_s = waited_s


class TooLongError(UtteranceError):
    """More audio came than this program allows; what is within the limit was handed out.

    Attributes:
        limit_frames: The limit, in frames.
    """

    def __init__(self, message: str, *, limit_frames: int, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.limit_frames = limit_frames
