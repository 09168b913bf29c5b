"""The prepared run for a GPU, as far as no GPU is needed: its plan, its limits, what it reports."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from bench.__main__ import main
from bench.gpu import command
from bench.gpu.environment import CannotInstall, describe, install, missing_modules
from bench.gpu.plan import LEAST_S, Step, argv_within, left_out, schedule, steps_of
from bench.gpu.report import GpuReport, StepReport, count_tests, print_report
from bench.gpu.running import run_limited

OUT = Path("/nowhere")
ROOT = Path(__file__).parents[2]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_tests_come_before_timings_and_all_fit_into_the_time():
    steps = steps_of(OUT, 6, None, 4)
    assert [step.name for step in steps] == ["test-kernels", "test-serving", "kernels"]
    planned = schedule(steps, 6)
    assert sum(limit_s for _, limit_s in planned) == pytest.approx(360)
    assert all(limit_s > LEAST_S for _, limit_s in planned)
    _, timings_s = planned[-1]
    argv = argv_within(*planned[-1])
    assert argv[argv.index("--minutes") + 1] == f"{(timings_s - 15) / 60:.2f}"


def test_two_runs_fit_into_a_quarter_of_an_hour():
    both = schedule(steps_of(OUT, 8, None, 4), 8) + schedule(steps_of(OUT, 4, "tiles", 4), 4)
    assert sum(limit_s for _, limit_s in both) <= 12 * 60


def test_every_file_that_a_step_names_is_there():
    for step in steps_of(OUT, 6, None, 1):
        assert not [part for part in step.argv if part.startswith("tests/") and not (ROOT / part).exists()]
        assert "-n" not in step.argv


def test_what_serving_imports_is_among_what_its_step_needs():
    """Of the packages of pyproject.toml: a machine that lacks one must be told so before anything is started."""
    modules = "launch, scheduler.server, worker.server, client, tests.gpu.test_deployment, bench.kernels.decode_step"
    done = subprocess.run(
        python(f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"),
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = set(done.stdout.split())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ours = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in dependencies}
    distributions = importlib.metadata.packages_distributions()
    needed = {
        module
        for module in imported - {"torchgen"}  # a part of torch
        if any(dist.lower().replace("_", "-") in ours for dist in distributions.get(module, []))
    }
    (serving,) = steps_of(OUT, 6, "test-serving", 1)
    assert needed >= {"msgspec", "zmq", "torch"}
    assert needed <= set(serving.needs)


def test_steps_are_chosen_by_the_beginning_of_their_names():
    assert [step.name for step in steps_of(OUT, 6, "test", 1)] == ["test-kernels", "test-serving"]
    (tiles,) = steps_of(OUT, 4, "tiles", 1)
    assert tiles.argv[1:5] == ("-m", "bench", "kernels", "--tiles")
    assert tiles.argv[-4:] == ("--json", "/nowhere/tiles.json", "--minutes", "{minutes}")
    assert [step.share for step in steps_of(OUT, 6, "test", 1)][-1] == 1.0, "the last has all the time that is left"
    with pytest.raises(ValueError, match="the steps are test-kernels, test-serving, kernels, tiles"):
        steps_of(OUT, 6, "nonsense", 1)


def test_a_step_without_its_packages_or_without_time_is_left_out():
    step = Step("x", ("x",), 1.0, ("torch", "msgspec", "zmq"), "x.log")
    assert left_out(step, 100, lambda names: []) is None
    assert "msgspec, zmq" in (left_out(step, 100, lambda names: ["msgspec", "zmq"]) or "")
    assert left_out(step, 12.3, lambda names: []) == "only 12 s left"


def test_at_its_limit_a_step_is_ended_with_all_that_it_started(tmp_path: Path):
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    outcome = run_limited(python(script), tmp_path / "log", 1.5, tmp_path, os.environ)
    assert outcome.code is None
    assert 1.5 <= outcome.seconds <= time.monotonic() - began < 30
    child = int((tmp_path / "log").read_text().split()[0])
    try:
        psutil.Process(child).wait(5)
    except psutil.NoSuchProcess:
        pass
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_step_that_ends_has_its_code_and_its_output(tmp_path: Path):
    outcome = run_limited(python("print('said'); raise SystemExit(3)"), tmp_path / "log", 60, tmp_path, os.environ)
    assert outcome.code == 3
    assert (tmp_path / "log").read_text() == "said\n"


def make_wheel(folder: Path, name: str) -> None:
    """The smallest wheel there is: one module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "ANSWER = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


