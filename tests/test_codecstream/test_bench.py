"""The bench's arithmetic by given times, its report against its schema; no time is asserted."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codecstream import CodecGeometry, Ramp
from codecstream.bench import cli, run
from codecstream.bench.figures import (
    intervals,
    judge,
    nearest_rank,
    rtf_by_interval,
    share_of_product,
    simulate_playback,
    simulate_policy,
    summarise_size,
)
from codecstream.bench.host import describe_host
from codecstream.bench.table import compare_text, report_text

ROOT = Path(__file__).parents[2]
FRAME_MS = 80.0
RAMP = (2, 4, 8, 16, 25)


# Percentiles


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(1, 15), (5, 15), (30, 20), (40, 20), (50, 35), (99, 50), (100, 50), (20, 15), (20.1, 20)],
)
def test_nearest_rank_by_hand(percent: float, expected: float) -> None:
    assert nearest_rank([50, 15, 40, 20, 35], percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_nearest_rank_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    found = nearest_rank(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9
    assert sum(value < found for value in values) < percent / 100 * len(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_there_is_no_such_percentile(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="no "):
        nearest_rank(values, percent)


def test_figures_of_a_size_by_hand() -> None:
    times = [100.0, 200.0, 150.0, 120.0, 110.0, 130.0, 140.0, 160.0, 170.0, 180.0]
    found = summarise_size(2, times, FRAME_MS)
    assert (found.min_ms, found.p50_ms, found.p90_ms) == (100, 140, 180)
    assert (found.p99_ms, found.max_ms, found.count) == (200, 200, 10)
    assert (found.rtf, found.budget_ms, found.fits) == (140 / 160, 160, False)
    assert summarise_size(3, times, FRAME_MS).fits


# Simulated playback


def test_a_device_that_takes_no_time_starts_as_the_ramp_says() -> None:
    """At pace 1 the ramp needs 23 frames behind the first chunk: 1,840 ms."""
    found = simulate_playback({1: 0.0}, RAMP, 1.0, 250, FRAME_MS, prebuffer_ms=1840.0)
    delay_ms = Ramp(RAMP).start_delay_frames() * FRAME_MS
    assert found.ttfa_ms == 160
    assert found.playback_start_ms == pytest.approx(160 + delay_ms)
    assert (found.underruns, found.silence_ms, found.unavoidable_ms) == (0, 0, 0)


def test_playback_by_hand() -> None:
    """Chunks of 2 frames at pace 1, each 60 ms of decoding, started at once.

    They are ready at 220, 380, 540: exactly when the one before has been played.
    """
    found = simulate_playback({2: 60.0}, (2,), 1.0, 6, FRAME_MS, prebuffer_ms=0.0)
    assert (found.ttfa_ms, found.playback_start_ms) == (220, 220)
    assert (found.underruns, found.silence_ms) == (0, 0)


def test_a_device_that_is_too_slow_runs_dry_by_hand() -> None:
    """All frames at once (nearly), 200 ms per chunk of 160 ms: 40 ms of silence before each."""
    found = simulate_playback({2: 200.0}, (2,), 1e-9, 10, FRAME_MS, prebuffer_ms=0.0)
    assert found.underruns == 4
    assert found.silence_ms == pytest.approx(4 * 40)
    assert found.unavoidable_ms == 0
    assert found.playback_start_ms == pytest.approx(200 + 160)


def test_a_slow_talker_is_not_the_devices_fault() -> None:
    """Pace 1.2: every chunk of 160 ms comes 192 ms after the one before."""
    found = simulate_playback({2: 10.0}, (2,), 1.2, 10, FRAME_MS, prebuffer_ms=0.0)
    assert found.silence_ms == pytest.approx(found.unavoidable_ms) == pytest.approx(4 * 32)


@given(
    cost=st.floats(0, 3),
    pace=st.floats(0.1, 2),
    frames=st.integers(1, 200),
    prebuffer_ms=st.floats(0, 5000),
)
def test_what_playback_must_hold(
    cost: float, pace: float, frames: int, prebuffer_ms: float
) -> None:
    costs = {size: size * FRAME_MS * cost for size in RAMP}
    found = simulate_playback(costs, RAMP, pace, frames, FRAME_MS, prebuffer_ms)
    assert found.ttfa_ms <= found.playback_start_ms
    assert (found.silence_ms > 1e-3) == (found.start_ms < found.playback_start_ms - 1e-3)
    assert (found.underruns > 0) == (found.silence_ms > 0)
    free = simulate_playback({1: 0.0}, RAMP, pace, frames, FRAME_MS, prebuffer_ms)
    assert free.silence_ms == pytest.approx(found.unavoidable_ms)
    # Starting as much later as the silence lasted is starting without an underrun.
    assert found.start_ms + found.silence_ms >= found.playback_start_ms - 1e-2


@given(st.integers(1, 60))
def test_sizes_that_were_not_measured_lie_between_those_that_were(size: int) -> None:
    costs = {2: 20.0, 4: 40.0, 25: 250.0}
    found = simulate_playback(costs, (size,), 1.0, size, FRAME_MS, 0.0)
    assert found.ttfa_ms - size * FRAME_MS == pytest.approx(10 * size if size > 1 else 20)


@pytest.mark.parametrize("cost", [0.0, 0.5, 0.9])
def test_a_policy_starts_seconds_before_the_ramp_and_does_not_run_dry(cost: float) -> None:
    """A frame comes every 80 ms and takes ``cost`` of that to decode: one by one will do."""
    costs = {size: size * FRAME_MS * cost for size in (1, *RAMP)}
    found = simulate_policy(costs, 25, 1.0, 250, CodecGeometry())
    ramp = simulate_playback(costs, RAMP, 1.0, 250, FRAME_MS, prebuffer_ms=0.0)
    assert (found.underruns, found.silence_ms) == (0, 0)
    assert (1 + cost) * FRAME_MS <= found.start_ms <= ramp.playback_start_ms - 1400


def test_a_policy_cannot_save_a_device_that_is_too_slow() -> None:
    costs = {size: size * FRAME_MS * 2 for size in (1, *RAMP)}
    found = simulate_policy(costs, 25, 1.0, 250, CodecGeometry())
    assert found.start_ms + found.silence_ms >= 250 * FRAME_MS


def test_share_of_the_product_by_hand() -> None:
    """2 GFLOP in 10, 20 and 40 ms are 200, 100 and 50 GFLOP/s."""
    turns = [(400.0, 10.0), (100.0, 20.0), (500.0, 40.0)]
    assert share_of_product(turns, 2_000_000_000) == pytest.approx(0.5)


# Sustained


def test_intervals_by_hand() -> None:
    """Chunks of 2 s of audio: three in 1 s each, then two in 1.5 s each."""
    assert rtf_by_interval([1, 2, 3, 4.5, 6], 2.0, 3.0) == [0.5, 0.75]
    assert rtf_by_interval([1, 2, 3, 4], 2.0, 3.0) == [pytest.approx(0.5)]  # the rest is short
    assert rtf_by_interval([1.0], 2.0, 60.0) == [0.5]
    assert rtf_by_interval([], 2.0, 60.0) == []
    assert intervals([1, 2, 3, 4.5, 6], 3.0) == [range(3), range(3, 5)]
    assert intervals([1, 2, 3, 4], 3.0) == [range(4)]


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=60), st.floats(0.5, 10))
def test_intervals_share_out_all_the_time(steps: list[float], interval_s: float) -> None:
    ends = [math.fsum(steps[: i + 1]) for i in range(len(steps))]
    found = rtf_by_interval(ends, 2.0, interval_s)
    slowest, fastest = max(steps) / 2, min(steps) / 2
    assert all(fastest - 1e-9 <= factor <= slowest + 1e-9 for factor in found)
    assert len(found) <= ends[-1] / interval_s + 1


# Verdict


def figures(**p99_ms: float) -> list[Any]:
    return [summarise_size(int(name[1:]), [value], FRAME_MS) for name, value in p99_ms.items()]


def test_a_verdict_by_hand() -> None:
    found = judge(figures(n1=90.0, n2=100.0, n25=1000.0), 25, [0.55, 0.6])
    assert (found.real_time, found.fits) == (True, [2, 25])
    assert found.spare_percent == pytest.approx(40)
    assert found.text == (
        "real-time, with 40 % to spare; chunks of 2, 25 frames fit, 1 frames do not"
    )


def test_throttling_alone_is_enough_to_fail() -> None:
    found = judge(figures(n2=10.0, n25=500.0), 25, [0.5, 0.9, 1.1])
    assert (found.real_time, found.fits) == (False, [2, 25])
    assert found.spare_percent == pytest.approx(-10)
    assert found.text.startswith("NOT real-time: it takes 1.10 times as long as the sound lasts")


def test_one_slow_chunk_of_a_hundred_does_not_fail_but_two_do() -> None:
    fast = [500.0] * 99
    for slow, real_time in (([3000.0], True), ([3000.0, 3000.0], False)):
        size = summarise_size(25, fast + slow, FRAME_MS)
        assert judge([size], 25, []).real_time == real_time


def test_the_last_size_must_have_been_measured() -> None:
    with pytest.raises(ValueError, match="chunks of 25 frames were not measured"):
        judge(figures(n2=10.0), 25, [])


# The report


@pytest.fixture(scope="module")
def report(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run of the whole command."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    arguments = ["--repeats", "2", "--minutes", "0.01", "--threads", "1", "--out", str(folder)]
    status = cli.main([str(tiny_artifact), "--with-load", *arguments])
    document: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert status == (0 if document["verdict"]["real_time"] else 1)
    text = (folder / "report.txt").read_text(encoding="utf-8")
    assert text == report_text(document)
    assert text.splitlines()[-1] == document["verdict"]["text"]
    return document


def test_the_report_is_as_its_schema_says(report: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "bench.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(report)
    broken = {**report, "verdict": {**report["verdict"], "real_time": "yes"}}
    assert not jsonschema.Draft202012Validator(schema).is_valid(broken)


def test_every_runtime_can_be_measured(runtime: str, artifact: Path, capsys: Any) -> None:
    arguments = ["--repeats", "1", "--minutes", "0", "--no-sweep", "--sizes", "2", "--json", "-"]
    assert cli.main([str(artifact), *arguments]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["artifact"]["runtime"] == runtime


def test_the_report_has_what_was_asked_for(report: dict[str, Any]) -> None:
    assert [item["frames"] for item in report["sizes"]] == [1, 2, 4, 8, 16, 25]
    assert all(item["count"] == 2 for item in report["sizes"])
    assert all(value > 0 for value in report["cold_start"].values())
    assert len(report["with_load"]["sizes"]) == 6
    assert report["with_load"]["busy_processes"] >= 1
    assert report["threads"][0]["threads"] == 1
    assert [item["frames"] for item in report["threads"][0]["sizes"]] == [2, 25]
    assert [item["pace"] for item in report["playback"]] == [0.5, 1.0, 1.2]
    assert all(item["adaptive"]["start_ms"] > 0 for item in report["playback"])
    assert len(report["sustained"]["rtf"]) == len(report["sustained"]["resident_mb"]) >= 1
    assert report["sustained"]["resident_mb"][-1] >= report["memory"]["resident_mb"] / 2
    assert report["memory"]["peak_mb"] >= report["memory"]["resident_mb"] > 10
    assert report["peak"]["gflops"] > 0
    assert (report["peak"]["share"] is None) == (report["peak"]["flop_per_frame"] is None)


def test_every_null_has_a_reason(report: dict[str, Any]) -> None:
    for name, value in report.items():
        for path, part in [(name, value)] + [
            (f"{name}.{key}", part) for key, part in (value.items() if type(value) is dict else ())
        ]:
            assert (part is None) == (path in report["null_because"]), path


def test_reports_are_compared(report: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    faster = json.loads(json.dumps(report))
    for item in faster["sizes"]:
        for key in ("min_ms", "p50_ms", "p90_ms", "p99_ms"):
            item[key] /= 2
    paths = [tmp_path / "a.json", tmp_path / "b"]  # the second as --out makes it
    paths[0].write_text(json.dumps(report))
    paths[1].mkdir()
    (paths[1] / "report.json").write_text(json.dumps(faster))
    assert cli.main(["--compare", *map(str, paths)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["25", "0.50", "0.50", "0.50", "0.50"] in rows
    assert "hosts differ" not in compare_text(report, faster)
    faster["host"]["cpus"] += 1
    assert "The hosts differ" in compare_text(report, faster)


def test_json_on_standard_output(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--repeats", "1", "--minutes", "0", "--no-sweep", "--sizes", "3", "--json", "-"]
    cli.main([str(tiny_artifact), *arguments])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [item["frames"] for item in report["sizes"]] == [2, 3, 4, 8, 16, 25]
    assert report["sustained"]["rtf"] is None
    assert report["null_because"]["sustained.rtf"] == "--minutes is 0"
    assert report["null_because"]["threads"] == "the sweep was turned off"
    assert report["verdict"]["text"] in printed.err


# Wrong use, and what goes wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--threads", "0"), "threads must be at least 1"),
        (("--repeats", "0"), "at least 1 repeat"),
        (("--minutes", "-1"), "0 to 1440 minutes"),
        (("--minutes", "nan"), "0 to 1440 minutes"),
        (("--sizes", "0"), "positive whole numbers"),
        (("--threads", "9" * 20), "at most 1024"),
        (("--json", "EXISTS"), "is a folder"),
        (("--json", "/nowhere/report.json"), "/nowhere is not a folder"),
        (("--out", "/nowhere/report"), "/nowhere is not a folder"),
        (("--out", "EXISTS"), "exists: name a new folder"),
    ],
)
def test_wrong_use_is_told_in_one_line(
    tiny_artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, str],
    message: str,
) -> None:
    arguments = [str(tmp_path) if option == "EXISTS" else option for option in options]
    assert cli.main([str(tiny_artifact), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(tmp_path)]) == 2
    assert "is not a decoder artifact" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x", "--compare", "a", "b"]])
def test_an_artifact_or_two_reports(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a report"),
        ('{"format": "codecstream-bench", "format_version": 9}', "has format version 9"),
        ('{"format": "codecstream-bench", "format_version": "1"}', "has format version '1'"),
        ('{"format": "codecstream-bench", "format_version": NaN}', "NaN is no number"),
        ('{"format": "codecstream-bench", "format_version": 1}', "lacks what is compared"),
    ],
)
def test_what_is_no_report_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert cli.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_program_that_fails_is_told(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the measuring process: damage that only the runtime can see."""
    from support import edit_manifest

    folder = Path(shutil.copytree(tiny_artifact, tmp_path / "damaged"))
    edit_manifest(folder, lambda m: m["outputs"][0].update(name="nothing"))
    edit_manifest(folder, lambda m: m["files"].update())
    assert cli.main([str(folder), "--minutes", "0", "--no-sweep", "--repeats", "1"]) == 2
    assert "error: decoding failed: " in capsys.readouterr().err


