"""What README.md and docs/ point to exists: files, `file.py:symbol`, tests, flags, folders."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from client.commands.options import add_sampling, parser
from supervisor.flags import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SYMBOL = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
PLAIN_PATH = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|svg|json|toml))`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def symbols(path: Path) -> frozenset[str]:
    """Functions, classes, methods and assigned names of a module, dotted."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_symbol_named_with_its_file_exists(page: Path) -> None:
    missing = [
        f"{path}:{symbol}"
        for path, symbol in SYMBOL.findall(page.read_text())
        if not (ROOT / path).is_file() or symbol not in symbols(ROOT / path)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_in_backquotes_exists(page: Path) -> None:
    assert not [path for path in PLAIN_PATH.findall(page.read_text()) if not (ROOT / path).exists()]


def test_the_readme_lists_every_flag_of_launch_and_no_other() -> None:
    listed = set(re.findall(r"^\| `(--[\w-]+)", (ROOT / "README.md").read_text(), re.M))
    flags = {option for action in _parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert listed == flags


def test_the_readme_lists_every_sampling_flag_of_the_client() -> None:
    command = parser("", "")
    add_sampling(command)
    flags = {option for action in command._actions for option in action.option_strings} - {"-h", "--help"}
    text = (ROOT / "README.md").read_text()
    assert not [flag for flag in flags if f"`{flag}" not in text]


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall((ROOT / "README.md").read_text())}
    assert {name(page) for page in PAGES[1:]} <= linked


def test_the_commands_stand_as_they_are_run() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "pip install -e . && python launch.py --workers 2" in lines
    assert "pip install -e '.[test]' && pytest" in lines


def test_the_walkthrough_names_a_test_for_every_idea() -> None:
    ideas = re.split(r"^## ", (ROOT / "docs" / "walkthrough.md").read_text(), flags=re.M)[1:]
    assert len(ideas) >= 15
    assert not [idea.splitlines()[0] for idea in ideas if "`tests/" not in idea]
