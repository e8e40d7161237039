"""The comparison that an artifact has to pass before it is handed out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, LedgerProgram, expected_ledger

pytest.importorskip("torch")

from codecstream_export import ParityError, verify
from codecstream_export.random_weights import TINY

RAMP = (2, 4, 8, 16, 25)
DECODER: Any = SimpleNamespace(config=TINY)
LAST = sum(verify._ramp_order(RAMP, verify.FRAMES["fp32"]))


class WrongLengthAtTheEnd(LedgerProgram):
    more = 0

    def step(self, codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        pcm, after = super().step(codes, state)
        if after == LAST:
            pcm = np.resize(pcm, len(pcm) + self.more)
        return pcm, after


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "eager_pcm", lambda decoder, codes: expected_ledger(codes))


def test_a_program_that_computes_the_same_passes() -> None:
    found = verify.check_parity(LedgerProgram(), DECODER, RAMP)
    assert [(item.order, item.frames) for item in found] == [("ramp", LAST), ("every size", 528)]
    assert all(item.to_json()["exact"] for item in found)


@pytest.mark.parametrize("more", [-1, -555, -SAMPLES, 1, 555, SAMPLES])
def test_a_wrong_length_is_not_cut_in_silence(more: int) -> None:
    program = WrongLengthAtTheEnd()
    program.more = more
    expected = LAST * SAMPLES
    with pytest.raises(ParityError, match=f"makes {expected + more} samples in ramp .* {expected}"):
        verify.check_parity(program, DECODER, RAMP)


@pytest.mark.parametrize("more", [-SAMPLES, 1])
def test_nor_is_that_of_windows(more: int) -> None:
    program = WrongLengthAtTheEnd()
    program.more = more
    with pytest.raises(ParityError, match="samples in ramp order"):
        verify.check_windows(program, DECODER, RAMP, LAST + 25, verify.FLOORS["fp32"])
