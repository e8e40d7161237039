"""Say each text in turn, without asyncio; Ctrl-C skips to the next one.

python examples/robot.py --url ws://HOST:8000/v1/audio/speech/stream \
    --artifact decoder-onnx --wav said.wav "Hello." "How are you?"
"""

import argparse
import sys

import codecstream
from codecstream.wav import WavWriter


def main(options: argparse.Namespace) -> None:
    """Connect once, say everything, and tell how each utterance ended."""
    program = codecstream.load_program(options.artifact)
    again = codecstream.Reconnect(attempts=3)  # the Wi-Fi of robots
    with (
        WavWriter(options.wav, program.geometry.sample_rate_hz) as wav,
        codecstream.sync_connect(options.url, program, reconnect=again) as client,
    ):
        for text in options.texts:
            utterance = client.speak(text)
            try:
                print(f"Saying {text!r}", flush=True)
                for chunk in utterance:
                    wav.write(chunk.pcm)  # or robot.play(chunk.pcm): float32 at 24 kHz
            except KeyboardInterrupt:
                client.cancel()  # any thread may call it
            except codecstream.UtteranceError:
                pass  # the next text may fare better; the result says what happened
            result = utterance.result
            print(f"  {result.status} after {result.frames_handed_out} frames: {result.reason}")


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="the server")
    parser.add_argument("--artifact", required=True, metavar="DIR", help="decoder artifact")
    parser.add_argument("--wav", required=True, metavar="FILE", help="where to write the speech")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="what to say")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_options())
    except codecstream.CodecStreamError as error:
        sys.exit(f"error: {error}")
