"""What cannot be started says why in one line, exits with a code and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from protocol.config import EngineConfig
from tests.integration.deployment import ROOT
from tests.tiny_model import tiny_model

LIMIT_S = 60.0


class Start:
    """One run of a command that is expected to fail. `line`: the last thing it said."""

    def __init__(self, runtime: Path, command: Sequence[str]):
        environment = {**os.environ, "PAGEPLANE_RUNTIME": str(runtime), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=runtime.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        self.code, self.text = done.returncode, done.stdout
        self.line = self.text.strip().splitlines()[-1]
        assert not _with_runtime(runtime), "left behind"
        assert not runtime.is_dir() or not list(runtime.iterdir()), "files left behind"


def _with_runtime(runtime: Path) -> list[psutil.Process]:
    """Running processes of the deployment that uses this runtime folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PAGEPLANE_RUNTIME") == str(runtime):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def launch(tmp_path: Path, *flags: str) -> Start:
    return Start(tmp_path / "run", [str(ROOT / "launch.py"), *flags])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a good model, to be spoilt."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@pytest.mark.parametrize(
    ("removed", "says"),
    [
        ("model.safetensors", "{model} holds no weights: there is no *.safetensors file in it"),
        ("config.json", "{model} is no model folder: it holds no config.json"),
    ],
)
def test_incomplete_model_folder_is_refused_for_what_it_lacks(
    tmp_path: Path, model: Path, removed: str, says: str
) -> None:
    (model / removed).unlink()
    start = launch(tmp_path, "--model", str(model))
    assert start.code == 1
    assert says.format(model=model) in start.text
    assert "Traceback" not in start.text
    assert str(model) in start.line


def test_architecture_that_is_not_supported_is_named(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    start = launch(tmp_path, "--model", str(model))
    assert start.code == 1
    assert "architecture 'OtherForCausalLM' is not supported; supported are LlamaForCausalLM" in start.text


@pytest.mark.parametrize(
    "spoilt", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}', '{"architectures": 5}', "\xff"]
)
def test_config_that_is_no_config_is_refused_by_its_path(tmp_path: Path, model: Path, spoilt: str) -> None:
    (model / "config.json").write_bytes(spoilt.encode("latin-1"))
    start = launch(tmp_path, "--model", str(model))
    assert start.code == 1
    assert str(model / "config.json") in start.text
    assert "Traceback" not in start.text


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--model", "/no/such/folder"], 1, "model '/no/such/folder' is no existing folder or .gguf file"),
        (["--model", "{tiny}", "--max-model-len", "2049"], 1, "2049 is more than the model can do (2048)"),
        (["--model", "{tiny}", "--bogus"], 2, "unrecognized arguments: --bogus"),
        (["--model", "{tiny}", "--kv-memory", "much"], 2, "'much' is no amount of memory"),
        (["--model", "{tiny}", "--ready-file", "/no/such/folder/file"], 1, "--ready-file /no/such/folder/file cannot"),
        (["--model", "{tiny}", "--ready-file", "/"], 1, "--ready-file / cannot be written: Is a directory"),
        (["--config", "/no/such/settings"], 2, "configuration /no/such/settings: "),
    ],
)
def test_wrong_flag_is_refused_with_its_value(tmp_path: Path, flags: list[str], code: int, says: str) -> None:
    start = launch(tmp_path, *(flag.format(tiny=tiny_model()) for flag in flags))
    assert start.code == code
    assert says in start.text
    assert "Traceback" not in start.text
    assert start.line.startswith("launch.py: error: ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-memory", "1"], "KV memory (1) holds 0 blocks; at least 2 of 4096 bytes are needed"),
        (["--attention-backend", "bogus"], "no attention backend 'bogus'; there are triton, cpu, torch, or auto"),
    ],
)
def test_worker_that_cannot_serve_ends_the_start_at_once_and_says_why(
    tmp_path: Path, flags: list[str], says: str
) -> None:
    start = launch(tmp_path, "--model", str(tiny_model()), "--workers", "1", *flags)
    assert start.code == 1
    assert start.line == f"launch.py: error: no worker can start: worker-0: exit code 78: {says}"
    assert start.text.count("worker-0 started") == 1


def test_damaged_weights_are_named_by_file(tmp_path: Path, model: Path) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(20_000)
    start = launch(tmp_path, "--model", str(model), "--workers", "1")
    assert start.code == 1
    assert f"{model / 'model.safetensors'} is no readable safetensors file" in start.line


def test_runtime_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file is in the way")
    start = launch(tmp_path, "--model", str(tiny_model()))
    assert start.code == 1
    assert start.line == f"launch.py: error: runtime folder {tmp_path / 'run'}: File exists"


def test_busy_address_is_named(tmp_path: Path) -> None:
    """The scheduler's own words: launch.py gives every deployment addresses of its own, so none is ever busy there."""
    config = tmp_path / "config.json"
    EngineConfig(model=str(tiny_model())).save(config)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "client.sock"))
        other.listen()
        start = Start(tmp_path / "run", ["-m", "scheduler", "--config", str(config), "--runtime", str(tmp_path)])
    assert start.code == 1
    assert start.line.endswith(f"cannot listen on ipc://{tmp_path}/client.sock: another process listens there")


def test_client_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    start = Start(tmp_path / "run", ["-m", "client", "hello"])
    assert start.code == 1
    assert start.line.startswith("error: no running server found")
    assert start.line.endswith("start one with: python launch.py --workers 2")
