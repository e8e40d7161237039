"""Seeded random decoders: real architecture, no training, for tests and benchmarks.

A default-initialised decoder is useless for that: its codebooks are all zero, so it outputs
exact silence and agrees with anything. Here every tensor is non-zero and scaled so that the
signal neither dies out nor saturates on its way through the layers.
"""

from __future__ import annotations

import math

import torch

from codecstream_export.config import DecoderConfig
from codecstream_export.eager import CausalConv1d, EagerDecoder

__all__ = ["TINY", "random_codes", "random_decoder"]

RESIDUAL_GAIN = 0.3  # keeps the twelve residual units from doubling the power each
OUTPUT_RMS = 0.1

TINY = DecoderConfig(
    codebook_dim=16,
    latent_dim=32,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=8,
    decoder_dim=64,
)
"""The real architecture, all eight layers and every rate, at widths that a test can afford."""


def random_decoder(config: DecoderConfig, seed: int = 0) -> EagerDecoder:
    """Return a decoder with seeded weights, the same on every machine for one torch version."""
    generator = torch.Generator().manual_seed(seed)
    decoder = EagerDecoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("alpha", "beta"):  # logarithms
                parameter.copy_(0.3 * noise)
            elif leaf == "cluster_usage":
                parameter.copy_(0.5 + noise.abs())
            elif leaf == "embedding_sum":
                parameter.copy_(noise / math.sqrt(config.num_quantizers))
            elif leaf in ("scale", "gamma"):  # far above the published start values, to count
                parameter.copy_(0.3 + 0.05 * noise)
            elif leaf == "bias":
                parameter.copy_(0.05 * noise)
            elif parameter.dim() == 1:  # norm weights
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                gain = RESIDUAL_GAIN if name.endswith("conv2.conv.weight") else 1.0
                parameter.copy_(gain * noise / math.sqrt(_fan_in(name, parameter)))
        _level_output(decoder, seed)
    return decoder.eval().requires_grad_(False)


def _level_output(decoder: EagerDecoder, seed: int) -> None:
    """Scale the last convolution so that the output has a speech-like level, without clipping."""
    levels: list[float] = []
    last = decoder.decoder[-1]
    assert isinstance(last, CausalConv1d)
    handle = last.register_forward_hook(lambda _m, _x, y: levels.append(float(y.std())))
    decoder(random_codes(16, decoder.config, seed).T[None])
    handle.remove()
    for parameter in last.parameters():
        parameter.mul_(OUTPUT_RMS / levels[0])


def random_codes(frames: int, config: DecoderConfig | None = None, seed: int = 0) -> torch.Tensor:
    """Return seeded codes, int64 ``[frames, codebooks]``."""
    config = config or DecoderConfig()
    generator = torch.Generator().manual_seed(seed)
    shape = (frames, config.num_quantizers)
    return torch.randint(0, config.codebook_size, shape, generator=generator)


def _fan_in(name: str, weight: torch.Tensor) -> int:
    if weight.dim() == 3 and weight.shape[-1] > 1 and _is_transposed(name):
        return weight.shape[0] * 2 if name.startswith("decoder.") else weight.shape[0]
    return math.prod(weight.shape[1:])


def _is_transposed(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "upsample":  # upsample.<i>.0.conv.weight
        return parts[2] == "0"
    return len(parts) > 3 and parts[2] == "block" and parts[3] == "1"
