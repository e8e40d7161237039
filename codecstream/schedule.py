"""How many frames go into the next chunk.

A ramp starts with small chunks, for an early first sound, and grows to large ones, which cost
less per frame:

>>> from codecstream.schedule import Ramp
>>> ramp = Ramp((2, 4, 8, 16, 25))
>>> [ramp.size(i) for i in range(7)]
[2, 4, 8, 16, 25, 25, 25]
>>> ramp.split(60)
[2, 4, 8, 16, 25, 5]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DEFAULT_RAMP", "Ramp"]

DEFAULT_RAMP = (2, 4, 8, 16, 25)
"""Frames per chunk; 25 frames are 2 s of audio."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """Chunk sizes in frames; the last one repeats.

    Raises:
        ValueError: No size, or one that is not a positive integer.
    """

    sizes: tuple[int, ...] = DEFAULT_RAMP

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"a schedule is one or more positive whole numbers of frames, not {self.sizes!r}"
            )
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, sizes: Ramp | Iterable[int]) -> Ramp:
        """Return ``sizes`` as a ramp."""
        return sizes if isinstance(sizes, Ramp) else cls(tuple(sizes))

    def size(self, index: int) -> int:
        """Return the size in frames of chunk ``index``, counted from 0."""
        return self.sizes[min(index, len(self.sizes) - 1)]

    def start_delay_frames(self, pace: float = 1.0) -> float:
        """Return how long after the first chunk a player must start to never run dry, in frames.

        Decoding is taken to cost nothing. A larger chunk arrives later, so a ramp that grows
        needs a later start.

        Args:
            pace: Time that the talker takes per frame, over the frame's duration; at most 1.
        """
        if not 0 < pace <= 1:
            raise ValueError(
                f"no start delay is enough at pace {pace}: it must be above 0, up to 1"
            )
        needed = 0.0
        received = 0
        for size in self.sizes:
            needed = max(needed, (received + size) * pace - received)
            received += size
        return needed - self.sizes[0] * pace

    def split(self, frames: int) -> list[int]:
        """Return the sizes of all chunks of ``frames`` frames, the short tail included."""
        sizes: list[int] = []
        while frames > 0:
            sizes.append(min(self.size(len(sizes)), frames))
            frames -= sizes[-1]
        return sizes
