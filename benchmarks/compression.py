"""What permessage-deflate would do to a codec stream: bytes on the wire and CPU time, both ways.

    python benchmarks/compression.py [--repeats 50]

One packet per frame, as a talker sends them, framed by websockets itself; no socket, so the bytes
are exact. Codes are those of the bundled demo (of its own small codec) and random ones.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode

from codecstream import demo
from codecstream.wire import encode_packet

FRAME_RATE_HZ = 12.5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=50)
    repeats = options.parse_args().repeats
    streams = {
        "demo speech": np.concatenate([said.codes for said in demo.utterances()]),
        "random codes": np.random.default_rng(0).integers(0, 2048, (150, 16)),
    }
    print("| codes | compression | bytes per second of audio | CPU us per packet, send + receive |")
    print("| --- | --- | ---: | ---: |")
    for name, codes in streams.items():
        packets = [encode_packet(seq, codes[seq : seq + 1]) for seq in range(len(codes))]
        for compression in ("none", "deflate"):
            size, cpu_s = measure(packets, compression == "deflate", repeats)
            audio_s = len(packets) / FRAME_RATE_HZ
            print(
                f"| {name} | {compression} | {size / audio_s:.0f} | "
                f"{cpu_s / repeats / len(packets) * 1e6:.1f} |"
            )


def measure(packets: list[bytes], compress: bool, repeats: int) -> tuple[int, float]:
    """Return the bytes of all packets on the wire, and the CPU time of ``repeats`` passes."""
    size = 0
    started_s = time.process_time()
    for _ in range(repeats):
        sender: list[Any] = [PerMessageDeflate(False, False, 12, 12)] if compress else []
        receiver: list[Any] = [PerMessageDeflate(False, False, 12, 12)] if compress else []
        size = 0
        for data in packets:
            sent = Frame(Opcode.BINARY, data).serialize(mask=False, extensions=sender)
            size += len(sent)
            if unpack(sent, receiver) != data:
                raise RuntimeError("what was received is not what was sent")
    return size, time.process_time() - started_s


def unpack(sent: bytes, receiver: list[Any]) -> bytes:
    """Return the message of an unmasked frame of fewer than 126 bytes."""
    frame = Frame(Opcode.BINARY, sent[2:], rsv1=bool(sent[0] & 0x40))
    for extension in receiver:
        frame = extension.decode(frame)
    return bytes(frame.data)


if __name__ == "__main__":
    main()
