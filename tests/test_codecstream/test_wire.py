"""The wire format: bytes and JSON text to typed messages, and back."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from codecstream import LocalProtocolError, WireError, wire

LARGEST = 2_097_127  # bytes of a packet with 65535 frames of 16 codes

SERVER_MESSAGES: list[wire.ServerMessage] = [
    wire.CodecStart(version=1, codebooks=16, sample_rate=24000),
    wire.CodecStart(
        version=1,
        codebooks=16,
        sample_rate=24000,
        codebook_size=2048,
        frame_rate_hz=12.5,
        decoder_id="qwen3_tts_tokenizer_v2_12hz",
        header_format="<IHB",
        utterance_index=3,
        sentence_index=1,
        sentence_text='Grüße, "世界" 🎈',
        model="talker",
    ),
    wire.CodecDone(),
    wire.CodecDone(
        utterance_index=3,
        sentence_index=1,
        total_frames=57,
        seq_last=56,
        error=True,
        cancelled=True,
    ),
    wire.SessionDone(),
    wire.SessionDone(utterance_index=3, total_sentences=2),
    wire.ErrorMessage(),
    wire.ErrorMessage("out of tokens", partial_audio=True, action="discard"),
    wire.InputCancelled(),
]
CLIENT_MESSAGES: list[wire.ClientMessage] = [
    wire.SessionConfig(),
    wire.SessionConfig(
        model="talker",
        voice="vivian",
        task_type="Base",
        language="German",
        instructions="slowly",
        max_new_tokens=2000,
        seed=0,
        ref_audio="data:audio/wav;base64,AAAA",
        ref_text="Hello.",
        x_vector_only_mode=False,
        speaker_embedding=[0.25, -1.0],
        non_streaming_mode=True,
        split_granularity="sentence",
    ),
    wire.InputText('a\n"b" 🎈'),
    wire.InputDone(),
    wire.InputCancel(),
    wire.SessionClose(),
]
KNOWN_TYPES = ["codec.start", "codec.done", "session.done", "error", "input.cancelled"]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def codes_of(frames: int, codebooks: int = 16) -> NDArray[np.int16]:
    return np.arange(frames * codebooks).reshape(frames, codebooks).astype(np.int16)


# Packets


def test_a_packet_is_these_bytes() -> None:
    """Header ``<IHB``, then int16 frame after frame, all little-endian."""
    codes = np.array([[0, 2047], [-1, 0x0102]])
    by_hand = b"\x04\x03\x02\x01" + b"\x02\x00" + b"\x01"
    by_hand += b"\x00\x00" + b"\xff\x07" + b"\xff\xff" + b"\x02\x01"
    assert by_hand == struct.pack("<IHB4h", 0x01020304, 2, 1, 0, 2047, -1, 0x0102)

    assert wire.encode_packet(0x01020304, codes, wire.Flags.EOS) == by_hand
    packet = wire.decode_packet(by_hand, codebooks=2)
    assert (packet.seq, packet.flags, packet.eos) == (0x01020304, wire.Flags.EOS, True)
    assert packet.codes.tolist() == codes.tolist()


@given(
    seq=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 255),
    codes=arrays(np.int16, array_shapes(min_dims=2, max_dims=2, max_side=20)),
)
def test_packet_round_trip(seq: int, flags: int, codes: NDArray[np.int16]) -> None:
    data = wire.encode_packet(seq, codes, flags)
    packet = wire.decode_packet(data, codebooks=codes.shape[1])
    assert (packet.seq, int(packet.flags)) == (seq, flags)
    assert packet.eos == bool(flags & 1)
    assert packet.codes.dtype == np.int16
    assert np.array_equal(packet.codes, codes)
    assert wire.encode_packet(packet.seq, packet.codes, packet.flags) == data


@pytest.mark.parametrize("dtype", ["i1", "u2", ">i4", "u4", "i8", "u8"])
def test_codes_of_any_integer_width_make_the_same_packet(dtype: str) -> None:
    codes = codes_of(4, 16)
    assert wire.encode_packet(0, codes.astype(dtype)) == wire.encode_packet(0, codes)
    in_columns = np.asfortranarray(codes.astype(dtype))
    assert wire.encode_packet(0, in_columns) == wire.encode_packet(0, codes)


@pytest.mark.parametrize(
    ("seq", "codes"),
    [
        (-1, codes_of(1)),
        (2**32, codes_of(1)),
        (0, np.zeros((65536, 16), np.int16)),
        (0, np.full((1, 16), 0x8000)),
        (0, np.full((1, 16), -0x8001)),
        (0, np.full((1, 16), 2**64 - 1, np.uint64)),
        (0, np.zeros(16, np.int16)),
        (0, np.zeros((1, 16), np.float32)),
        (0, np.zeros((1, 16), bool)),
    ],
)
def test_what_does_not_fit_a_packet_is_refused(seq: int, codes: NDArray[Any]) -> None:
    with pytest.raises(ValueError):
        wire.encode_packet(seq, codes)


@pytest.mark.parametrize("flags", [-1, 256])
def test_flags_that_do_not_fit_are_refused(flags: int) -> None:
    with pytest.raises(ValueError):
        wire.encode_packet(0, codes_of(1), flags)


@pytest.mark.case(9)
@pytest.mark.parametrize("size", range(7))
def test_case_9_shorter_than_a_header(size: int) -> None:
    with pytest.raises(WireError, match=rf"header of 7 bytes, this message has {size} bytes"):
        wire.decode_packet(bytes(size), codebooks=16)


@pytest.mark.case(9)
@pytest.mark.parametrize(
    ("frames", "body_bytes"),
    [(2, 63), (2, 65), (2, 0), (2, 128), (65535, 0), (0, 1), (0, 32), (65535, 2_097_119)],
)
def test_case_9_body_and_header_disagree(frames: int, body_bytes: int) -> None:
    data = struct.pack("<IHB", 9, frames, 0) + bytes(body_bytes)
    counts = rf"takes {7 + 32 * frames} bytes, this message has {7 + body_bytes} bytes"
    with pytest.raises(WireError, match=rf"packet 9 with {frames} frames .* {counts}"):
        wire.decode_packet(data, codebooks=16)


@pytest.mark.case(9)
def test_case_9_ten_thousand_random_buffers() -> None:
    """A packet or a WireError; half of them have the length that their header says."""
    random = np.random.default_rng(9)
    packets = 0
    for number in range(10_000):
        data = random.bytes(int(random.integers(0, 300)))
        if number % 2 and len(data) >= 7:
            frames = (len(data) - 7) // 32
            data = data[:4] + struct.pack("<H", frames) + data[6 : 7 + 32 * frames]
        try:
            packet = wire.decode_packet(data, codebooks=16)
        except WireError as error:
            assert f"this message has {len(data)} bytes" in str(error)
        else:
            packets += 1
            assert len(data) == 7 + 2 * packet.codes.size
    assert 4_000 < packets < 6_000


@given(data=st.binary(max_size=200), codebooks=st.integers(1, 40))
def test_any_bytes_are_a_packet_or_a_wire_error(data: bytes, codebooks: int) -> None:
    try:
        packet = wire.decode_packet(data, codebooks)
    except WireError:
        return
    assert wire.encode_packet(packet.seq, packet.codes, packet.flags) == data


@pytest.mark.case(9)
def test_case_9_the_largest_packet_is_fine() -> None:
    codes = codes_of(65535)
    data = wire.encode_packet(5, codes)
    assert len(data) == wire.MAX_PACKET_BYTES == LARGEST
    packet = wire.decode_packet(data, codebooks=16)
    assert packet.codes.shape == (65535, 16)
    assert np.array_equal(packet.codes, codes)


def test_decoded_codes_are_a_read_only_view() -> None:
    packet = wire.decode_packet(wire.encode_packet(0, codes_of(1)), codebooks=16)
    assert not packet.codes.flags.writeable


# JSON


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda m: type(m).__name__)
def test_server_message_round_trip(message: wire.ServerMessage) -> None:
    assert wire.decode_message(wire.encode_message(message)) == message


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_client_message_round_trip(message: wire.ClientMessage) -> None:
    assert wire.decode_client_message(wire.encode_message(message)) == message


def test_type_names_are_the_protocols() -> None:
    types = {json.loads(wire.encode_message(m))["type"] for m in SERVER_MESSAGES}
    assert types == set(KNOWN_TYPES)
    types = {json.loads(wire.encode_message(m))["type"] for m in CLIENT_MESSAGES}
    assert types == {
        "session.config", "input.text", "input.done", "input.cancel", "session.close",
    }  # fmt: skip


def test_config_leaves_out_what_is_none_and_nothing_else() -> None:
    config = wire.SessionConfig(seed=0, voice="", x_vector_only_mode=False)
    assert json.loads(wire.encode_message(config)) == {
        "type": "session.config",
        "output_mode": "codec_tokens",
        "stream_audio": True,
        "response_format": "pcm",
        "seed": 0,
        "voice": "",
        "x_vector_only_mode": False,
    }


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda m: type(m).__name__)
def test_unknown_fields_are_passed_over(message: wire.ServerMessage) -> None:
    document = json.loads(wire.encode_message(message))
    document.update({"new": {"deep": [1, None]}, "": 1})
    assert wire.decode_message(json.dumps(document)) == message


@pytest.mark.parametrize("kind", ["audio.start", "session.config", "", "codec.start ", "世"])
def test_unknown_types_are_told(kind: str) -> None:
    text = json.dumps({"version": "x", "type": kind})
    assert wire.decode_message(text) == wire.UnknownMessage(kind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "hello",
        "null",
        "[]",
        "1",
        '"error"',
        "{}",
        '{"type": null}',
        '{"type": 1}',
        '{"type": "error"',
        '{"type": "error"} trailing',
        '{"type": "error", "message": 5}',
        '{"type": "error", "message": 5}',
        '{"type": "codec.start"}',
        '{"type": "codec.start", "version": "1", "codebooks": 16, "sample_rate": 24000}',
        '{"type": "codec.start", "version": 1, "codebooks": null, "sample_rate": 24000}',
        '{"type": "codec.start", "version": 1e999, "codebooks": 16, "sample_rate": 24000}',
        '{"type": "codec.done", "total_frames": "57"}',
        '{"type": "codec.done", "total_frames": 5.5}',
        '{"type": "codec.done", "error": 1}',
        '{"type": "session.done", "total_sentences": [1]}',
        '{"type": "error", "type": "codec.done"}',
        '{"type": "error", "message": "\\ud800"}',
        '{"type": "error", "message": "\ud800"}',
        '{"type": "error", "message": NaN}',
        '{"type": ' * 200_000,
        "[" * 1_000_000,
        "x" * 5_000_000,
    ],
    ids=lambda text: ascii(text[:60]),
)
def test_unreadable_messages(text: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_message(text)
    assert len(str(caught.value)) < 400  # however long the message was


def test_deep_nesting_in_an_unknown_field_is_passed_over_or_refused() -> None:
    """By Python's own limit, which is a count before 3.14, and the stack since."""
    text = '{"type": "error", "message": "x", "deep": ' + "[" * 200_000 + "]" * 200_000 + "}"
    try:
        message = wire.decode_message(text)
    except WireError as error:
        assert len(str(error)) < 400
    else:
        assert sys.version_info >= (3, 14) and message == wire.ErrorMessage("x")


