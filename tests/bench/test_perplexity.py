"""Perplexity against transformers' own loss on a tiny model, and what int8 does to it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.__main__ import main
from bench.perplexity import perplexity, text
from tests.tiny_model import write_tiny_model


def test_it_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    token_ids = torch.randint(2, 200, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    with torch.inference_mode():
        for start in (0, 16, 32):
            window = torch.tensor([token_ids[start : start + 16]])
            losses.append(float(theirs(window, labels=window).loss) * (window.shape[1] - 1))
    expected = math.exp(sum(losses) / (15 + 15 + 8))
    assert perplexity(folder, token_ids, 16, "float32", "none") == pytest.approx(expected, rel=1e-4)
    assert perplexity(folder, token_ids, 16, "bfloat16", "int8") == pytest.approx(expected, rel=0.2)


def test_the_command_compares_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    out = tmp_path / "p.json"
    arguments = ["perplexity", "--model", str(folder), "--tokens", "48", "--window", "16", "--json", str(out)]
    assert main([*arguments, "--variant", "bfloat16", "--variant", "int8"]) == 0
    result = json.loads(out.read_text())
    assert result["text"]["tokens"] == 48 and list(result["variants"]) == ["bfloat16", "int8"]
    assert result["variants"]["bfloat16"]["ratio"] == 1
    assert "int8" in capsys.readouterr().out
    assert main(["perplexity", "--tokens", "1"]) == 2
    assert main(["perplexity", "--model", str(tmp_path / "nowhere")]) == 1


def test_the_text_is_prose() -> None:
    assert len(text()) > 100_000 and "statement" in text()
