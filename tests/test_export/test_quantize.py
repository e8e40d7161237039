"""Int8: exact where it claims to be, chosen by measurement, and what ONNX Runtime makes of it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ir = pytest.importorskip("onnx_ir")

from codecstream_export import EagerDecoder, ParityError, StepDecoder  # noqa: E402
from codecstream_export.int8.equalize import equalize  # noqa: E402
from codecstream_export.int8.layers import (  # noqa: E402
    QuantizedConv1d,
    convolutions,
    observe,
    quantize_layers,
    replaced,
)
from codecstream_export.int8.rounding import (  # noqa: E402
    Grid,
    choose_grid,
    choose_weight_scales,
    round_weights,
    saturation,
    windows,
)
from codecstream_export.int8.sensitivity import Survey, quantize_step  # noqa: E402
from codecstream_export.random_weights import TINY, random_codes, random_decoder  # noqa: E402
from codecstream_export.step import decode_in_chunks  # noqa: E402
from codecstream_export.targets.onnx_int8 import use_unsigned_activations  # noqa: E402
from codecstream_parity import snr_db  # noqa: E402

FRAMES = 12
WIDE = "blocks.3.units.1.conv1"
LOW_FLOORS = {"min_snr_db": 15.0, "min_slice_snr_db": 5.0, "probe_frames": 3}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def codes(tiny_decoder: EagerDecoder) -> torch.Tensor:
    return random_codes(FRAMES, tiny_decoder.config, 5)


@pytest.fixture
def all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the tiny decoder's widths no layer is worth it: say that moving data is free."""
    monkeypatch.setattr("codecstream_export.int8.sensitivity.ELEMENT_COST", 0.0)
    monkeypatch.setattr("codecstream_export.int8.sensitivity.CALIBRATION_FRAMES", 8)


def levels(step: StepDecoder, codes: torch.Tensor) -> tuple[dict[str, object], dict[str, object]]:
    """Root mean square per channel in front of and behind the convolutions of the blocks."""
    names = [name for name in convolutions(step) if name.startswith(("head", "blocks."))]
    seen = list(observe(step, codes, names))
    before = {name: x.square().mean(1).sqrt() for name, x, _ in seen}
    return before, {name: y.square().mean(1).sqrt() for name, _, y in seen}


def test_equalising_changes_nothing(tiny_decoder: EagerDecoder, codes: torch.Tensor) -> None:
    step = StepDecoder(tiny_decoder)
    before = decode_in_chunks(step, codes, [5, 4, 3])
    weight = convolutions(step)[WIDE].weight.clone()
    equalize(step, *levels(step, codes))
    after = decode_in_chunks(step, codes, [5, 4, 3])
    assert snr_db(before.numpy(), after.numpy()) >= 110
    assert not torch.allclose(weight, convolutions(step)[WIDE].weight, rtol=0.01)


def test_equalising_makes_room_for_uneven_channels(
    tiny_decoder: EagerDecoder, codes: torch.Tensor
) -> None:
    """A decoder with channels of very different levels loses less by int8 once they are even."""
    decoder = copy.deepcopy(tiny_decoder)
    uneven = StepDecoder(decoder)
    unit = uneven.blocks[3].units[1]
    factors = torch.logspace(-1.5, 1.5, unit.conv1.weight.shape[0], base=4.0)
    unit.conv1.scale_rows(factors)
    unit.act2.scale(factors)
    unit.conv2.scale_columns(1 / factors)
    reference = decode_in_chunks(uneven, codes, [FRAMES]).numpy()

    def noise_db() -> float:
        with replaced(uneven, quantize_layers(uneven, codes, [WIDE])):
            return snr_db(reference, decode_in_chunks(uneven, codes, [FRAMES]).numpy())

    without = noise_db()
    equalize(uneven, *levels(uneven, codes))
    assert noise_db() >= without + 2


def test_the_grid_clips_rare_peaks() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    grid = choose_grid(values)
    assert 255 * grid.scale < 0.95 * float(values.max() - values.min())
    integers = torch.clamp(torch.round(values / grid.scale) + grid.zero_point, -128, 127)
    restored = (integers - grid.zero_point) * grid.scale
    assert snr_db(values.numpy(), restored.numpy()) >= 40.3  # 40.6 is the best of 256 even steps


