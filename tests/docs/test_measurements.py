"""The tables in docs/ are those of the files in docs/measurements/."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"


def test_every_table_is_what_its_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", "--check"]) == 0, capsys.readouterr().err


def test_every_file_is_shown_or_named_by_a_page() -> None:
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert not [file.name for file in (DOCS / "measurements").iterdir() if f"measurements/{file.name}" not in pages]
