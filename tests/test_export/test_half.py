"""Weights in 16 bits: half the size, and close enough to the float32 ones."""

from __future__ import annotations

import pytest
from support import make_codes, worst_slice_db

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from codecstream_export import EagerDecoder, StepDecoder  # noqa: E402
from codecstream_export.half import store_half, take_stored  # noqa: E402
from codecstream_export.reference import eager_pcm  # noqa: E402
from codecstream_export.step import decode_in_chunks  # noqa: E402
from codecstream_parity import snr_db  # noqa: E402


def linear(weight: torch.Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def relative_error_db(module: nn.Linear, weight: torch.Tensor) -> float:
    return float(10 * torch.log10(weight.square().sum() / (module.weight - weight).square().sum()))


def test_even_weights_are_integers_with_a_scale_per_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    gains = torch.logspace(-3, 3, 64)[:, None]  # a scale for all of them would lose the small
    weight = torch.randn(64, 64, generator=generator) * gains
    module = linear(weight)
    store_half(module)
    original = module.parametrizations.weight.original
    assert original.dtype == torch.int16
    for row in (0, 63):
        one = linear(weight[row : row + 1])
        one.weight.data = module.weight[row : row + 1].data
        assert relative_error_db(one, weight[row : row + 1]) > 85.0


def test_weights_with_far_outliers_are_float16() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)
    weight[:, 0] = 3e4
    weight[:, 1:] *= 1e-2
    module = linear(weight)
    store_half(module)
    assert module.parametrizations.weight.original.dtype == torch.float16


def test_weights_beyond_float16_are_kept() -> None:
    weight = torch.full((64, 64), 1e9)
    module = linear(weight)
    store_half(module)
    assert torch.allclose(module.weight, weight, rtol=1e-4)


def test_small_tensors_stay_float32(tiny_decoder: EagerDecoder) -> None:
    step = StepDecoder(tiny_decoder)
    store_half(step)
    stored = take_stored(step)
    assert all(item["stored"].element_size() == 2 for item in stored.values())
    assert all(item["stored"].numel() >= 1024 for item in stored.values())
    names = {name for name, _ in step.named_parameters()}
    assert names == {name for name, _ in StepDecoder(tiny_decoder).named_parameters()}


def test_audio_is_60_db_close(tiny_decoder: EagerDecoder) -> None:
    step = StepDecoder(tiny_decoder)
    store_half(step)
    codes = make_codes(100)
    with torch.inference_mode():
        output = decode_in_chunks(step, torch.from_numpy(codes), [25] * 4).numpy()
    reference = eager_pcm(tiny_decoder, codes)
    assert snr_db(reference, output) >= 60.0
    assert worst_slice_db(reference, output) >= 45.0
    take_stored(step)  # the widened weights stay
    with torch.inference_mode():
        again = decode_in_chunks(step, torch.from_numpy(codes), [25] * 4).numpy()
    assert (again == output).all()
