"""`python launch.py` until the first process is started: what is wrong with the model is said in one line."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from worker import model_store

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), *arguments]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PAGEPLANE_RUNTIME": str(tmp_path / "run"), "PAGEPLANE_CACHE": str(tmp_path / "cache")}


def launch(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=environment)


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_model_that_does_not_exist(environment: dict[str, str]) -> None:
    done = launch(environment, "--model", "/nowhere/model")
    assert done.returncode == 1
    assert "'/nowhere/model' is no existing folder" in done.stderr
    assert done.stderr.splitlines()[-1] == "launch.py: error: the model /nowhere/model is not available"
    assert "Traceback" not in done.stderr


def test_folder_without_weights(environment: dict[str, str], tmp_path: Path) -> None:
    done = launch(environment, "--model", str(write_model(tmp_path / "model")))
    assert done.returncode == 1
    assert "holds no weights" in done.stderr and "Traceback" not in done.stderr


def test_architecture_that_is_not_supported(environment: dict[str, str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", architectures=["GPT2LMHeadModel"])
    done = launch(environment, "--model", str(folder), "--load-format", "dummy")
    assert done.returncode == 1
    assert "'GPT2LMHeadModel' is not supported" in done.stderr and "Traceback" not in done.stderr


def test_longer_sequences_than_the_model_can(environment: dict[str, str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    done = launch(environment, "--model", str(folder), "--load-format", "dummy", "--max-model-len", "129")
    assert (done.returncode, done.stderr) == (
        1,
        "launch.py: error: --max-model-len 129 is more than the model can do (128)\n",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_while_the_model_is_fetched(environment: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """Another process holds the lock of the default model, so that fetching it waits."""
    name = f"{model_store.DEFAULT_MODEL}-{model_store._GGUF_SHA256[:12]}-v{model_store._CONVERTER_VERSION}"
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    with open(models / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(command(), env=environment, stderr=subprocess.PIPE, text=True)
        supervisor = psutil.Process(process.pid)
        deadline = time.monotonic() + 20
        while not any("worker.model_store" in child.cmdline() for child in supervisor.children()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        family = supervisor.children(recursive=True)
        process.send_signal(number)
        _, error = process.communicate(timeout=5)
    assert (process.returncode, error) == (0, "")
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
