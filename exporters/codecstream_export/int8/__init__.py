"""Convolutions in int8: which stand it, by measurement, and how they are rounded.

::

    quantization = quantize_step(step, decoder, min_snr_db=40.0)   # changes step in place
    quantization.to_json()                                         # for the manifest

``layers`` has the int8 convolution, ``rounding`` chooses its grids and rounds its weights,
``equalize`` folds scales through Snake beforehand, and ``sensitivity`` chooses the layers.
"""

from codecstream_export.int8.sensitivity import Quantization, quantize_step

__all__ = ["Quantization", "quantize_step"]
