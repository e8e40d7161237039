"""Serve recorded codec frames over the codec-stream protocol, at a talker's pace.

python examples/replay_server.py                                # the bundled demo
python examples/replay_server.py --codes FILE.npy --pace 0.6 --jitter-ms 40
python examples/replay_server.py --capture fault.jsonl          # what a client has recorded

The first line printed is the URL; point examples/player.py at it.
"""

import argparse
import asyncio
import contextlib

import numpy as np

from codecstream import demo
from codecstream.capture import read_capture
from codecstream.errors import CaptureError
from codecstream.geometry import QWEN3_TTS_12HZ
from codecstream.replay import CaptureServer
from codecstream.testing import Recording, ReplayServer, ScriptedServer


async def main() -> None:
    """Serve until interrupted."""
    async with make_server(parse_options()) as server:
        print(server.url, flush=True)
        await server.serve_forever()


def make_server(options: argparse.Namespace) -> ScriptedServer:
    """Return the server that was asked for."""
    if options.capture is not None:
        try:
            capture = read_capture(options.capture)
            return CaptureServer(capture, pace=options.pace, port=options.port)
        except (CaptureError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
    if options.codes is None:
        recordings = [Recording(u.codes, text=u.text) for u in demo.utterances()]
    else:
        recordings = [Recording(np.load(path, allow_pickle=False)) for path in options.codes]
    return ReplayServer(
        recordings,
        port=options.port,
        pace=options.pace,
        jitter_ms=options.jitter_ms,
        decoder_id=demo.DECODER_ID if options.codes is None else options.decoder_id,
    )


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--codes",
        nargs="+",
        metavar="FILE.npy",
        help="integer [frames, codebooks]; one utterance each",
    )
    source.add_argument("--capture", metavar="FILE.jsonl", help="a session that a client recorded")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument(
        "--pace",
        type=float,
        default=1.0,
        help="time over real time, or over the capture's; 0 at once",
    )
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="largest delay of a packet")
    parser.add_argument(
        "--decoder-id", default=QWEN3_TTS_12HZ, help="codec to announce (%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