def test_compensation_beats_plain_rounding_on_correlated_inputs() -> None:
    source = torch.Generator().manual_seed(0)
    mixing = torch.randn(24, 6, generator=source)
    x = mixing @ torch.randn(6, 3000, generator=source)
    x += 0.1 * torch.randn(24, 3000, generator=source)
    weight = torch.randn(8, 24, 3, generator=source)
    scales = choose_weight_scales(weight, 20)
    seen = windows(x, 3, 2, 2000)

    def error(integers: torch.Tensor) -> float:
        lost = weight - integers * scales[:, None, None]
        return float((lost.transpose(1, 2).flatten(1) @ seen).var())

    plain = error(round_weights(weight, scales, None, 20))
    assert error(round_weights(weight, scales, seen, 20)) < 0.5 * plain


def emulate_vpmaddubsw(unsigned: np.ndarray, signed: np.ndarray) -> np.ndarray:
    """The instruction, pair by pair: uint8 times int8, added with 16-bit saturation."""
    products = unsigned.astype(np.int32) * signed.astype(np.int32)
    pairs = products.reshape(*products.shape[:-1], -1, 2).sum(-1)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(-1)


def test_the_saturation_measure_is_the_instruction() -> None:
    source = np.random.default_rng(0)
    grid = Grid(0.05, -9)
    x = torch.from_numpy(source.normal(0, 3, (14, 300)).astype(np.float32))
    weight = torch.from_numpy(source.integers(-127, 128, (3, 7, 2)).astype(np.int8))
    unsigned = np.clip(np.round(x.numpy() / grid.scale) + grid.zero_point + 128, 0, 255)
    rows = weight.transpose(1, 2).flatten(1).numpy()
    exact = rows.astype(np.int64) @ unsigned.astype(np.int64)
    real = emulate_vpmaddubsw(unsigned.T[None].astype(np.uint8), rows[:, None, :])
    centred = rows.astype(np.float64) @ (unsigned - grid.zero_point - 128)
    expected = np.mean(((exact - real) ** 2).mean(1) / centred.var(1, ddof=1))
    assert expected > 0
    assert saturation(weight, x, grid) == pytest.approx(expected, rel=1e-3)


def test_weights_of_seven_bits_never_saturate() -> None:
    extremes = np.array([[a, b] for a in (0, 128, 255) for b in (0, 128, 255)], np.uint8)
    weights = np.array([[v, w] for v in range(-64, 65) for w in range(-64, 65)], np.int8)
    exact = weights.astype(np.int64) @ extremes.T.astype(np.int64)
    real = emulate_vpmaddubsw(extremes[None], weights[:, None, :])
    assert (exact == real).all()


def test_shipped_layers_hardly_saturate(tiny_decoder: EagerDecoder, codes: torch.Tensor) -> None:
    step = StepDecoder(tiny_decoder)
    (layer,) = quantize_layers(step, codes, [WIDE]).values()
    other = random_codes(FRAMES, tiny_decoder.config, 6)
    for _, x, _ in observe(step, other, [WIDE]):
        seen = windows(x, 7, layer.dilation, 500)
        assert saturation(layer.weight, seen, layer.before) < 1e-4


def test_an_int8_layer_streams_like_the_float_one(
    tiny_decoder: EagerDecoder, codes: torch.Tensor
) -> None:
    step = StepDecoder(tiny_decoder)
    reference = decode_in_chunks(step, codes, [FRAMES])
    names = [WIDE, "blocks.2.upsample", "head"]
    with replaced(step, quantize_layers(step, codes, names)):
        whole = decode_in_chunks(step, codes, [FRAMES])
        parts = decode_in_chunks(step, codes, [1, 2, 3, 1, 5])
    assert 10 < snr_db(reference.numpy(), whole.numpy()) < 80
    # Not bit for bit: float sums in another order may fall on the other side of a rounding edge.
    assert snr_db(whole.numpy(), parts.numpy()) >= 50
    assert isinstance(convolutions(step)[WIDE].weight, torch.nn.Parameter)  # all put back


@pytest.mark.usefixtures("all_candidates")
def test_layers_are_chosen_by_what_they_cost(tiny_decoder: EagerDecoder) -> None:
    step = StepDecoder(tiny_decoder)
    state = step.state
    quantization = quantize_step(step, tiny_decoder, **LOW_FLOORS)
    assert quantization.quantized
    assert quantization.snr_db >= 15
    assert quantization.worst_slice_snr_db >= 5
    modules = dict(step.named_modules())
    int8 = {name for name, module in modules.items() if isinstance(module, QuantizedConv1d)}
    assert int8 == set(quantization.quantized)
    assert step.state == state
    fields = quantization.to_json()
    assert fields["quantized"] == list(quantization.quantized)
    assert "seed" in str(fields["calibration"])
    layers = {layer.name: layer for layer in quantization.layers}
    assert set(layers) == set(convolutions(StepDecoder(tiny_decoder)))
    assert sum(layer.arithmetic for layer in layers.values()) == pytest.approx(1, abs=0.01)
    assert all(layer.reason for layer in layers.values())
    depthwise = layers["mixers.0.depthwise"]
    assert not depthwise.quantized
    assert depthwise.snr_db is None


