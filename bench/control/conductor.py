"""Both sides in turn: for each case A B A B A B, each side a process of its own that keeps its state between rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent


class SideFailed(RuntimeError):
    """A side could not start, ended, or could not run a case; the message says which and why."""


@dataclass(frozen=True)
class Case:
    """`label` names it in the results; `name` and `arguments` are those of the sides' functions."""

    label: str
    name: str
    arguments: dict[str, Any]


class Side:
    """A running side (see bench.control.side). A context manager."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)

    def __enter__(self) -> Side:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                self._command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise SideFailed(f"cannot run {self._command[0]}: {error.strerror}") from None
        self.name: str = self._read()["name"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def run(self, case: Case) -> dict[str, Any]:
        """What the side's function returns. Raises SideFailed."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"case": case.name, **case.arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended: reading will say so
        answer = self._read()
        if "error" in answer:
            raise SideFailed(f"{self.name} failed at {case.label}: {answer['error']}")
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{' '.join(self._command)} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def our_command() -> list[str]:
    return [sys.executable, "-m", "bench.control.ours"]


def vllm_command(python: str, model: Path) -> list[str]:
    return [python, "-m", "bench.control.vllm_side", "--model", str(model)]


def measure(
    sides: Sequence[Side], cases: Sequence[Case], rounds: int, progress: Callable[[str], None]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """answers[case label][side name][round]."""
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for case in cases:
        mine = answers[case.label] = {side.name: [] for side in sides}
        for i in range(rounds):
            for side in sides:
                progress(f"{case.label}, round {i + 1} of {rounds}: {side.name}")
                mine[side.name].append(side.run(case))
    return answers
