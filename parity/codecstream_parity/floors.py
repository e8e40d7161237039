"""What an output must reach, by the precision of its program.

Each figure of a report has a limit here, or none. A program that computes in float32 differs from
the eager decoder by rounding only, which is 90 dB and more; what 16 and 8 bits cost is what the
exporter allows them to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["COARSENESS", "FLOORS", "NO_FLOORS", "Floors", "floors_for"]

COARSENESS = ("fp32", "fp16", "int8")
"""Precisions, the finest first."""


@dataclass(frozen=True, slots=True)
class Floors:
    """Limits of a report's figures; None is no limit.

    Lower limits, "at least": the figures whose names end in ``snr_db``, and ``drift_db``. Upper
    limits of the absolute value, "at most": all others. A length that differs, a sample that is
    not finite and a polarity that is swapped always fail.

    Attributes:
        snr_db: Overall.
        worst_slice_snr_db: The worst 80 ms; a soft slice has the same noise under less signal.
        slice_p1_snr_db: All but 1 % of the slices.
        onset_snr_db: The first 160 ms.
        tail_snr_db: The last 160 ms.
        max_abs_error: Of a sample; full scale is 1.
        seam_excess_db: How far the worst step at a chunk boundary is above what is usual elsewhere.
        seam_step_db: Such steps fail only when above this, over the level around them.
        quiet_level_db: Change of level where the reference is below -55 dBFS.
        gain_db: Of the whole.
        dc_offset: Change of the mean; full scale is 1.
        log_spectral_distance_db: Mean over spectra of 40 ms.
        drift_db: SNR of the last minute less that of the first.
        lag_samples: By how much the output may be late or early.
    """

    snr_db: float | None
    worst_slice_snr_db: float | None
    slice_p1_snr_db: float | None
    onset_snr_db: float | None
    tail_snr_db: float | None
    max_abs_error: float | None
    seam_excess_db: float | None
    seam_step_db: float | None
    quiet_level_db: float | None
    gain_db: float | None
    dc_offset: float | None
    log_spectral_distance_db: float | None
    drift_db: float | None
    lag_samples: int | None = 0

    def replaced(self, **limits: Any) -> Floors:
        """Return these floors with some limits replaced; None for no limit.

        Raises:
            ValueError: No figure has that name.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in limits:
            if name not in known:
                raise ValueError(f"no floor is called {name!r}; they are {', '.join(known)}")
        return dataclasses.replace(self, **limits)


_FP32 = Floors(
    snr_db=90.0,
    worst_slice_snr_db=80.0,
    slice_p1_snr_db=85.0,
    onset_snr_db=80.0,
    tail_snr_db=80.0,
    max_abs_error=1e-4,
    seam_excess_db=6.0,
    seam_step_db=-80.0,
    quiet_level_db=0.1,
    gain_db=0.001,
    dc_offset=1e-5,
    log_spectral_distance_db=0.05,
    drift_db=-3.0,
)
_FP16 = Floors(
    snr_db=60.0,
    worst_slice_snr_db=45.0,
    slice_p1_snr_db=50.0,
    onset_snr_db=45.0,
    tail_snr_db=45.0,
    max_abs_error=5e-3,
    seam_excess_db=6.0,
    seam_step_db=-60.0,
    quiet_level_db=1.0,
    gain_db=0.02,
    dc_offset=1e-4,
    log_spectral_distance_db=0.5,
    drift_db=-3.0,
)
_INT8 = Floors(
    snr_db=40.0,
    worst_slice_snr_db=25.0,
    slice_p1_snr_db=30.0,
    onset_snr_db=25.0,
    tail_snr_db=25.0,
    max_abs_error=5e-2,
    seam_excess_db=6.0,
    seam_step_db=-45.0,
    quiet_level_db=6.0,
    gain_db=0.2,
    dc_offset=1e-3,
    log_spectral_distance_db=2.0,
    drift_db=-3.0,
)

FLOORS = {
    "fp32": _FP32,
    "fp16": _FP16,
    "int8": _INT8,
    # Windows against all frames at once: what is heard of the past is cut, whatever the precision.
    "windowed": _INT8.replaced(gain_db=0.5, quiet_level_db=6.0, log_spectral_distance_db=3.0),
    # A file of 16-bit samples from a server that decodes in half precision, with its own delay.
    "wav": _FP16.replaced(lag_samples=4000),
}
"""By precision, for a program that should compute what the reference computes; and for two
references that are not quite the same thing: ``windowed``, ``wav``."""


NO_FLOORS = Floors(**dict.fromkeys((field.name for field in dataclasses.fields(Floors)), None))
"""Measure, and require nothing."""


def floors_for(precision: str, *, approximate: bool = False, wav: bool = False) -> Floors:
    """Return the floors of a program.

    Args:
        precision: ``fp32``, ``fp16`` or ``int8``.
        approximate: It decodes windows, and the reference does not, or the other way round.
        wav: The reference is a WAV file.

    Raises:
        ValueError: There are none for this precision.
    """
    if precision not in COARSENESS:
        raise ValueError(f"no floors for precision {precision!r}: only {', '.join(COARSENESS)}")
    if approximate:
        floors = FLOORS["windowed"]
        return floors.replaced(lag_samples=4000) if wav else floors
    if wav:
        coarse = FLOORS["int8"].replaced(lag_samples=4000)
        return coarse if precision == "int8" else FLOORS["wav"]
    return FLOORS[precision]
