r"""Speak a text through a talker server, decode it here, play it, and print how fast it was.

python examples/player.py --wav demo.wav                      # bundled demo, no server needed
python examples/player.py --url ws://HOST:8000/v1/audio/speech/stream \
    --artifact decoder-onnx --text "Hello." --voice vivian
"""

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict
from typing import Any

import codecstream
from codecstream import demo
from codecstream.playback import Player
from codecstream.testing import Recording, ReplayServer
from codecstream.wav import WavWriter

DECODING_S = 0.25  # decoding a chunk takes time, too


async def main(options: argparse.Namespace) -> None:
    """Speak one text."""
    async with contextlib.AsyncExitStack() as stack:
        if options.url is None:
            said = demo.utterances()
            print(f"No --url: replaying the bundled demo, which knows {len(said)} sentences.")
            recordings = [Recording(u.codes, text=u.text) for u in said]
            server = ReplayServer(recordings, pace=1.0, decoder_id=demo.DECODER_ID)
            options.url = (await stack.enter_async_context(server)).url
            options.artifact = options.artifact or demo.artifact_dir()
            options.text = options.text or said[1].text
            if options.text not in [u.text for u in said]:
                sentences = "\n  ".join(u.text for u in said)
                sys.exit(f"error: the demo decoder has learned these by heart:\n  {sentences}")
        program = codecstream.load_program(options.artifact)
        rate_hz = program.geometry.sample_rate_hz
        player = None if options.no_audio else open_player(program)
        if player is not None:
            stack.enter_context(player)
        wav = stack.enter_context(WavWriter(options.wav, rate_hz)) if options.wav else None
        client = await stack.enter_async_context(codecstream.connect(options.url, program))
        settings = {"voice": options.voice} if options.voice else {}
        utterance = client.speak(options.text, **settings)
        async for chunk in utterance:
            if wav is not None:
                wav.write(chunk.pcm)
            if player is not None:
                await asyncio.to_thread(player.write, chunk.pcm)
        if player is not None:
            await asyncio.to_thread(player.drain)
    report = make_report(utterance.result, player)
    print_table(report, options.wav)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def open_player(program: codecstream.Program) -> Player | None:
    """Open the sound device, or say what is missing and go on without."""
    delay_frames = codecstream.Ramp().start_delay_frames(pace=1.0)
    delay_s = program.geometry.seconds(1) * delay_frames + DECODING_S
    try:
        return Player(program.geometry.sample_rate_hz, start_delay_s=delay_s)
    except (codecstream.MissingDependencyError, codecstream.PlaybackError) as error:
        print(f"Not playing: {error}")
        return None


def make_report(result: codecstream.UtteranceResult, player: Player | None) -> dict[str, Any]:
    """Return the figures that --json writes; what was not measured is null, with a reason."""
    report = asdict(result.metrics)
    report["total_frames"] = result.frames_decoded
    report["schedule"] = list(codecstream.DEFAULT_RAMP)
    report["underruns"] = None if player is None else player.stats.underruns
    report["chunks"] = [asdict(chunk) for chunk in result.timeline]
    reason = "no audio came" if player is not None or not result.timeline else "nothing was played"
    report["null_because"] = {name: reason for name, value in report.items() if value is None}
    return report


def print_table(report: dict[str, Any], wav: str | None) -> None:
    """Print the figures that a person looks at."""
    chunks = report["chunks"]
    written = f", written to {wav}" if wav else ""
    print(f"{report['audio_s']:.2f} s of speech in {len(chunks)} chunks{written}")
    if not chunks:
        return
    print(f"  TTFA            {report['ttfa_ms']:7.0f} ms  the first chunk with audio was ready")
    print(f"  playback start  {report['playback_start_ms']:7.0f} ms  earliest, to never run dry")
    print(f"  stall at TTFA   {report['stall_at_ttfa_ms']:7.0f} ms  silence if started at once")
    print(f"  RTF             {report['rtf']:7.2f}     wall time over audio time")
    print(f"  decode RTF      {report['decode_rtf']:7.3f}     below 1, the device keeps up")
    print("  chunk  frames  arrived ms  ready ms  decode ms")
    for chunk in chunks:
        print(
            f"  {chunk['idx']:5d}  {chunk['frames']:6d}  {chunk['arrival_ms']:10.0f}"
            f"  {chunk['t_ms']:8.0f}  {chunk['decode_ms']:9.1f}"
        )


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="the server; without it, the bundled demo is replayed")
    parser.add_argument("--artifact", metavar="DIR", help="decoder artifact of codecstream-export")
    parser.add_argument("--text", help="what to say")
    parser.add_argument("--voice", help="the server's name of a voice")
    parser.add_argument("--wav", metavar="FILE", help="write the speech to a WAV file")
    parser.add_argument("--no-audio", action="store_true", help="do not play")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.url and not (options.artifact and options.text):
        parser.error("--url needs --artifact and --text: the demo decoder knows its own codes only")
    return options


if __name__ == "__main__":
    try:
        asyncio.run(main(parse_options()))
    except codecstream.CodecStreamError as error:
        sys.exit(f"error: {error}")
