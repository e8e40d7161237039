"""Prove that a device decodes what the eager decoder decodes.

>>> import numpy as np
>>> from codecstream_parity import compare
>>> reference = np.sin(np.arange(19_200) / 7).astype(np.float32)
>>> report = compare(reference, reference)
>>> report.passed, report.exact
(True, True)

The command ``codecstream-parity`` decodes and compares; ``compare`` is for sound that you have.
"""

from codecstream_parity.floors import FLOORS, Floors
from codecstream_parity.measures import Seam, align, slice_snr_db, snr_db
from codecstream_parity.report import Report, Slice, compare

__all__ = [
    "FLOORS",
    "Floors",
    "Report",
    "Seam",
    "Slice",
    "align",
    "compare",
    "slice_snr_db",
    "snr_db",
]
