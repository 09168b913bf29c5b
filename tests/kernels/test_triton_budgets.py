"""The compile check: what is shipped is in the documents, each variant has a budget, and a broken one is found."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_ops import variants  # decides how the kernels are imported

from kernels.triton.budgets import ROWS, TARGETS, Budget, Measured, budget_of, problems
from kernels.triton.compile_check import (
    BUDGETS_HEADING,
    VARIANTS_HEADING,
    Result,
    main,
    table_of_budgets,
    table_of_variants,
    with_table,
)

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kernels.md").read_text()


def rows_under(heading: str) -> list[str]:
    """The lines of the table under a heading of docs/kernels.md, without its head."""
    section = DOCUMENT.partition(f"\n{heading}\n")[2].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_the_documents_table_holds_the_shipped_variants_and_no_other() -> None:
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows_under(VARIANTS_HEADING)]
    assert [row[0] for row in cells] == [str(variant) for variant in variants.VARIANTS]
    for row, variant in zip(cells, variants.VARIANTS, strict=True):
        compiled = {target for target, cell in zip(TARGETS, row[1:], strict=True) if cell != "–"}
        assert compiled == variant.targets, variant


def test_the_documents_budgets_are_those_that_are_checked() -> None:
    assert rows_under(BUDGETS_HEADING) == table_of_budgets().splitlines()[2:]


def test_every_variant_has_a_name_of_its_own_and_a_budget_on_each_target() -> None:
    names = [str(variant) for variant in variants.VARIANTS]
    assert len(set(names)) == len(names)
    used = set()
    for variant in variants.VARIANTS:
        assert variant.targets, variant
        for name in variant.targets:
            budget = budget_of(name, variant.kind, variant.call(TARGETS[name]).tile_elements)
            assert budget.spill_bytes == 0
            used.add(id(budget))
    assert [row for row in ROWS if id(row.budget) not in used] == []  # nor is there a budget for nothing
    with pytest.raises(KeyError, match="no budget for magic on sm_90"):
        budget_of("sm_90", "magic", 0)


GOOD = Measured(registers=100, spill_bytes=0, shared_bytes=50 * 1024, kv_buffers=2, load_bytes=16, matrix_units="wgmma")
BUDGET = Budget(100, 50, 2, 16, "wgmma")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"spill_bytes": 8}, ["8 bytes spilled"]),
        ({"registers": 101}, ["101 registers, budget 100"]),
        ({"shared_bytes": 51201}, ["51201 bytes of shared memory, budget 51200"]),
        ({"kv_buffers": 1}, ["1 K/V buffers, at least 2 wanted"]),
        ({"load_bytes": 8}, ["loads of 8 bytes, at least 16 wanted"]),
        ({"matrix_units": "mma"}, ["no wgmma, but mma"]),
        ({"matrix_units": None, "registers": 255}, ["255 registers, budget 100", "no wgmma"]),
    ],
)
def test_each_way_to_break_a_budget_is_found(change: dict[str, object], found: list[str]) -> None:
    assert problems(dataclasses.replace(GOOD, **change), BUDGET, TARGETS["sm_90"]) == found


def test_no_budget_allows_more_shared_memory_than_there_is() -> None:
    measured = dataclasses.replace(GOOD, shared_bytes=65 * 1024)
    generous = dataclasses.replace(BUDGET, shared_kib=100)
    assert problems(measured, generous, TARGETS["gfx942"]) == ["66560 bytes of shared memory, budget 65536"]


def test_a_table_is_renewed_where_it_stands() -> None:
    document = "a\n\n## One\n\nText.\n\n| old |\n|---|\n| 1 |\n\nmore\n\n## Two\n\n| stays |\n"
    assert with_table(document, "## One", "| new |\n") == document.replace("| old |\n|---|\n| 1 |\n", "| new |\n")
    for heading, text in (("## Three", document), ("## One", "a\n\n## One\n\n## Two\n\n| stays |\n")):
        with pytest.raises(ValueError, match=f"no table under '{heading}'"):
            with_table(text, heading, "| new |\n")


def test_a_variant_that_is_not_shipped_on_a_target_has_a_dash() -> None:
    result = Result(str(variants.VARIANTS[0]), "sm_90", BUDGET, GOOD, ())
    first = table_of_variants([result]).splitlines()[2]
    assert first == f"| {variants.VARIANTS[0]} | – | 100 · 50 · 2 · 16 · wgmma | – |"


SCRIPT = """
import dataclasses, sys
from kernels.triton import budgets, compile_check
chosen = ["--target", *sys.argv[2:], "--only", sys.argv[1]]
assert compile_check.main(chosen) == 0
budgets.ROWS = tuple(
    dataclasses.replace(row, budget=dataclasses.replace(row.budget, registers=1)) for row in budgets.ROWS
)
assert compile_check.main([*chosen, "--jobs", "1"]) == 1
"""


def test_a_shipped_variant_compiles_within_its_budget_and_not_within_one_register() -> None:
    """In a process of its own: here the kernels may be interpreted, and those cannot be compiled."""
    command = [sys.executable, "-c", SCRIPT, "decode bf16 D=64 G=3 page 16", "sm_90", "gfx942"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for verdict, closing, printed in ((" ok", ", 0 over", lines[:3]), (", budget 1", ", 2 over", lines[3:])):
        assert [line.split()[:2] for line in printed[:2]] == [["sm_90", "decode"], ["gfx942", "decode"]]
        assert all(line.endswith(verdict) for line in printed[:2])
        assert f"{closing} budget" in printed[2]


def test_a_name_that_fits_no_variant_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "magic"])
    assert "no variant is called 'magic'" in capsys.readouterr().err


def test_the_document_gets_no_table_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "decode", "--markdown", "docs/kernels.md"])
    assert "all variants on all targets" in capsys.readouterr().err
