r"""Speak a text through a talker server, decode it here, play it, and print how fast it was.

python examples/player.py --wav demo.wav                      # bundled demo, no server needed
python examples/player.py --url ws://HOST:8000/v1/audio/speech/stream \
    --artifact decoder-onnx --text "Hello." --voice vivian
python examples/player.py --stdout | aplay -f S16_LE -r 24000  # any other program's sound output
"""

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from live_view import live_view

import codecstream
from codecstream import demo
from codecstream.devices import list_devices
from codecstream.playback import Player
from codecstream.policy import AdaptivePolicy, FixedPolicy, StartPolicy
from codecstream.sinks import RawSink, Sink
from codecstream.testing import Recording, ReplayServer
from codecstream.wav import WavWriter


async def main(options: argparse.Namespace) -> None:
    """Speak one text."""
    if options.list_devices:
        return print(*list_devices() or ["This machine has no sound device."], sep="\n")
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
        player = None if options.no_audio or options.stdout else open_player(program, options)
        sinks: list[Sink] = [] if player is None else [stack.enter_context(player)]
        if options.wav:
            sinks.append(stack.enter_context(WavWriter(options.wav, rate_hz)))
        if options.stdout:
            sinks.append(RawSink(sys.__stdout__.buffer))
        policy: StartPolicy | None = None  # files need no start
        if options.prebuffer is not None:
            policy = FixedPolicy(prebuffer_s=options.prebuffer)
        elif player is not None or options.stdout:
            policy = AdaptivePolicy.for_program(program)
        ahead_s = None if player is None else player.ahead_s
        connection = codecstream.connect(
            options.url, program, policy=policy, ahead_s=ahead_s, capture=options.capture
        )
        client = await stack.enter_async_context(connection)
        utterance = client.speak(options.text, voice=options.voice)
        with live_view(utterance, player):  # on a terminal
            async for chunk in utterance:
                for sink in sinks:
                    await asyncio.to_thread(sink.write, chunk.pcm)
            for sink in sinks:
                await asyncio.to_thread(sink.drain)
    report = make_report(utterance.result, player, isinstance(policy, AdaptivePolicy))
    print_table(report, options.wav)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2), encoding="utf-8")


def open_player(program: codecstream.Program, options: argparse.Namespace) -> Player | None:
    """Open the sound device; without one, say what is missing and go on, unless it was named."""
    try:
        return Player(program.geometry.sample_rate_hz, device=options.device)
    except (codecstream.MissingDependencyError, codecstream.PlaybackError) as error:
        if options.device is not None:
            raise
        print(f"Not playing: {error}")
        return None


def make_report(
    result: codecstream.UtteranceResult, player: Player | None, adaptive: bool
) -> dict[str, Any]:
    """Return the figures that --json writes; what was not measured is null, with a reason."""
    report = asdict(result.metrics) | {"total_frames": result.frames_decoded}
    sizes = [chunk.frames for chunk in result.timeline]  # as the policy decided
    report["schedule"] = sizes if adaptive else list(codecstream.DEFAULT_RAMP)
    stats = None if player is None else player.stats
    report["underruns"] = None if stats is None else stats.underruns
    report["underrun_ms"] = None if stats is None else stats.underrun_samples / 24
    report["chunks"] = [asdict(chunk) for chunk in result.timeline]
    reason = "no audio came" if player is not None or not result.timeline else "nothing was played"
    return report | {"null_because": {name: reason for name in report if report[name] is None}}


def print_table(report: dict[str, Any], wav: str | None) -> None:
    """Print the figures that a person looks at."""
    chunks, written = report["chunks"], f", written to {wav}" if wav else ""
    print(f"{report['audio_s']:.2f} s of speech in {len(chunks)} chunks{written}")
    if not chunks:
        return
    print(f"  TTFA            {report['ttfa_ms']:7.0f} ms  the first chunk with audio was ready")
    print(f"  playback start  {report['playback_start_ms']:7.0f} ms  earliest, to never run dry")
    print(f"  stall at TTFA   {report['stall_at_ttfa_ms']:7.0f} ms  silence if started at once")
    print(f"  RTF             {report['rtf']:7.2f}     wall time over audio time")
    print(f"  decode RTF      {report['decode_rtf']:7.3f}     below 1, the device keeps up")
    print("  chunk  frames  arrived ms  ready ms  decode ms")
    row = "  {idx:5d}  {frames:6d}  {arrival_ms:10.0f}  {t_ms:8.0f}  {decode_ms:9.1f}"
    print(*(row.format(**chunk) for chunk in chunks), sep="\n")


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--url", help="the server; without it, the bundled demo is replayed")
    parser.add_argument("--artifact", metavar="DIR", help="decoder artifact of codecstream-export")
    parser.add_argument("--text", help="what to say")
    parser.add_argument("--voice", help="the server's name of a voice")
    parser.add_argument("--wav", metavar="FILE", help="write the speech to a WAV file")
    parser.add_argument("--no-audio", action="store_true", help="do not play")
    parser.add_argument("--stdout", action="store_true", help="write 16-bit samples to stdout")
    parser.add_argument("--device", metavar="NAME_OR_INDEX", help="where to play")
    parser.add_argument("--prebuffer", metavar="S", type=float, help="fixed wait, not the shortest")
    parser.add_argument("--list-devices", action="store_true", help="show what can play, and stop")
    parser.add_argument("--capture", metavar="FILE", help="record the session, to replay a fault")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.url and not (options.artifact and options.text):
        parser.error("--url needs --artifact and --text: the demo decoder knows its own codes only")
    return options


if __name__ == "__main__":
    options = parse_options()
    try:  # with --stdout, that is for samples; what people read goes to stderr
        with contextlib.redirect_stdout(sys.stderr if options.stdout else sys.stdout):
            asyncio.run(main(options))
    except codecstream.CodecStreamError as error:
        sys.exit(f"error: {error}")