def test_a_run_that_failed_leaves_its_folder_free(tmp_path: Path) -> None:
    assert cli.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_slow_device_has_the_time_that_its_repeats_take(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 chunks of each size are 15 minutes of sound: ten times as long, too, is a result."""
    allowed: list[float] = []

    def worker(task: Any, timeout_s: float) -> Any:
        allowed.append(timeout_s)
        raise run.BenchError("enough")

    monkeypatch.setattr(run, "_run_worker", worker)
    with pytest.raises(run.BenchError, match="enough"):
        run.run_bench(run.Settings(tiny_artifact, repeats=200, minutes=0))
    assert allowed[0] > 10 * 200 * (1 + 2 + 4 + 8 + 16 + 25) * 0.08


def test_a_bound_is_kept(tiny_artifact: Path, tmp_path: Path) -> None:
    sizes = run._sizes(run.Settings("x"), (2, 10), 10)
    assert sizes == [1, 2, 4, 8, 10]
    with pytest.raises(ValueError, match="at most 10 frames, not"):
        run._sizes(run.Settings("x", sizes=(11,)), (2, 10), 10)


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    found = describe_host(tmp_path / "cpu", tmp_path / "cpuinfo")
    assert found["caches"] is None
    assert found["clock_mhz"] is None
    assert found["governor"] is None
    assert found["instructions"] == []


def test_a_host_that_says_all(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : A CPU\nflags : avx2 fma\n")
    cache = tmp_path / "cpu" / "cpu0" / "cache" / "index0"
    clock = tmp_path / "cpu" / "cpu0" / "cpufreq"
    for folder, files in (
        (cache, {"level": "1", "type": "Data", "size": "32K"}),
        (clock, {"scaling_cur_freq": "1800000\n", "scaling_governor": "powersave"}),
    ):
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    found = describe_host(tmp_path / "cpu", tmp_path / "cpuinfo")
    assert (found["cpu"], found["instructions"]) == ("A CPU", ["avx2"])
    assert found["caches"] == ["L1 Data 32K"]
    assert found["clock_mhz"] == {"now": 1800.0}
    assert found["governor"] == "powersave"


def test_the_bench_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'rich', 'matplotlib', 'psutil'): sys.modules[name] = None\n"
        "import codecstream.bench.cli, codecstream.bench.worker"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: report.update(sizes=[]), "no chunk size in common"),
        (lambda report: report["sizes"][0].update(p50_ms=10**400), "lacks what is compared"),
        (lambda report: report.update(host=[]), "lacks what is compared"),
    ],
)
def test_a_report_that_makes_no_sense_is_not_compared(
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    broken = json.loads(json.dumps(report))
    change(broken)
    (tmp_path / "a.json").write_text(json.dumps(broken))
    (tmp_path / "b.json").write_text(json.dumps(report))
    assert cli.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert message in capsys.readouterr().err


def running(tmp_path: Path, artifact: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a bench that takes minutes; return it, and its measuring process once that decodes."""
    psutil = pytest.importorskip("psutil")
    code = (
        "import signal, sys\nfrom codecstream.bench.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [str(artifact), "--minutes", "5", "--out", "out"]
    bench = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    assert "decoding with" in bench.stderr.readline()
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        for child in psutil.Process(bench.pid).children():
            if child.cpu_times().user > 0.5:
                return bench, child.pid
        time.sleep(0.05)
    bench.kill()
    bench.communicate()
    raise AssertionError("nothing was measured")


def works(pid: int) -> bool:
    """Whether a process is there and is not one that nobody has buried."""
    psutil = pytest.importorskip("psutil")
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_process_and_no_folder(
    tiny_artifact: Path, tmp_path: Path, how: signal.Signals
) -> None:
    bench, worker = running(tmp_path, tiny_artifact)
    with bench:
        bench.send_signal(how)
        try:
            errors = bench.communicate(timeout=60)[1]
        finally:
            bench.kill()
    if how is signal.SIGINT:
        assert (bench.returncode, errors) == (2, "error: interrupted\n")
    until_s = time.monotonic() + 30
    while works(worker) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not works(worker)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_there_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        cli._write_folder(tmp_path / "out", {"report.txt": "x"})
    assert list(tmp_path.iterdir()) == []
