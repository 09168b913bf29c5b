"""Which backend is chosen, what the line says, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import registry, selector
from kernels.__main__ import main
from kernels.selector import AttentionShape, NoBackend, rank_backends, select_backend, why_not

CPU = {"device": "cpu", "dtype": torch.bfloat16, "head_dim": 64, "block_size": 16}


def test_auto_takes_the_compiled_kernel_on_a_cpu_and_says_why_not_each_other() -> None:
    selection = select_backend("auto", **CPU, window=128, soft_cap=30.0, num_threads=1)
    assert selection.backend.name == "cpu"
    assert selection.rejected["torch"] == "would do, but cpu comes first"
    assert selection.rejected["triton"] == "runs on cuda, not on cpu"
    assert "\n" not in selection.reason
    assert "cpu (chosen automatically)" in selection.reason
    assert "cpu, bfloat16, head_dim 64, block 16, window 128, soft cap 30" in selection.reason
    for name, why in selection.rejected.items():
        assert f"not {name}: {why}" in selection.reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 24}, "needs a head_dim that is a multiple of 16, not 24"),
        ({"head_dim": 1024}, "head_dim is at most 512, not 1024"),
        ({"dtype": torch.float64}, "has no float64"),
    ],
)
def test_auto_falls_back_to_torch_where_no_kernel_fits(change: dict, why: str) -> None:
    selection = select_backend("auto", **{**CPU, **change})
    assert selection.backend.name == "torch"
    assert selection.rejected["cpu"] == why


def test_a_backend_asked_for_is_taken_even_if_another_comes_first() -> None:
    selection = select_backend("torch", **CPU)
    assert selection.backend.name == "torch"
    assert selection.rejected["cpu"] == "torch was asked for"


def test_a_backend_asked_for_that_cannot_is_refused_with_the_reason() -> None:
    with pytest.raises(NoBackend, match=r"attention backend cpu cannot run .*head_dim 24.*multiple of 16"):
        select_backend("cpu", **{**CPU, "head_dim": 24})
    with pytest.raises(NoBackend, match=r"triton cannot run .*runs on cuda, not on cpu"):
        select_backend("triton", **CPU)
    with pytest.raises(NoBackend, match="no attention backend 'flash'; there are triton, cpu, torch, or auto"):
        select_backend("flash", **CPU)


def test_every_limit_of_a_backend_is_enforced() -> None:
    limited = dataclasses.replace(
        registry.find("torch"), name="limited", block_size_multiple=16, window=False, soft_cap=False, max_head_dim=128
    )
    shape = AttentionShape("cpu", torch.float32, 64, 16)
    assert why_not(limited, shape) is None
    for change, why in [
        ({"block_size": 24}, "block size that is a multiple of 16, not 24"),
        ({"window": 8}, "no sliding window"),
        ({"soft_cap": 1.0}, "no soft cap"),
        ({"head_dim": 256}, "at most 128"),
    ]:
        assert why in (why_not(limited, dataclasses.replace(shape, **change)) or "")
    assert why_not(dataclasses.replace(limited, needs=("no_such_module",)), shape) == "no_such_module is not installed"
    assert why_not(dataclasses.replace(limited, module="kernels.nowhere"), shape) == "not part of this build"
    assert why_not(dataclasses.replace(limited, unavailable=lambda: "no such chip"), shape) == "no such chip"


def test_with_no_backend_left_the_error_names_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "BACKENDS", [spec for spec in registry.BACKENDS if spec.name != "torch"])
    with pytest.raises(NoBackend, match="triton: runs on cuda, not on cpu; cpu: needs a head_dim"):
        rank_backends("auto", AttentionShape("cpu", torch.float32, 24, 16))


def test_the_command_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(spec.name in shown and spec.summary in shown for spec in registry.BACKENDS)


def test_the_command_explains_a_choice_and_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--head-dim", "64", "--dtype", "bfloat16", "--device", "cpu"]) == 0
    assert "not torch: would do, but cpu comes first" in capsys.readouterr().out
    assert main(["--head-dim", "40", "--attention-backend", "cpu"]) == 1
    assert "multiple of 16, not 40" in capsys.readouterr().out
