"""The report as one HTML file: table, pictures, and players for both sounds; nothing is fetched."""

from __future__ import annotations

import base64
import html
import io

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError
from codecstream.pcm import to_int16
from codecstream_parity.outcome import Outcome
from codecstream_parity.plots import plot_run
from codecstream_parity.runs import Run
from codecstream_parity.table import ROWS, cell

__all__ = ["html_page"]

MAX_RUNS = 6  # columns of the table
MAX_PLAYED_S = 20.0  # noise, which random codes make, does not compress
AUDIBLE_PEAK = 0.5  # to which a difference is amplified, to be heard

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.missed { color: #c00; font-weight: 600; } .passed { color: #080; font-weight: 600; }
.table { overflow-x: auto; } img { max-width: 100%; background: #fff; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.players { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; }
"""


def html_page(outcome: Outcome) -> str:
    """Return the page.

    Raises:
        MissingDependencyError: matplotlib or soundfile is not installed.
    """
    subject = outcome.subject
    verdict = "passed" if outcome.passed else "falls short"
    kind = ", ".join(x for x in (subject.runtime, subject.precision, subject.mode) if x)
    facts = {
        "artifact": f"{subject.path} ({kind})" if kind else subject.path,
        "reference": outcome.reference,
        "codes": outcome.codes,
        "made with": ", ".join(f"{k} {v}" for k, v in subject.made_with.items()) or "not recorded",
    }
    if outcome.schedule is not None:
        facts["schedule"] = ", ".join(map(str, outcome.schedule)) + " frames"
    shown = [outcome.worst_run, *_listed(outcome.approximation)]
    body = [
        f"<h1>codecstream-parity: <span class={'passed' if outcome.passed else 'missed'}>"
        f"{verdict}</span></h1>",
        "<dl>",
        *(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in facts.items()),
        "</dl>",
        *(f"<p class=missed>{_text(reason)}</p>" for reason in outcome.reasons),
        *(f"<p>Note: {_text(note)}</p>" for note in outcome.notes),
        _table([*outcome.runs[:MAX_RUNS], *_listed(outcome.approximation)]),
    ]
    for run in shown:
        body += [f"<h2>{_text(run.name)}</h2>", _players(run), _picture(run, subject.path)]
    if len(outcome.runs) > MAX_RUNS:
        body.append(f"<p>{len(outcome.runs)} runs in all; the JSON has the others' figures.</p>")
    title = _text(f"{verdict}: {subject.path}")
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f"<meta name=viewport content='width=device-width'>\n<style>{_STYLE}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def _listed(run: Run | None) -> list[Run]:
    return [] if run is None else [run]


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(runs: list[Run]) -> str:
    head = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
    rows = []
    for row in ROWS:
        cells = [cell(row, run.report) for run in runs]
        if all(value == "-" for value, _ in cells):
            continue
        values = "".join(
            f"<td{' class=missed' if missed else ''}>{_text(value)}</td>" for value, missed in cells
        )
        floor = _text(row.floor(runs[0].report) or "")
        rows.append(f"<tr><td>{_text(row.title)}</td>{values}<td>{floor}</td></tr>")
    head = f"<tr><th></th>{head}<th>floor</th></tr>"
    return f"<div class=table><table>{head}{''.join(rows)}</table></div>"


def _players(run: Run) -> str:
    rate_hz = run.report.sample_rate_hz
    first = int(MAX_PLAYED_S * rate_hz)
    reference, output = run.reference[:first], np.nan_to_num(run.output[:first])
    common = min(reference.size, output.size)
    difference = output[:common] - reference[:common]
    largest = float(np.abs(difference).max(initial=0.0))
    gain = AUDIBLE_PEAK / largest if largest else 1.0
    loudness = f"difference, {20 * np.log10(gain):+.0f} dB" if largest else "difference: none"
    parts = [
        f"<figure><figcaption>{_text(name)}</figcaption>"
        f"<audio controls preload=metadata src='data:audio/flac;base64,{_flac(pcm, rate_hz)}'>"
        f"</audio></figure>"
        for name, pcm in (
            ("reference", reference),
            ("output", output),
            (loudness, difference * np.float32(gain)),
        )
        if pcm.size
    ]
    return f"<div class=players>{''.join(parts)}</div>"


def _flac(pcm: NDArray[np.float32], rate_hz: int) -> str:
    try:
        import soundfile
    except ImportError as error:
        raise MissingDependencyError(
            f"sound in a page needs soundfile ({error}): pip install 'codecstream[parity]'"
        ) from error
    buffer = io.BytesIO()
    soundfile.write(buffer, to_int16(pcm), rate_hz, format="FLAC", subtype="PCM_16")
    return base64.b64encode(buffer.getvalue()).decode()


def _picture(run: Run, title: str) -> str:
    data = base64.b64encode(plot_run(run, title)).decode()
    name = f"{_text(run.name)}: waveforms, SNR per slice, spectrograms"
    return f"<img alt='{name}' src='data:image/png;base64,{data}'>"