def decoded(text: str) -> None:
    """Anything but a message or a WireError fails the test."""
    for decode in (wire.decode_message, wire.decode_client_message):
        try:
            decode(text)
        except WireError as error:
            assert str(error)


@given(st.text() | st.text(st.characters()).map(lambda text: '{"type": "' + text + '"}'))
def test_any_text_is_a_message_or_a_wire_error(text: str) -> None:
    decoded(text)


@given(
    st.dictionaries(
        st.sampled_from(
            ["version", "codebooks", "sample_rate", "total_frames", "message", "text", "error"]
        )
        | st.text(),
        json_values,
    ),
    st.sampled_from([*KNOWN_TYPES, "session.config", "input.text"]) | json_values,
)
def test_any_json_is_a_message_or_a_wire_error(fields: dict[str, Any], kind: Any) -> None:
    decoded(json.dumps({"type": kind, **fields}))
    decoded(json.dumps([fields]))


# Size limits


def padded_text(size: int) -> wire.InputText:
    return wire.InputText("x" * (size - len(wire.encode_message(wire.InputText("")))))


def padded_config(size: int) -> wire.SessionConfig:
    overhead = len(wire.encode_message(wire.SessionConfig(ref_audio="")))
    return wire.SessionConfig(ref_audio="x" * (size - overhead))


