"""Which layers go on int8: measured, not chosen by hand.

Every candidate is put on int8 alone first, and what that costs (noise in the audio, against the
eager float32 decoder, on codes that the calibration has not seen) is held against the time that it
saves. Layers are taken in the order of time saved per noise, as long as the budget lasts: noises
of different layers add up, and the sum is measured again at the end.

>>> quantization = quantize_step(step, decoder)  # doctest: +SKIP
>>> quantization.quantized  # doctest: +SKIP
('blocks.3.units.1.conv1', 'blocks.3.units.2.conv1')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from codecstream_export.eager import EagerDecoder
from codecstream_export.errors import ParityError
from codecstream_export.int8.equalize import equalize
from codecstream_export.int8.layers import (
    convolutions,
    observe,
    put,
    quantize_layers,
    replaced,
)
from codecstream_export.random_weights import random_codes
from codecstream_export.step import StepDecoder, decode_in_chunks
from codecstream_parity import slice_snr_db, snr_db

__all__ = [
    "MIN_SLICE_SNR_DB",
    "MIN_SNR_DB",
    "LayerCost",
    "Quantization",
    "Survey",
    "quantize_step",
]

MIN_SNR_DB = 40.0
MIN_SLICE_SNR_DB = 25.0
MARGIN_DB = 0.15  # other codes are decoded with a slightly different ratio
CALIBRATION_FRAMES = 48
LEVEL_FRAMES = 8
PROBE_FRAMES = 12
JOINT_PROBES = 8  # the layers together are measured on so many times the frames
CALIBRATION_SEED, PROBE_SEED = 1001, 2002
# The two numbers that decide what a layer saves, from a profile of ONNX Runtime at full size: an
# int8 product takes a fifth of a float one, and to quantise or dequantise an element takes as long
# as 85 float multiply-adds. A layer with few multiply-adds per element loses by int8.
INT8_COST = 0.2
ELEMENT_COST = 85.0


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What int8 in one layer costs and saves.

    ``snr_db`` and ``worst_slice_snr_db`` are those of the audio with this layer alone on int8, null
    for a layer that was not tried. ``arithmetic`` is the layer's share of all convolutions'
    multiply-adds, ``saved`` its share of the time that int8 could save at most, by estimate.
    ``largest_weight`` is 127, or less where more would saturate on x86 without VNNI.
    """

    name: str
    arithmetic: float
    saved: float
    snr_db: float | None
    worst_slice_snr_db: float | None
    largest_weight: int | None
    quantized: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which layers are on int8, why, and what it costs."""

    layers: tuple[LayerCost, ...]
    snr_db: float
    worst_slice_snr_db: float
    min_snr_db: float
    min_slice_snr_db: float
    calibration: str
    probe: str

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the layers on int8."""
        return tuple(layer.name for layer in self.layers if layer.quantized)

    @property
    def arithmetic(self) -> float:
        """Share of the convolutions' arithmetic that is on int8."""
        return sum(layer.arithmetic for layer in self.layers if layer.quantized)

    def to_json(self) -> dict[str, object]:
        """Return the fields for the manifest."""
        return {
            "weights": "int8, scale per output channel",
            "activations": "int8, scale and zero point per tensor",
            "calibration": self.calibration,
            "probe": self.probe,
            "snr_db": _finite(self.snr_db),
            "worst_slice_snr_db": _finite(self.worst_slice_snr_db),
            "min_snr_db": self.min_snr_db,
            "min_slice_snr_db": self.min_slice_snr_db,
            "arithmetic": round(self.arithmetic, 4),
            "quantized": list(self.quantized),
            "layers": [asdict(layer) for layer in self.layers],
        }

    def explain(self) -> str:
        """Say which layers cost what, the dearest first, for an error message."""
        tried = [layer for layer in self.layers if layer.snr_db is not None]
        tried.sort(key=lambda layer: layer.snr_db or 0.0)
        lines = [
            f"  {layer.name}: {layer.snr_db:.1f} dB alone, {layer.arithmetic:.1%} of the arithmetic"
            f"{', on int8' if layer.quantized else ''}"
            for layer in tried
        ]
        return "what each layer costs on int8:\n" + "\n".join(lines)


