"""The Qwen3-TTS 12 Hz decoder as plain float32 PyTorch: all frames in, all samples out.

This is the reference that every program is measured against, so it is written for
reading: one pass, no state, no chunking. Module names follow the published checkpoint, which
makes the strict load of :mod:`codecstream_export.checkpoint` a plain comparison of names.

Everything in it is causal: sample ``t`` depends on frames up to ``t // 1920`` only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codecstream_export.config import DecoderConfig

__all__ = ["EagerDecoder", "rotary_tables", "rotate"]

LAYER_NORM_EPS = 1e-6  # of the ConvNeXt blocks; the transformer's RMSNorm has its own, 1e-5
CLUSTER_USAGE_MIN = 1e-5  # of the codebooks' running averages
SNAKE_EPS = 1e-9


class CausalConv1d(nn.Module):
    """A convolution that sees only the past: zeros in front, nothing behind."""

    def __init__(
        self, cin: int, cout: int, kernel: int, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, kernel, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.pad(x, (self.history, 0)))
        return y


class CausalConvTranspose1d(nn.Module):
    """A transposed convolution whose tail, which belongs to the next input, is cut off."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(cin, cout, kernel, stride=stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y[..., : x.shape[-1] * self.stride]


class SnakeBeta(nn.Module):
    """``x + sin(a x)**2 / b`` per channel, with ``a`` and ``b`` stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha.exp()[None, :, None]
        beta = self.beta.exp()[None, :, None]
        return x + (1.0 / (beta + SNAKE_EPS)) * torch.sin(x * alpha).square()


class Codebook(nn.Module):
    """A codebook kept as the running sums of its training; entry = sum / usage."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, dim))

    def table(self) -> Tensor:
        """Return the entries, float32 ``[size, dim]``."""
        return self.embedding_sum / self.cluster_usage.clamp(min=CLUSTER_USAGE_MIN)[:, None]


class VectorQuantizer(nn.Module):
    """One level: a codebook (the nesting is the checkpoint's)."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, dim)

    def forward(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self._codebook.table())


class Levels(nn.Module):
    """A list of levels whose entries are added up."""

    def __init__(self, levels: int, size: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VectorQuantizer(size, dim) for _ in range(levels))


class ResidualQuantizer(nn.Module):
    """Levels of codebooks, summed and projected.

    ``input_proj`` belongs to the encoder; it is here because the checkpoint stores it.
    """

    def __init__(self, levels: int, size: int, dim: int, out_dim: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(out_dim, dim, 1, bias=False)
        self.output_proj = nn.Conv1d(dim, out_dim, 1, bias=False)
        self.vq = Levels(levels, size, dim)

    def forward(self, codes: Tensor) -> Tensor:
        total = sum(layer(codes[:, i]) for i, layer in enumerate(self.vq.layers))
        assert isinstance(total, Tensor)
        y: Tensor = self.output_proj(total.transpose(1, 2))
        return y


class SplitQuantizer(nn.Module):
    """The semantic codebook and the acoustic ones, each with a projection of its own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, dim = config.codebook_size, config.codebook_dim // 2
        self.rvq_first = ResidualQuantizer(1, size, dim, config.codebook_dim)
        self.rvq_rest = ResidualQuantizer(config.num_quantizers - 1, size, dim, config.codebook_dim)

    def forward(self, codes: Tensor) -> Tensor:
        y: Tensor = self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])
        return y


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class LayerScale(nn.Module):
    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 ``[positions, head_dim]``, of the rotary embedding.

    The angles are computed in ``dtype``. The published decoder has float32, whose rounding grows
    with the position.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    angles = positions[:, None].to(dtype) * (1.0 / theta**exponents)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x``, ``[..., positions, head_dim]``, by the tables of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """``[1, n, heads * head_dim]`` -> ``[1, heads, n, head_dim]``."""
        return x.view(x.shape[0], -1, heads, self.head_dim).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Plain softmax attention; ``bias`` is 0 where a query may look, else very low."""
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5 + bias
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2)
        y: Tensor = self.o_proj(mixed.reshape(q.shape[0], -1, self.heads * self.head_dim))
        return y

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        q = rotate(self.split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(self.split(self.k_proj(x), self.kv_heads), cos, sin)
        v = self.split(self.v_proj(x), self.kv_heads)
        return self.attend(q, k, v, bias)


class GatedMlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class TransformerLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn_layer_scale = LayerScale(
            config.hidden_size, config.layer_scale_initial_scale
        )
        self.mlp_layer_scale = LayerScale(config.hidden_size, config.layer_scale_initial_scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), cos, sin, bias))
        x = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return x


class Transformer(nn.Module):
    """Frames attend to themselves and the ``sliding_window - 1`` frames before them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(
            TransformerLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, angle_dtype: torch.dtype = torch.float32) -> Tensor:
        positions = torch.arange(x.shape[1])
        cos, sin = rotary_tables(
            positions, self.config.head_dim, self.config.rope_theta, angle_dtype
        )
        distance = positions[:, None] - positions[None, :]
        visible = (distance >= 0) & (distance < self.config.sliding_window)
        bias = torch.zeros(distance.shape).masked_fill(~visible, -torch.inf)
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, cos, sin, bias)
        y: Tensor = self.output_proj(self.norm(x))
        return y


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(dim, dim, 7, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))

    def mix(self, x: Tensor) -> Tensor:
        """The part after the depthwise convolution: per position, no history."""
        y = self.pwconv2(F.gelu(self.pwconv1(self.norm(x.transpose(1, 2)))))
        scaled: Tensor = self.gamma * y
        return scaled.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(self.dwconv(x))
        return x + y


