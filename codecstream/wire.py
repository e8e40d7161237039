"""The wire format: bytes and JSON text to typed messages, and back. No I/O, no state.

>>> import numpy as np
>>> from codecstream import wire
>>> data = wire.encode_packet(seq=7, codes=np.ones((2, 16), np.int16), flags=wire.Flags.EOS)
>>> len(data)
71
>>> packet = wire.decode_packet(data, codebooks=16)
>>> packet.seq, packet.codes.shape, packet.eos
(7, (2, 16), True)
>>> wire.decode_message('{"type": "session.done", "utterance_index": 0, "total_sentences": 1}')
SessionDone(utterance_index=0, total_sentences=1)

The format is vLLM-Omni's codec-token streaming, protocol version 1.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from codecstream.errors import LocalProtocolError, WireError

__all__ = [
    "HEADER_FORMAT",
    "MAX_PACKET_BYTES",
    "MAX_PACKET_FRAMES",
    "PROTOCOL_VERSION",
    "CodecDone",
    "CodecStart",
    "ErrorMessage",
    "Flags",
    "InputCancel",
    "InputCancelled",
    "InputDone",
    "InputText",
    "Packet",
    "SessionClose",
    "SessionConfig",
    "SessionDone",
    "UnknownMessage",
    "decode_client_message",
    "decode_message",
    "decode_packet",
    "encode_message",
    "encode_packet",
    "peek_header",
    "split_text",
]

PROTOCOL_VERSION = 1
HEADER_FORMAT = "<IHB"
# Little-endian: sequence number (4 bytes), frames (2), flags (1); then int16 codes, frame by frame.
_HEADER = struct.Struct(HEADER_FORMAT)
_CODE = np.dtype("<i2")

MAX_PACKET_FRAMES = 0xFFFF
MAX_PACKET_BYTES = _HEADER.size + MAX_PACKET_FRAMES * 16 * _CODE.itemsize
"""The largest packet of a codec with 16 codebooks: 2,097,127 bytes."""

MAX_CONFIG_BYTES = 4 * 1024 * 1024  # the server's limit for session.config
MAX_MESSAGE_BYTES = 128 * 1024  # the server's limit for every other client message
MAX_SEQ = 0xFFFF_FFFF


class Flags(enum.IntFlag):
    """Flags of a packet."""

    EOS = 1
    SEGMENT_END = 2
    RESET = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """A binary packet.

    Attributes:
        seq: Sequence number, 0 to 2**32 - 1.
        flags: See :class:`Flags`; bits without a name are kept.
        codes: int16 ``[frames, codebooks]``, not yet checked against the codebook's size. It is
            a read-only view of the message.
    """

    seq: int
    flags: Flags
    codes: NDArray[np.int16]

    @property
    def eos(self) -> bool:
        """Whether this is the last packet of its sentence."""
        return Flags.EOS in self.flags


def encode_packet(seq: int, codes: ArrayLike, flags: int = 0) -> bytes:
    """Return the packet with ``codes``, integers ``[frames, codebooks]`` that fit 16 bits.

    Raises:
        ValueError: ``seq``, the number of frames or a code does not fit its field.
    """
    array = np.asarray(codes)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"codes must be integers [frames, codebooks], not {array.dtype} {array.shape}"
        )
    fits = 0 <= seq <= MAX_SEQ and len(array) <= MAX_PACKET_FRAMES and 0 <= flags <= 0xFF
    if not fits:
        raise ValueError(f"seq {seq}, {len(array)} frames or flags {flags} do not fit the header")
    if array.size and not -0x8000 <= int(array.min()) <= int(array.max()) <= 0x7FFF:
        raise ValueError("a code does not fit 16 bits")
    return _HEADER.pack(seq, len(array), int(flags)) + array.astype(_CODE).tobytes()


def decode_packet(data: bytes, codebooks: int) -> Packet:
    """Return the packet in ``data``.

    Args:
        data: One binary message.
        codebooks: Codes per frame.

    Raises:
        WireError: The message is shorter or longer than its header says.
    """
    seq, frames, flags = peek_header(data)
    expected = _HEADER.size + frames * codebooks * _CODE.itemsize
    if len(data) != expected:
        raise WireError(
            f"packet {seq} with {frames} frames of {codebooks} codes takes {expected} bytes, "
            f"this message has {len(data)} bytes"
        )
    codes = np.frombuffer(data, _CODE, offset=_HEADER.size).reshape(frames, codebooks)
    return Packet(seq, Flags(flags), codes)


def peek_header(data: bytes) -> tuple[int, int, int]:
    """Return sequence number, frames and flags of the packet in ``data``; nothing else is checked.

    Raises:
        WireError: The message is shorter than a header.
    """
    if len(data) < _HEADER.size:
        raise WireError(
            f"a packet has a header of {_HEADER.size} bytes, this message has {len(data)} bytes"
        )
    seq, frames, flags = _HEADER.unpack_from(data)
    return seq, frames, flags


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    pass


class SessionConfig(_Message, frozen=True, tag="session.config", kw_only=True):
    """The first message of a connection; it holds until it is sent again between utterances.

    A field that is None is left out.
    """

    output_mode: str = "codec_tokens"
    stream_audio: bool = True
    response_format: str = "pcm"
    model: str | None = None
    voice: str | None = None
    task_type: str | None = None
    language: str | None = None
    instructions: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: list[float] | None = None
    non_streaming_mode: bool | None = None
    split_granularity: str | None = None


class InputText(_Message, frozen=True, tag="input.text"):
    """Text of an utterance; may be sent in pieces."""

    text: str


class InputDone(_Message, frozen=True, tag="input.done"):
    """Flush: the utterance's text is complete."""


