"""The decoder as a step: ``(codes, *state) -> (pcm, *state)``, exact for every chunk size.

What makes chunked decoding equal to decoding everything at once:

- Every convolution keeps the last ``(kernel - 1) * dilation`` columns of its own *input*, after
  the activation in front of it. Zeros there are exactly the eager decoder's causal padding. The
  last one keeps what its taps made of those columns instead, which is less.
- A transposed convolution with kernel ``2 s`` and stride ``s`` is a two-tap convolution to ``s``
  times as many channels and a reshape; it keeps one input column. Nothing is computed to be cut.
- Attention keeps the keys, *before* rotary embedding, and values of the last ``window - 1``
  frames. Rotary embedding sees differences of positions only, so each step rotates its own window
  with positions from 0: no position ever grows, and hour two is as exact as second two.
- ``frames_valid`` marks which kept frames are real. "No history" is not "a history of zeros".

Weights that the eager decoder derives from others on every call (codebook averages, Snake's
exponentials, norm weights, layer scales) are folded into the neighbouring matrices once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codecstream_export import eager
from codecstream_export.config import DecoderConfig
from codecstream_export.step_layers import (
    Cursor,
    StateCursor,
    StateTensor,
    StepConv1d,
    StepConvTranspose1d,
    StepInnerSnake,
    StepLatentUpsample,
    StepSnake,
    StepTail,
    constant,
    the,
)

__all__ = ["StepDecoder", "decode_in_chunks"]

MEMORY_TILES = (1, 1, 2, 2)
"""By block, for :attr:`StepDecoder.tiles`: a chunk of 25 frames is 12 to 18 MB per tensor in the
last two blocks. Measured against others in benchmarks/log.md: they save memory, and no time."""
MASKED = -1e9  # finite: exp() of it is 0 in float32, and no Inf - Inf can make a NaN


class StepQuantizer(nn.Module):
    """All codebooks as one table; the semantic one is projected apart from the acoustic ones."""

    def __init__(self, source: eager.SplitQuantizer, config: DecoderConfig) -> None:
        super().__init__()
        levels = [*source.rvq_first.vq.layers, *source.rvq_rest.vq.layers]
        tables = [the(eager.VectorQuantizer, level)._codebook.table() for level in levels]
        self.table = constant(torch.cat(tables))
        offsets = torch.arange(config.num_quantizers) * config.codebook_size
        self.offsets: Tensor
        self.register_buffer("offsets", offsets[None, :, None])
        projections = (source.rvq_first.output_proj, source.rvq_rest.output_proj)
        # Both projections side by side: one matrix product over [semantic, sum of acoustic].
        self.weight = constant(torch.cat([p.weight.squeeze(-1) for p in projections], dim=1))

    def forward(self, codes: Tensor) -> Tensor:
        entries = F.embedding(codes + self.offsets, self.table)  # [1, codebooks, n, dim]
        pair = torch.cat((entries[:, 0], entries[:, 1:].sum(dim=1)), dim=-1)
        return F.linear(pair, self.weight).transpose(1, 2)


class StepRmsNorm(nn.Module):
    """RMSNorm without its weight, which is folded into the projections that follow."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        # The mean as a product with a constant: accelerators take products, not every reduction.
        self.mean = constant(torch.full((1, width), 1.0 / width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(F.linear(x * x, self.mean) + self.eps)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding at the positions of one step's own window."""

    cos: Tensor  # [kept + n, head_dim]
    sin: Tensor
    newest_cos: Tensor  # [n, head_dim]
    newest_sin: Tensor
    swap: Tensor  # [head_dim, head_dim]: (first, second) half -> (-second, first)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate keys ``[heads, kept + n, head_dim]``."""
        return x * self.cos + F.linear(x, self.swap) * self.sin

    def rotate_newest(self, x: Tensor) -> Tensor:
        """Rotate queries ``[heads, n, head_dim]``."""
        return x * self.newest_cos + F.linear(x, self.swap) * self.newest_sin


class StepRotary(nn.Module):
    """Makes the :class:`Rotary` of a step.

    The halves are swapped by a product with a constant, which costs little and keeps slices and
    joins out of the accelerators' way.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.frequencies = constant((1.0 / theta**exponents).repeat(2)[None, :])
        half = head_dim // 2
        eye = torch.eye(half)
        swap = torch.zeros(head_dim, head_dim)
        swap[:half, half:], swap[half:, :half] = -eye, eye
        self.swap = constant(swap)

    def forward(self, positions: Tensor, kept: int) -> Rotary:
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotary(cos, sin, cos[kept:], sin[kept:], self.swap)


class StepAttention(nn.Module):
    """Attention over the kept frames and the new ones; norm weight and scales folded in."""

    def __init__(self, source: eager.TransformerLayer, config: DecoderConfig, name: str) -> None:
        super().__init__()
        attention = source.self_attn
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.head_dim = attention.head_dim
        self.kv_head_of = [i * self.kv_heads // self.heads for i in range(self.heads)]
        norm = source.input_layernorm.weight
        self.query = constant(attention.q_proj.weight * self.head_dim**-0.5 * norm)
        self.key = constant(attention.k_proj.weight * norm)
        self.value = constant(attention.v_proj.weight * norm)
        scale = source.self_attn_layer_scale.scale[:, None]
        self.out = constant(attention.o_proj.weight * scale)
        self.norm = StepRmsNorm(norm.shape[0], source.input_layernorm.eps)
        kept = config.sliding_window - 1
        shape = (self.kv_heads, kept, self.head_dim)
        self.state = (StateTensor(f"{name}.keys", shape), StateTensor(f"{name}.values", shape))

    def forward(self, x: Tensor, cursor: Cursor, rotary: Rotary, bias: Tensor) -> Tensor:
        n = x.shape[1]
        normal = self.norm(x)
        q, k, v = (
            F.linear(normal, weight).view(n, -1, self.head_dim).transpose(0, 1)
            for weight in (self.query, self.key, self.value)
        )
        keys, values = self.state
        k, v = cursor.recall(keys, k), cursor.recall(values, v)
        q, k = rotary.rotate_newest(q), rotary.rotate(k)
        if self.kv_heads != self.heads:
            k, v = self._share(k), self._share(v)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) + bias, dim=-1)
        mixed = torch.bmm(weights, v).transpose(0, 1)
        return x + F.linear(mixed.reshape(1, n, self.heads * self.head_dim), self.out)

    def _share(self, x: Tensor) -> Tensor:
        """Give each group of query heads its key or value head: ``[heads, m, head_dim]``."""
        return torch.cat([x[i : i + 1] for i in self.kv_head_of], dim=0)


class StepMlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, source: eager.TransformerLayer) -> None:
        super().__init__()
        mlp, norm = source.mlp, source.post_attention_layernorm
        self.gate = constant(mlp.gate_proj.weight * norm.weight)
        self.up = constant(mlp.up_proj.weight * norm.weight)
        self.down = constant(mlp.down_proj.weight * source.mlp_layer_scale.scale[:, None])
        self.norm = StepRmsNorm(norm.weight.shape[0], norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        gated = F.silu(F.linear(normal, self.gate)) * F.linear(normal, self.up)
        return x + F.linear(gated, self.down)


class StepTransformer(nn.Module):
    """The sliding-window transformer over ``[1, n, latent]``."""

    def __init__(self, source: eager.Transformer, config: DecoderConfig) -> None:
        super().__init__()
        self.window = config.sliding_window
        self.rotary = StepRotary(config.head_dim, config.rope_theta)
        self.input_weight = constant(source.input_proj.weight)
        self.input_bias = constant(source.input_proj.bias)
        self.attentions = nn.ModuleList(
            StepAttention(the(eager.TransformerLayer, layer), config, f"transformer.{i}")
            for i, layer in enumerate(source.layers)
        )
        self.mlps = nn.ModuleList(
            StepMlp(the(eager.TransformerLayer, layer)) for layer in source.layers
        )
        self.output_weight = constant(source.output_proj.weight * source.norm.weight)
        self.output_bias = constant(source.output_proj.bias)
        self.norm = StepRmsNorm(source.norm.weight.shape[0], source.norm.eps)
        self.state = (StateTensor("frames_valid", (1, self.window - 1)),)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        (frames_valid,) = self.state
        # Everything is made from the inputs, so that the program names no device.
        valid = cursor.recall(frames_valid, torch.ones_like(x[:, :, 0]))
        kept = valid.shape[1] - x.shape[1]
        keys = torch.cumsum(torch.ones_like(valid[0]), 0)  # positions in this step's own window
        distance = keys[kept:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < self.window) & (valid > 0.5)
        bias = torch.where(visible, 0.0, MASKED)
        rotary = self.rotary(keys, kept)
        x = F.linear(x, self.input_weight, self.input_bias)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x, cursor, rotary, bias))
        return F.linear(self.norm(x), self.output_weight, self.output_bias)


class StepConvNeXt(nn.Module):
    """Depthwise convolution with history, then the per-position part with gamma folded in.

    Over ``[1, n, channels]``.
    """

    def __init__(self, source: eager.ConvNeXtBlock, name: str) -> None:
        super().__init__()
        self.depthwise = StepConv1d(source.dwconv, f"{name}.depthwise")
        self.channels = source.gamma.shape[0]
        self.eps = source.norm.eps
        # LayerNorm's affine part goes into the first projection, gamma into the second.
        expand = source.pwconv1
        self.expand_weight = constant(expand.weight * source.norm.weight)
        self.expand_bias = constant(expand.bias + expand.weight @ source.norm.bias)
        self.reduce_weight = constant(source.pwconv2.weight * source.gamma[:, None])
        self.reduce_bias = constant(source.pwconv2.bias * source.gamma)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        y = self.depthwise(x.transpose(1, 2), cursor).transpose(1, 2)
        y = F.layer_norm(y, (self.channels,), eps=self.eps)
        y = F.gelu(F.linear(y, self.expand_weight, self.expand_bias))
        return x + F.linear(y, self.reduce_weight, self.reduce_bias)


class StepResidualUnit(nn.Module):
    def __init__(self, source: eager.ResidualUnit, name: str) -> None:
        super().__init__()
        self.conv1 = StepConv1d(source.conv1, f"{name}.conv1")
        self.conv2 = StepConv1d(source.conv2, f"{name}.conv2")
        self.act1 = StepSnake(source.act1)
        self.act2 = StepInnerSnake.between(self.conv1, source.act2, self.conv2)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        y = self.conv1(self.act1(x), cursor)
        y = self.conv2(self.act2(y), cursor)
        return x + y  # type: ignore[no-any-return]


class StepUpsampleBlock(nn.Module):
    def __init__(self, source: eager.UpsampleBlock, name: str) -> None:
        super().__init__()
        snake, transposed, *units = source.block
        self.act = StepSnake(the(eager.SnakeBeta, snake))
        self.upsample = StepConvTranspose1d(
            the(eager.CausalConvTranspose1d, transposed), f"{name}.upsample"
        )
        self.units = nn.ModuleList(
            StepResidualUnit(the(eager.ResidualUnit, unit), f"{name}.unit{i}")
            for i, unit in enumerate(units)
        )

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        x = self.upsample(self.act(x), cursor)
        for unit in self.units:
            x = unit(x, cursor)
        return x


class StepDecoder(nn.Module):
    """One step of the decoder.

    ``forward(codes, *state)``: codes int64 ``[1, codebooks, n]`` for any ``n >= 1`` and the state
    tensors of :attr:`state`, in order; returns pcm float32 ``[n * 1920]`` in [-1, 1] and the next
    state in the same order.

    Attributes:
        state: The tensors of a stream's state.
        tiles: By block of the synthesis, into how many pieces in time its input is cut; each goes
            through that block and all behind it, which cut it further, before the next one. Values
            stay the same, and large chunks need less working memory. None: one.
    """

    def __init__(self, source: eager.EagerDecoder) -> None:
        super().__init__()
        config = source.config
        self.config = config
        with torch.no_grad():
            self.quantizer = StepQuantizer(source.quantizer, config)
            self.pre_conv = StepConv1d(source.pre_conv, "pre_conv")
            self.transformer = StepTransformer(source.pre_transformer, config)
            self.upsamples = nn.ModuleList()
            self.mixers = nn.ModuleList()
            for i, stage in enumerate(source.upsample):
                transposed, block = the(eager.LatentUpsample, stage)
                transposed = the(eager.CausalConvTranspose1d, transposed)
                self.upsamples.append(StepLatentUpsample(transposed))
                block = the(eager.ConvNeXtBlock, block)
                self.mixers.append(StepConvNeXt(block, f"upsample.{i}"))
            head, *blocks, snake, tail = source.decoder
            self.head = StepConv1d(the(eager.CausalConv1d, head), "decoder.head")
            self.blocks = nn.ModuleList(
                StepUpsampleBlock(the(eager.UpsampleBlock, block), f"decoder.{i}")
                for i, block in enumerate(blocks)
            )
            self.snake = StepSnake(the(eager.SnakeBeta, snake))
            self.tail = StepTail(the(eager.CausalConv1d, tail), "decoder.tail")
        self.tiles: tuple[int, ...] | None = None
        parts = list(self.modules())[1:]
        self.state: tuple[StateTensor, ...] = tuple(
            item for part in parts for item in getattr(part, "state", ())
        )
        self.eval().requires_grad_(False)

    def initial_state(self) -> list[Tensor]:
        """Return the state of a new stream."""
        return [torch.zeros(item.shape) for item in self.state]

    def forward(self, codes: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Decode one chunk; see the class."""
        names = [item.name for item in self.state]
        cursor = StateCursor(dict(zip(names, state, strict=True)))
        pcm = self.synthesise(self.encode(codes, cursor), cursor, self.tiles)
        return (pcm, *(cursor.new[name] for name in names))

    def encode(self, codes: Tensor, cursor: Cursor) -> Tensor:
        """Return the transformer's output, ``[1, n, latent]``."""
        x = self.pre_conv(self.quantizer(codes), cursor)
        return self.transformer(x.transpose(1, 2), cursor)  # type: ignore[no-any-return]

    def synthesise(
        self, latent: Tensor, cursor: Cursor, tiles: Sequence[int] | None = None
    ) -> Tensor:
        """Turn the transformer's output into pcm ``[n * 1920]``: convolutions only."""
        for upsample, mixer in zip(self.upsamples, self.mixers, strict=True):
            latent = mixer(upsample(latent), cursor)
        x = self.head(latent.transpose(1, 2), cursor)
        pieces = self._blocks(x, cursor, tiles or (1,) * len(self.blocks))
        pcm = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return pcm.clamp(-1.0, 1.0)

    def _blocks(self, x: Tensor, cursor: Cursor, tiles: Sequence[int]) -> list[Tensor]:
        """Return the samples of what the last ``len(tiles)`` blocks make of ``x``, in pieces."""
        if not tiles:
            return [self.tail(self.snake(x), cursor)]
        block = self.blocks[len(self.blocks) - len(tiles)]
        pieces: list[Tensor] = []
        for tile in _cut(x, tiles[0]):
            pieces += self._blocks(block(tile, cursor), cursor, tiles[1:])
        return pieces


def _cut(x: Tensor, count: int) -> list[Tensor]:
    """Cut ``[.., n]`` into ``count`` pieces, of which the last takes what does not divide."""
    width = x.shape[-1] // count
    starts = range(count - 1)
    return [x[..., i * width : (i + 1) * width] for i in starts] + [x[..., (count - 1) * width :]]


def decode_in_chunks(
    step: StepDecoder, codes: Tensor, sizes: Sequence[int], state: Sequence[Tensor] | None = None
) -> Tensor:
    """Decode int64 ``[frames, codebooks]`` in chunks of ``sizes``; return pcm ``[samples]``."""
    current = list(state) if state is not None else step.initial_state()
    parts = []
    start = 0
    for size in sizes:
        pcm, *current = step(codes[start : start + size].T[None], *current)
        parts.append(pcm)
        start += size
    if start != len(codes):
        raise ValueError(f"chunk sizes add up to {start} frames, not {len(codes)}")
    return torch.cat(parts) if parts else torch.zeros(0)