def test_wheels_are_installed_beside_everything_and_found_by_steps(tmp_path: Path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    site.mkdir()
    with pytest.raises(CannotInstall, match=r"no \*\.whl"):
        install(wheels, site)
    make_wheel(wheels, "brought_along")
    assert missing_modules(("brought_along", "json"), site) == ["brought_along"]
    install(wheels, site)
    assert missing_modules(("brought_along", "json"), site) == []
    done = subprocess.run(
        python("import brought_along; print(brought_along.ANSWER)"),
        env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "42\n"


def test_a_run_goes_on_after_a_failure_and_says_what_became_of_each_step(tmp_path: Path):
    junit = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>'
    steps = [
        Step("good", python("print('all well')"), 0.5, ("json",), "good.log"),
        Step("bad", python(f"open({str(tmp_path / 'bad.xml')!r}, 'w').write({junit!r}); raise SystemExit(1)"), 0.5,
             (), "bad.log"),
        Step("slow", python("import time; print('began', flush=True); time.sleep(600)"), 0.02, (), "slow.log"),
        Step("poor", python("pass"), 0.5, ("no_such_module",), "poor.log"),
    ]  # fmt: skip
    report = GpuReport("python -m bench gpu", "2026-01-01T00:00:00+00:00", {}, 1.2, {"gpus": []})
    command.run_steps(steps, report, tmp_path, None, False, Console(quiet=True))
    report.write(tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text())
    assert [(step["name"], step["code"]) for step in read["steps"]] == [
        ("good", 0), ("bad", 1), ("slow", None), ("poor", None),
    ]  # fmt: skip
    assert read["steps"][1]["tests"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert not read["ok"]
    console = Console(record=True, width=160, file=io.StringIO())
    print_report(report, tmp_path, console)
    text = console.export_text()
    assert "ended at its limit" in text
    assert "left out: not installed: no_such_module" in text
    assert "2 passed, 2 failed" in text
    assert "began" in text, "the end of a failed step's log"
    assert "all well" not in text


def test_only_a_run_in_which_everything_ran_is_ok():
    def step(code: int | None, left_out: str | None = None) -> StepReport:
        return StepReport("x", [], 1.0, 1.0, code, left_out, "x.log")

    def report(*steps: StepReport) -> GpuReport:
        return GpuReport("", "", {}, 1.0, {}, list(steps))

    assert report(step(0), step(0)).ok
    for bad in (report(), report(step(0), step(1)), report(step(None)), report(step(None, "no time"))):
        assert not bad.ok


def test_a_report_that_is_not_there_counts_nothing(tmp_path: Path):
    assert count_tests(tmp_path / "none.xml") is None
    (tmp_path / "cut.xml").write_text("<testsuites><testsuite")
    assert count_tests(tmp_path / "cut.xml") is None


def test_the_command_plans_and_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    assert main(["gpu", "--dry-run", "--minutes", "6", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "What a run of 6 minutes would do" in shown
    assert "test-serving" in shown
    monkeypatch.setattr(command, "describe", lambda: {"cuda_visible": False})
    assert main(["gpu", "--out", str(tmp_path / "out")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["gpu", "--minutes", "0"]) == 2
    assert main(["gpu", "--wheels", str(tmp_path)]) == 2
    assert "no *.whl" in capsys.readouterr().err


def test_the_environment_names_versions_also_of_what_is_not_there():
    found = describe()
    assert found["packages"]["torch"]
    assert set(found) == {"python", "platform", "packages", "gpus", "cuda_visible"}