@pytest.mark.parametrize(
    ("message", "limit"),
    [(padded_text, 128 * 1024), (padded_config, 4 * 1024 * 1024)],
    ids=["input.text", "session.config"],
)
def test_size_limits(message: Any, limit: int) -> None:
    assert len(wire.encode_message(message(limit))) == limit
    with pytest.raises(LocalProtocolError, match=rf"{limit + 1} bytes.* at most {limit}"):
        wire.encode_message(message(limit + 1))


def test_size_limits_count_bytes_not_characters() -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_message(wire.InputText("🎈" * 40_000))


@pytest.mark.parametrize("character", ["x", "\x01", "\x7f", '"', "\\", "é", "世", "🎈", "\u2028"])
def test_pieces_fit_whatever_the_character(character: str) -> None:
    """JSON turns ``\\x01`` into 6 bytes; a character beyond 16 bits has 4, or 12 when escaped."""
    text = character * 50_000
    pieces = wire.split_text(text)
    assert "".join(pieces) == text
    for piece in pieces:
        encoded = wire.encode_message(wire.InputText(piece))
        assert len(encoded.encode()) <= wire.MAX_MESSAGE_BYTES
        assert wire.decode_client_message(encoded) == wire.InputText(piece)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 5))
def test_pieces_join_to_the_text(text: str, limit: int) -> None:
    pieces = wire.split_text(text, limit)
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= limit for piece in pieces)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_message(wire.InputText("a\ud800"))
