"""Record when packets reach a client over a loopback WebSocket, for start_policy.py.

    python benchmarks/record_arrivals.py --out benchmarks/traces/loopback.json

The server is codecstream.testing.ReplayServer in a process of its own (examples/replay_server.py),
one frame per packet. The client does nothing but look at the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import websockets

from codecstream import wire

ROOT = Path(__file__).parent.parent
RECORD = """Time in ms from the request (input.done sent) to each packet of one frame, by \
utterance; server and client are two processes on one machine, over loopback"""


async def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        codes = Path(folder) / "codes.npy"
        np.save(codes, np.random.default_rng(0).integers(0, 2048, (options.frames, 16)))
        command = [sys.executable, str(ROOT / "examples" / "replay_server.py")]
        command += ["--codes", str(codes), "--pace", str(options.pace)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                utterances = await record(url, options.frames, options.utterances)
            finally:
                server.terminate()
    document = {
        "what": RECORD,
        "command": shlex.join(["python", "benchmarks/record_arrivals.py", *sys.argv[1:]]),
        "date": str(date.today()),
        "machine": f"{platform.system()}, Python {platform.python_version()}, {options.note}",
        "pace": options.pace,
        "frame_ms": 80,
        "utterances_ms": utterances,
    }
    text = json.dumps(document, indent=1)
    text = text.replace(",\n   ", ", ").replace("[\n   ", "[").replace("\n  ]", "]")
    options.out.write_text(text + "\n", encoding="utf-8")


async def record(url: str, frames: int, utterances: int) -> list[list[float]]:
    recorded = []
    async with websockets.connect(url, compression=None) as socket:
        await socket.send(wire.encode_message(wire.SessionConfig()))
        for _ in range(utterances):
            await socket.send(wire.encode_message(wire.InputText("x")))
            await socket.send(wire.encode_message(wire.InputDone()))
            sent_s = time.perf_counter()
            times_ms: list[float] = []
            while len(times_ms) < frames:
                if isinstance(await socket.recv(), bytes):
                    times_ms.append(round((time.perf_counter() - sent_s) * 1000, 2))
            while not isinstance(wire.decode_message(str(await socket.recv())), wire.SessionDone):
                pass
            recorded.append(times_ms)
    return recorded


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--frames", type=int, default=125, help="per utterance (%(default)s)")
    parser.add_argument("--utterances", type=int, default=8)
    parser.add_argument("--note", default="nothing else running", help="what else the machine did")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
