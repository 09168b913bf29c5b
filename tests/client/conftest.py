"""A model folder and a scripted server for every test of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedServer
from tiny_tokenizers import write_folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer("tcp://127.0.0.1:0", model_folder) as running:
        yield running