@pytest.mark.usefixtures("all_candidates")
def test_a_layer_made_sensitive_is_left_out(
    tiny_decoder: EagerDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight a thousand times the others leaves those without a step of the scale."""
    victim = quantize_step(StepDecoder(tiny_decoder), tiny_decoder, **LOW_FLOORS).quantized[0]

    def spoil(step, codes, names):  # type: ignore[no-untyped-def]
        made = quantize_layers(step, codes, names)
        made[victim].weight.copy_(torch.div(made[victim].weight, 40, rounding_mode="floor") * 40)
        return made

    monkeypatch.setattr("codecstream_export.int8.sensitivity.quantize_layers", spoil)
    report = quantize_step(StepDecoder(tiny_decoder), tiny_decoder, **LOW_FLOORS)
    assert victim not in report.quantized
    (layer,) = (layer for layer in report.layers if layer.name == victim)
    assert "noise" in layer.reason


@pytest.mark.usefixtures("all_candidates")
def test_a_floor_out_of_reach_says_what_the_layers_cost(tiny_decoder: EagerDecoder) -> None:
    step = StepDecoder(tiny_decoder)
    with pytest.raises(ParityError, match=r"(?s)no layer fits.*blocks\.0\.units\.0\.conv1: \d"):
        quantize_step(step, tiny_decoder, min_snr_db=90.0, probe_frames=2)
    assert not any(isinstance(module, QuantizedConv1d) for module in step.modules())


def test_a_layer_that_saves_nothing_is_not_tried(
    tiny_decoder: EagerDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codecstream_export.int8.sensitivity.ELEMENT_COST", 1e6)
    with pytest.raises(ParityError, match="no layer fits"):
        quantize_step(StepDecoder(tiny_decoder), tiny_decoder, **LOW_FLOORS)


@pytest.mark.usefixtures("all_candidates")
def test_calibration_on_given_codes(tiny_decoder: EagerDecoder, codes: torch.Tensor) -> None:
    survey = Survey(StepDecoder(tiny_decoder), tiny_decoder, codes, probe_frames=2)
    assert survey.calibration == f"{FRAMES} frames of given codes"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.zeros(10, 15, dtype=torch.int64), "frames, 16"),
        (torch.zeros(10, 16), "integers"),
        (torch.zeros(3, 16, dtype=torch.int64), "at least 4"),
        (torch.full((10, 16), 2048), "between 0 and 2047"),
        (torch.full((10, 16), -1), "between 0 and 2047"),
    ],
)
def test_wrong_calibration_codes(
    tiny_decoder: EagerDecoder, wrong: torch.Tensor, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        quantize_step(StepDecoder(tiny_decoder), tiny_decoder, calibration=wrong)


def write_onnx(step: StepDecoder, path: Path) -> None:
    codes = random_codes(5, step.config).T[None].contiguous()
    frames = ({2: torch.export.Dim("frames", min=1)}, tuple({} for _ in step.state))
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        program = torch.export.export(
            step, (codes, *step.initial_state()), dynamic_shapes=frames, strict=False
        )
        result = torch.onnx.export(
            program, (), opset_version=18, dynamo=True, external_data=False, verbose=False
        )
    assert result is not None
    assert use_unsigned_activations(result.model) == 4 * 3
    ir.save(result.model, path)


def test_onnx_runtime_runs_it_on_integers(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    step = StepDecoder(random_decoder(dataclasses.replace(TINY, num_hidden_layers=1)))
    codes = random_codes(FRAMES, step.config, 5)
    names = [WIDE, "blocks.3.units.1.conv2", "blocks.2.upsample"]
    reference = decode_in_chunks(step, codes, [FRAMES]).numpy()
    with replaced(step, quantize_layers(step, codes, names)):
        write_onnx(step, tmp_path / "int8.onnx")
        expected = decode_in_chunks(step, codes, [FRAMES]).numpy()
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"), settings)
    operators = [node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph]
    assert operators.count("QLinearConv") == len(names)
    state = [torch.zeros(item.shape).numpy() for item in step.state]
    names_in = [item.name for item in session.get_inputs()]
    feeds = dict(zip(names_in, [codes.T[None].numpy(), *state], strict=True))
    pcm = session.run(None, feeds)[0]
    # Both round; a sum on the edge between two integers may fall to either side.
    assert snr_db(expected, pcm) >= snr_db(reference, expected) + 8