class LatentUpsample(nn.ModuleList):
    """Twice the rate, same width (a list because the checkpoint names its parts 0 and 1)."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__([CausalConvTranspose1d(dim, dim, ratio, ratio), ConvNeXtBlock(dim)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


class ResidualUnit(nn.Module):
    def __init__(self, dim: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(dim)
        self.conv1 = CausalConv1d(dim, dim, 7, dilation=dilation)
        self.act2 = SnakeBeta(dim)
        self.conv2 = CausalConv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.act2(self.conv1(self.act1(x))))
        return x + y


class UpsampleBlock(nn.Module):
    """Snake, transposed convolution, three residual units with dilations 1, 3, 9."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                SnakeBeta(cin),
                CausalConvTranspose1d(cin, cout, 2 * stride, stride),
                *(ResidualUnit(cout, dilation) for dilation in (1, 3, 9)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.block:
            x = part(x)
        return x


class EagerDecoder(nn.Module):
    """Code2Wav: int64 ``[batch, codebooks, frames]`` -> float32 ``[batch, frames * 1920]``.

    The output is clamped to [-1, 1], as the published decoder does.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = SplitQuantizer(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, config.latent_dim, 3)
        self.pre_transformer = Transformer(config)
        self.upsample = nn.ModuleList(
            LatentUpsample(config.latent_dim, ratio) for ratio in config.upsampling_ratios
        )
        widths = [config.decoder_dim >> i for i in range(len(config.upsample_rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv1d(config.latent_dim, widths[0], 7),
                *(
                    UpsampleBlock(cin, cout, stride)
                    for cin, cout, stride in zip(
                        widths, widths[1:], config.upsample_rates, strict=False
                    )
                ),
                SnakeBeta(widths[-1]),
                CausalConv1d(widths[-1], 1, 7),
            ]
        )

    def forward(self, codes: Tensor, angle_dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode int64 ``[batch, codebooks, frames]``; see :func:`rotary_tables`."""
        x: Tensor = self.pre_conv(self.quantizer(codes))
        x = self.pre_transformer(x.transpose(1, 2), angle_dtype).transpose(1, 2)
        for stage in (*self.upsample, *self.decoder):
            x = stage(x)
        return x.squeeze(1).clamp(-1.0, 1.0)
