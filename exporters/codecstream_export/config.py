"""The decoder's hyperparameters, as ``speech_tokenizer/config.json`` states them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from codecstream import CodecGeometry
from codecstream_export.errors import CheckpointError

__all__ = ["DecoderConfig"]

# One follows from others, the other only matters to training.
_OPTIONAL = frozenset({"head_dim", "layer_scale_initial_scale"})

FRAME_RATE_HZ = 12.5  # of this codec; the config does not say it

# A config may have been downloaded: layers are built, and the window sizes every stream's state,
# before any tensor could contradict them.
_LARGEST = {"num_hidden_layers": 256, "num_quantizers": 128, "sliding_window": 4096}
_LARGEST_OTHER = 1 << 20


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Hyperparameters of the Qwen3-TTS 12 Hz decoder; the defaults are the published ones.

    The names are those of the published ``decoder_config``, so that a reader can hold one
    against the other. ``head_dim`` is the one that a config may leave out: it is then
    ``hidden_size / num_attention_heads``.
    """

    codebook_dim: int = 512
    codebook_size: int = 2048
    latent_dim: int = 1024
    hidden_size: int = 512
    intermediate_size: int = 1024
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 64
    num_hidden_layers: int = 8
    num_quantizers: int = 16
    sliding_window: int = 72
    decoder_dim: int = 1536
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    layer_scale_initial_scale: float = 0.01

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):
            value = getattr(self, item.name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or any(isinstance(v, bool) or not 0 < v < math.inf for v in values):
                problems.append(f"{item.name} must be positive, not {value!r}")
            elif max(values) > _LARGEST.get(item.name, _LARGEST_OTHER):
                problems.append(f"{item.name} is absurdly large: {value!r}")
        if not problems:
            if self.num_attention_heads % self.num_key_value_heads:
                problems.append("num_attention_heads must be a multiple of num_key_value_heads")
            if self.head_dim % 2:
                problems.append(f"head_dim must be even for rotary embedding, not {self.head_dim}")
            if self.codebook_dim % 2:
                problems.append(f"codebook_dim must be even, not {self.codebook_dim}")
            if self.decoder_dim % 2 ** len(self.upsample_rates):
                problems.append(
                    f"decoder_dim must be divisible by {2 ** len(self.upsample_rates)}, "
                    f"not {self.decoder_dim}"
                )
            if self.num_quantizers < 2:
                problems.append("num_quantizers must be at least 2: one semantic, one acoustic")
            if self.sliding_window < 2:
                problems.append("sliding_window must be at least 2: a frame and one before it")
            if self.samples_per_frame * FRAME_RATE_HZ % 1:
                problems.append(f"{self.samples_per_frame} samples per frame give no whole rate")
        if problems:
            raise CheckpointError("unusable decoder config: " + "; ".join(problems))

    @property
    def samples_per_frame(self) -> int:
        """Audio samples that one codec frame becomes."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def geometry(self) -> CodecGeometry:
        """The geometry that the client sees."""
        return CodecGeometry(
            codebooks=self.num_quantizers,
            codebook_size=self.codebook_size,
            frame_rate_hz=FRAME_RATE_HZ,
            sample_rate_hz=round(self.samples_per_frame * FRAME_RATE_HZ),
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DecoderConfig:
        """Read the nested ``decoder_config`` of a tokenizer's ``config.json``.

        Raises:
            CheckpointError: It has no ``decoder_config``, a value has the wrong type, or it
                asks for something that this decoder does not do.
        """
        section = document.get("decoder_config")
        if not isinstance(section, Mapping):
            raise CheckpointError(
                "config.json has no 'decoder_config' section: not a Qwen3-TTS 12 Hz tokenizer"
            )
        unsupported = {
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "rope_scaling": (None,),
        }
        for key, allowed in unsupported.items():
            if section.get(key) not in allowed:
                raise CheckpointError(
                    f"decoder_config.{key} is {section[key]!r}, this decoder needs {allowed[0]!r}"
                )
        items = {item.name: item for item in fields(cls)}
        missing = sorted(items.keys() - section.keys() - _OPTIONAL)
        if missing:
            raise CheckpointError(f"decoder_config lacks {', '.join(missing)}")
        values: dict[str, Any] = {
            name: _coerce(name, section[name], item.default)
            for name, item in items.items()
            if name in section
        }
        if "head_dim" not in values:
            values["head_dim"] = values["hidden_size"] // max(1, values["num_attention_heads"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the document that :meth:`from_json` reads."""
        section = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            "model_type": "qwen3_tts_tokenizer_12hz",
            "decoder_config": {
                k: list(v) if isinstance(v, tuple) else v for k, v in section.items()
            },
        }


def _coerce(name: str, value: Any, example: Any) -> Any:
    """Return ``value`` in the type of the default ``example``, or say what is wrong with it."""
    if isinstance(example, tuple):
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
    elif isinstance(example, int):
        if type(value) is int:
            return value
    elif type(value) in (int, float):
        return float(value)
    raise CheckpointError(f"decoder_config.{name} has the wrong type: {value!r}")
