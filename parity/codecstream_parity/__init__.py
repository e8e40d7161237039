"""How close is a device's audio to the eager decoder's.

>>> import numpy as np
>>> from codecstream_parity import snr_db
>>> reference = np.ones(1920, np.float32)
>>> round(snr_db(reference, reference * np.float32(0.9)), 1)
20.0
"""

from codecstream_parity.measures import slice_snr_db, snr_db

__all__ = ["slice_snr_db", "snr_db"]