class Survey:
    """Every candidate layer on int8 and what each costs alone; picks a set for given floors."""

    def __init__(
        self,
        step: StepDecoder,
        decoder: EagerDecoder,
        calibration: Tensor | None = None,
        probe_frames: int = PROBE_FRAMES,
    ) -> None:
        """Equalise ``step`` in place and measure; see :func:`quantize_step`."""
        self._step = step
        codes, self.calibration = _calibration_codes(decoder, calibration)
        self._probe = _Probe(decoder, probe_frames)
        self._joint_probe = _Probe(decoder, JOINT_PROBES * probe_frames)
        with torch.no_grad():
            equalize(step, *_levels(step, codes[:LEVEL_FRAMES]))
            self._work = _work_per_frame(step)
            self._gains = {name: _gain(*entry) for name, entry in self._work.items()}
            self._candidates = [
                name
                for name, layer in convolutions(step).items()
                if self._gains[name] > 0 and layer.weight.shape[1] > 1
            ]
            self._int8 = quantize_layers(step, codes, self._candidates)
            self.alone = {name: self._measure([name], self._probe) for name in self._candidates}

    @property
    def order(self) -> list[str]:
        """The candidates, those with the most time saved per noise first."""
        return sorted(self._candidates, key=lambda name: self._noise(name) / self._gains[name])

    def measure(self, names: Sequence[str]) -> tuple[float, float]:
        """Return dB overall and in the worst 80 ms with the layers ``names`` on int8."""
        with torch.no_grad():
            return self._measure(names, self._joint_probe)

    def choose(self, min_snr_db: float, min_slice_snr_db: float) -> list[str]:
        """Return the layers that fit between the floors; maybe none."""
        floor = min_snr_db + MARGIN_DB
        left = 10 ** (-floor / 10)
        chosen = []
        for name in self.order:  # a later, smaller one may fit where an earlier one did not
            if self._noise(name) <= left:
                chosen.append(name)
                left -= self._noise(name)
        while chosen:
            overall, worst = self.measure(chosen)
            if overall >= floor and worst >= min_slice_snr_db + MARGIN_DB:
                break
            chosen.pop()
        return chosen

    def applied(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Put the layers ``names`` on int8 while the context lasts."""
        return replaced(self._step, {name: self._int8[name] for name in names})

    def apply(self, names: Sequence[str]) -> None:
        """Put the layers ``names`` on int8 for good."""
        for name in names:
            put(self._step, name, self._int8[name])

    def report(
        self, names: Sequence[str], min_snr_db: float, min_slice_snr_db: float
    ) -> Quantization:
        """Describe the decoder with the layers ``names`` on int8."""
        total = sum(macs for macs, _ in self._work.values())
        saved = sum(max(0.0, gain) for gain in self._gains.values())
        layers = []
        for name, (macs, _) in self._work.items():
            overall, worst = self.alone.get(name, (math.nan, math.nan))
            layer = LayerCost(
                name=name,
                arithmetic=round(macs / total, 4),
                saved=round(max(0.0, self._gains[name]) / saved, 4) if saved else 0.0,
                snr_db=_finite(overall),
                worst_slice_snr_db=_finite(worst),
                largest_weight=self._largest_weight(name),
                quantized=name in names,
                reason=self._why(name, names, min_snr_db),
            )
            layers.append(layer)
        overall, worst = self.measure(names)
        return Quantization(
            tuple(layers),
            overall,
            worst,
            min_snr_db,
            min_slice_snr_db,
            self.calibration,
            f"{JOINT_PROBES * self._probe.frames} frames of random codes, seed {PROBE_SEED}",
        )

    def _measure(self, names: Sequence[str], probe: _Probe) -> tuple[float, float]:
        with self.applied(names):
            return probe.measure(self._step)

    def _noise(self, name: str) -> float:
        return float(10 ** (-self.alone[name][0] / 10))

    def _largest_weight(self, name: str) -> int | None:
        return int(self._int8[name].weight.abs().max()) if name in self._int8 else None

    def _why(self, name: str, chosen: Sequence[str], min_snr_db: float) -> str:
        if name in chosen:
            return "most time saved per noise"
        if name in self._candidates:
            return f"its noise does not fit under {min_snr_db:.1f} dB beside the chosen layers"
        return "to quantise its input and dequantise its output takes longer than int8 saves"


def quantize_step(
    step: StepDecoder,
    decoder: EagerDecoder,
    *,
    calibration: Tensor | None = None,
    min_snr_db: float = MIN_SNR_DB,
    min_slice_snr_db: float = MIN_SLICE_SNR_DB,
    probe_frames: int = PROBE_FRAMES,
) -> Quantization:
    """Put as many convolutions of ``step`` on int8 as the floors allow, in place.

    Args:
        step: The float step module of ``decoder``.
        decoder: The eager decoder, the reference.
        calibration: Codes, int64 ``[frames, codebooks]``, on which the grids are chosen; seeded
            random ones if None.
        min_snr_db: Floor of the whole signal against the eager decoder.
        min_slice_snr_db: Floor of the worst 80 ms.
        probe_frames: How many held-out frames are decoded per measurement of one layer.

    Raises:
        ParityError: Not one layer fits between the floors; the text says what each costs.
        ValueError: The calibration codes are not of this decoder, or too few.
    """
    survey = Survey(step, decoder, calibration, probe_frames)
    names = survey.choose(min_snr_db, min_slice_snr_db)
    quantization = survey.report(names, min_snr_db, min_slice_snr_db)
    if not names:
        raise ParityError(
            f"no layer fits on int8 with at least {min_snr_db:.1f} dB overall and "
            f"{min_slice_snr_db:.1f} dB in the worst 80 ms; {quantization.explain()}"
        )
    survey.apply(names)
    return quantization


class _Probe:
    """Held-out codes and what the eager decoder makes of them."""

    def __init__(self, decoder: EagerDecoder, frames: int) -> None:
        self.frames = frames
        self._codes = random_codes(frames, decoder.config, PROBE_SEED)
        with torch.no_grad():
            self._reference = decoder(self._codes.T[None])[0].numpy()
        self._slice = decoder.config.samples_per_frame

    def measure(self, step: StepDecoder) -> tuple[float, float]:
        """Return the ratio in dB overall and in the worst 80 ms."""
        sizes = [24] * (self.frames // 24) + [self.frames % 24] * (self.frames % 24 > 0)
        output = decode_in_chunks(step, self._codes, sizes).numpy()
        slices = slice_snr_db(self._reference, output, self._slice)
        return snr_db(self._reference, output), float(slices.min())


def _calibration_codes(decoder: EagerDecoder, given: Tensor | None) -> tuple[Tensor, str]:
    config = decoder.config
    if given is None:
        codes = random_codes(CALIBRATION_FRAMES, config, CALIBRATION_SEED)
        return codes, f"{len(codes)} frames of random codes, seed {CALIBRATION_SEED}"
    if given.dim() != 2 or given.shape[1] != config.num_quantizers or given.is_floating_point():
        raise ValueError(
            f"calibration codes are integers [frames, {config.num_quantizers}], "
            f"not {given.dtype} {list(given.shape)}"
        )
    if len(given) < 4:
        raise ValueError(f"calibration needs at least 4 frames, not {len(given)}")
    if int(given.min()) < 0 or int(given.max()) >= config.codebook_size:
        raise ValueError(
            f"calibration codes lie between 0 and {config.codebook_size - 1}, "
            f"not {int(given.min())} and {int(given.max())}"
        )
    return given.to(torch.int64), f"{len(given)} frames of given codes"


def _levels(step: StepDecoder, codes: Tensor) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the root mean square per channel in front of and behind each convolution."""
    before, after = {}, {}
    names = [name for name in convolutions(step) if name.startswith(("head", "blocks."))]
    for name, x, y in observe(step, codes, names):
        before[name], after[name] = x.square().mean(1).sqrt(), y.square().mean(1).sqrt()
    return before, after


def _work_per_frame(step: StepDecoder) -> dict[str, tuple[float, float]]:
    """Return multiply-adds and elements in and out, per codec frame, of each convolution."""
    frames = 2
    layers = convolutions(step)
    work = {}
    for name, x, y in observe(step, random_codes(frames, step.config), list(layers)):
        columns = y.shape[1] / frames  # of the convolution itself: before a stride is unfolded
        work[name] = (layers[name].weight.numel() * columns, (len(x) + len(y)) * columns)
    return {name: work[name] for name in layers}


def _gain(macs: float, elements: float) -> float:
    """Return what int8 saves in a layer, in float multiply-adds per frame."""
    return macs * (1 - INT8_COST) - elements * ELEMENT_COST


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
