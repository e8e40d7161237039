"""Weights stored in 16 bits; arithmetic stays in float32.

Half the size on disk and on the way to the device. The runtimes widen the weights once, when they
load: on x86 none of them is faster in half precision.

Plain float16 is not enough for this decoder: its 11 significant bits leave 48 dB on full-size
random weights, because errors of the early layers grow by about 15 dB on their way to the sound.
The same 16 bits as integers with a scale per output channel leave more than 60. A tensor whose
channels have far outliers is better off as float16, so each takes what errs less on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Stored", "store_half", "take_stored"]

Stored = dict[str, Tensor]  # "stored" in 16 bits, "scale" to multiply it with once it is float32

MIN_ELEMENTS = 1024  # smaller tensors, such as biases, stay as they are: they weigh nothing
LEVELS = 32767


class _FromFloat16(nn.Module):
    scale = torch.ones(())

    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()


class _FromInt16(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", scale)

    def forward(self, stored: Tensor) -> Tensor:
        return stored.float() * self.scale


def store_half(module: nn.Module) -> None:
    """Let ``module`` keep its large weights in 16 bits and widen them where it uses them."""
    for part in list(module.modules()):
        for name, value in list(part.named_parameters(recurse=False)):
            if value.dtype == torch.float32 and value.numel() >= MIN_ELEMENTS:
                stored, widen = _smaller_error(value.data)
                setattr(part, name, nn.Parameter(stored, requires_grad=False))
                parametrize.register_parametrization(part, name, widen, unsafe=True)


def take_stored(module: nn.Module) -> dict[str, Stored]:
    """Undo :func:`store_half`: leave the widened weights in ``module``, return the stored ones."""
    taken: dict[str, Stored] = {}
    for path, part in list(module.named_modules()):
        for name, steps in list(getattr(part, "parametrizations", {}).items()):
            widened = getattr(part, name).detach()
            taken[f"{path}.{name}"] = {"stored": steps.original.data, "scale": steps[0].scale}
            parametrize.remove_parametrizations(part, name, leave_parametrized=False)
            setattr(part, name, nn.Parameter(widened, requires_grad=False))
    return taken


def _smaller_error(value: Tensor) -> tuple[Tensor, nn.Module]:
    """Return the better of the two stored forms, and what makes it float32 again."""
    others = tuple(range(1, value.dim()))
    largest = value.abs().amax(dim=others, keepdim=True)
    scale = (largest / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    choices: list[tuple[Tensor, nn.Module]] = [
        ((value / scale).round().to(torch.int16), _FromInt16(scale)),
        (value.to(torch.float16), _FromFloat16()),
    ]
    return min(choices, key=lambda choice: float((choice[1](choice[0]) - value).square().sum()))