class InputCancel(_Message, frozen=True, tag="input.cancel"):
    """Abort the generation in flight, or drop the text sent so far."""


class SessionClose(_Message, frozen=True, tag="session.close"):
    """End of the connection."""


class CodecStart(_Message, frozen=True, tag="codec.start", kw_only=True):
    """Head of a sentence's stream: what its packets hold."""

    version: int
    codebooks: int
    sample_rate: int
    codebook_size: int | None = None
    frame_rate_hz: float | None = None
    decoder_id: str | None = None
    header_format: str | None = None
    utterance_index: int | None = None
    sentence_index: int | None = None
    sentence_text: str | None = None
    model: str | None = None


class CodecDone(_Message, frozen=True, tag="codec.done", kw_only=True):
    """End of a sentence's stream, with the server's own counts."""

    utterance_index: int | None = None
    sentence_index: int | None = None
    total_frames: int | None = None
    seq_last: int | None = None
    error: bool | None = False
    cancelled: bool | None = False


class SessionDone(_Message, frozen=True, tag="session.done"):
    """End of an utterance."""

    utterance_index: int | None = None
    total_sentences: int | None = None


class ErrorMessage(_Message, frozen=True, tag="error"):
    """A failure, in words."""

    message: str | None = None
    partial_audio: bool | None = None
    action: str | None = None


class InputCancelled(_Message, frozen=True, tag="input.cancelled"):
    """Answer to ``input.cancel`` with nothing in flight."""


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """A JSON message of a type that this version does not know; to be reported and passed over."""

    type: str


ServerMessage = CodecStart | CodecDone | SessionDone | ErrorMessage | InputCancelled
ClientMessage = SessionConfig | InputText | InputDone | InputCancel | SessionClose


class _Typed(msgspec.Struct, frozen=True):
    type: str


_TYPE = msgspec.json.Decoder(_Typed)
_SERVER = msgspec.json.Decoder(ServerMessage)
_CLIENT = msgspec.json.Decoder(ClientMessage)


def _tags(union: Any) -> frozenset[str]:
    return frozenset(str(kind.__struct_config__.tag) for kind in union.__args__)


_SERVER_TYPES, _CLIENT_TYPES = _tags(ServerMessage), _tags(ClientMessage)


def decode_message(text: str) -> ServerMessage | UnknownMessage:
    """Return the server's message in ``text``. Unknown fields are passed over.

    Raises:
        WireError: It is not JSON, not an object with a ``type``, or a field has the wrong type.
    """
    message = _decode(text, _SERVER, _SERVER_TYPES)
    return message  # type: ignore[no-any-return]


def decode_client_message(text: str) -> ClientMessage | UnknownMessage:
    """Return the client's message in ``text``, for servers; errors as :func:`decode_message`."""
    message = _decode(text, _CLIENT, _CLIENT_TYPES)
    return message  # type: ignore[no-any-return]


def _decode(text: str, decoder: Any, known: frozenset[str]) -> Any:
    try:
        kind = _TYPE.decode(text).type
        return decoder.decode(text) if kind in known else UnknownMessage(kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WireError(f"unreadable message: {error}: {elide(text)}") from error


def encode_message(message: ClientMessage | ServerMessage) -> str:
    """Return the message as JSON text.

    Raises:
        LocalProtocolError: It is larger than the server takes, or cannot be encoded.
    """
    document = msgspec.to_builtins(message)
    if isinstance(message, SessionConfig):
        document = {key: value for key, value in document.items() if value is not None}
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(
            f"{document['type']} holds text that is no Unicode: {error}"
        ) from error
    limit = MAX_CONFIG_BYTES if isinstance(message, SessionConfig) else MAX_MESSAGE_BYTES
    if len(data) > limit:
        raise LocalProtocolError(
            f"{document['type']} has {len(data)} bytes, the server takes at most {limit}"
        )
    return data.decode()


def split_text(text: str, limit: int = MAX_MESSAGE_BYTES // 8) -> list[str]:
    """Return ``text`` in pieces that each fit an ``input.text`` message.

    A character takes at most 6 bytes as JSON, so pieces of ``limit`` characters stay below the
    server's limit.
    """
    return [text[start : start + limit] for start in range(0, len(text), limit)]


def elide(text: str, limit: int = 120) -> str:
    """Return ``text`` shortened for a message or a log line."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
