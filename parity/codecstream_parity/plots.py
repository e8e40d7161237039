"""One picture of a run: where it differs, when, and at which frequencies."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError
from codecstream_parity.runs import Run

__all__ = ["plot_run", "spectrogram_db"]

MAX_SNR_DB = 140.0  # where a slice is exact
FLOOR_DBFS = -120.0
MAX_COLUMNS = 1600
FFT_SAMPLES = 1024


def plot_run(run: Run, title: str) -> bytes:
    """Return a PNG of a run: waveforms, SNR per slice with the seams, and three spectrograms.

    Signals are shown for their first minute, SNR for all of it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"a picture needs matplotlib ({error}): pip install 'codecstream[parity]'"
        ) from error
    figure = Figure(figsize=(14, 12), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(5, 1, height_ratios=[1, 1.3, 1, 1, 1])
    verdict = "passed" if not run.reasons else "falls short: " + run.reasons[0]
    heading = f"{title}, {run.name}: {verdict}"
    # A path may have two dollar signs, which are no formula.
    figure.suptitle(heading, fontsize=11, wrap=True, parse_math=False)
    common = min(run.reference.size, run.output.size)
    reference, output = run.reference[:common], np.nan_to_num(run.output[:common])
    difference = output - reference
    _waveforms(axes[0], run, reference, difference)
    _slices(axes[1], run)
    for axis, name, signal in (
        (axes[2], "reference", reference),
        (axes[3], "output", output),
        (axes[4], "difference", difference),
    ):
        image = _spectrogram(axis, run, name, signal)
    axes[4].set_xlabel("time, s")
    figure.colorbar(image, ax=axes[2:], label="dB of full scale", pad=0.01)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _waveforms(
    axis: Any, run: Run, reference: NDArray[np.float32], difference: NDArray[np.float32]
) -> None:
    peak, largest = (float(np.abs(x).max(initial=0.0)) for x in (reference, difference))
    gain_db = 20 * np.log10(peak / largest) if peak and largest else 0.0
    for signal, label, style in (
        (reference, "reference", {"color": "0.6"}),
        (
            difference * np.float32(10 ** (gain_db / 20)),
            f"difference, {gain_db:+.0f} dB" if largest else "difference: none",
            {"color": "tab:red", "alpha": 0.7},
        ),
    ):
        time_s, low, high = _envelope(signal, run.report.sample_rate_hz)
        axis.fill_between(time_s, low, high, label=label, linewidth=0, **style)
    axis.legend(loc="upper right", ncols=2, fontsize=8)
    axis.set_ylabel("amplitude")
    axis.margins(x=0)


def _slices(axis: Any, run: Run) -> None:
    report = run.report
    seconds = report.samples_per_frame / report.sample_rate_hz
    snr = np.clip(report.slice_snr_db, -20, MAX_SNR_DB)
    time_s = (np.arange(len(snr)) + 0.5) * seconds
    seams = report.seam_frames[(report.seam_frames > 0) & (report.seam_frames < len(snr))]
    if len(seams) <= MAX_COLUMNS:
        for index, frame in enumerate(seams):
            label = "chunk boundary" if index == 0 else None
            axis.axvline(frame * seconds, color="0.85", linewidth=0.8, label=label, zorder=0)
    axis.plot(time_s, snr, ".", markersize=3, color="tab:blue", label="80 ms slices")
    for name, style in (("snr_db", "-"), ("worst_slice_snr_db", ":")):
        limit = getattr(report.floors, name)
        if limit is not None:
            axis.axhline(limit, color="tab:orange", linestyle=style, label=f"floor of {name}")
    if report.worst_slice is not None:
        worst = float(np.clip(report.worst_slice.snr_db, -20, MAX_SNR_DB))
        at = report.worst_slice.time_s + seconds / 2
        axis.plot(at, worst, "v", color="tab:red", label="worst slice")
    if report.worst_seam is not None:
        at = report.worst_seam.frame * seconds
        bad = "worst_seam" in report.missed
        axis.axvline(
            at,
            color="tab:red" if bad else "tab:green",
            linewidth=1.2 if bad else 0.6,
            label=f"worst seam, {report.worst_seam.excess_db:+.0f} dB over usual",
        )
    axis.set_ylabel("SNR, dB")
    axis.margins(x=0)
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.35 * (high - low), high)  # room for the legend, below all points
    axis.legend(loc="lower right", ncols=3, fontsize=8)


def _spectrogram(axis: Any, run: Run, name: str, signal: NDArray[np.float32]) -> Any:
    rate_hz = run.report.sample_rate_hz
    image = axis.imshow(
        spectrogram_db(signal),
        origin="lower",
        aspect="auto",
        extent=(0, max(signal.size, 1) / rate_hz, 0, rate_hz / 2000),
        vmin=FLOOR_DBFS,
        vmax=-20,
        cmap="magma",
    )
    axis.set_ylabel(f"{name}\nkHz")
    return image


def spectrogram_db(signal: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return levels in dB of full scale, float64 ``[513, columns]``; a sine of amplitude 1 is 0.

    At most 1,600 columns, each of 1,024 samples under a Hann window.
    """
    padded = np.pad(signal.astype(np.float64), (0, max(0, FFT_SAMPLES - signal.size)))
    hop = max(FFT_SAMPLES // 4, -(-padded.size // MAX_COLUMNS))
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT_SAMPLES)[::hop]
    window = np.hanning(FFT_SAMPLES + 1)[:-1]
    spectrum = np.abs(np.fft.rfft(frames * window, axis=1)) * (2 / window.sum())
    levels: NDArray[np.float64] = 20 * np.log10(np.maximum(spectrum.T, 10 ** (FLOOR_DBFS / 20)))
    return levels


def _envelope(
    signal: NDArray[np.float32], rate_hz: int
) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]:
    """Return times and the lowest and highest sample of each column."""
    step = max(1, -(-signal.size // MAX_COLUMNS))
    padded = np.pad(signal, (0, -signal.size % step), mode="edge") if signal.size else signal
    columns = padded.reshape(-1, step)
    time_s = np.arange(len(columns)) * step / rate_hz
    return time_s, columns.min(axis=1, initial=0), columns.max(axis=1, initial=0)
