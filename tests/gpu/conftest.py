"""What only a GPU can show. Without one nothing here is collected, and the report says so: no test passes or skips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
collect_ignore_glob = [] if torch.cuda.is_available() else ["*"]


def pytest_report_collectionfinish() -> str:
    if torch.cuda.is_available():
        return f"tests/gpu: on {torch.cuda.get_device_name()}"
    return "tests/gpu: not collected, torch sees no CUDA device here; docs/gpu.md says how to run it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
