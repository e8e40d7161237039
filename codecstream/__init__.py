"""Speech from codec frames: the client side of a text-to-speech split.

Importing this package loads numpy and msgspec and nothing heavier: a runtime, sounddevice and
websockets are loaded when they are first used.
"""

from codecstream.accumulate import CodeAccumulator
from codecstream.decoder import StreamDecoder
from codecstream.errors import *  # noqa: F403
from codecstream.errors import CodecStreamError
from codecstream.geometry import CodecGeometry
from codecstream.runtimes import load_program

__version__ = "0.1.0"
