"""`python -m client top`: what it shows of known numbers, and a real terminal: keys and another size."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from client.commands.top import Reading, quantile, render
from protocol import messages as m
from protocol.histograms import BOUNDS, STAGE_S, STAGES
from tests.client.scripted_server import STATUS, ScriptedServer
from tests.tiny_model import tiny_model

ROOT = Path(__file__).parents[2]


def snapshot(generated: int = 77, **changes: object) -> m.MetricsSnapshot:
    """The scripted status, whose tokens are 20 ms apart and whose steps compute for 8 ms."""
    replica = msgspec.structs.replace(STATUS.replicas[0], generated_tokens=generated, **changes)

    def at(bounds: tuple[float, ...], value: float) -> m.HistogramData:
        place = next(index for index, bound in enumerate(bounds) if bound >= value)
        counts = [0] * (len(bounds) + 1)
        counts[place] = generated
        return m.HistogramData(tuple(counts), generated * value)

    histograms = {name: at(bounds, 0.02) for name, bounds in BOUNDS.items()}
    metrics = m.ReplicaMetrics(0, 1000, histograms, {stage: at(STAGE_S, 0.008) for stage in STAGES})
    return m.MetricsSnapshot(msgspec.structs.replace(STATUS, replicas=(replica,)), {}, (metrics,))


def shown(now: Reading, before: Reading | None = None, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render("tiny", now, before))
    return console.export_text()


def test_the_numbers_are_those_of_the_server() -> None:
    text = shown(Reading(snapshot(), 10.0))
    assert "tiny  up 0:01:01  1 of 1 replicas  3 requests, 1 waiting  – tokens/s" in text
    (line,) = [line for line in text.splitlines() if "40 / 100" in line]
    assert re.search(r"0 .*ready .*█+·+ .*40 / 100 .* 2 .* – .* 25% .* 4 .* 1 ", line)
    bar = re.search(r"█+·+", line)
    assert bar and bar[0].count("█") == round(0.4 * len(bar[0]))
    assert "worker-0" in text and "4242" in text and "float32" in text
    assert "forward" in text


def test_speed_is_what_was_made_between_two_readings() -> None:
    text = shown(Reading(snapshot(277), 12.0), Reading(snapshot(77), 10.0))
    assert text.count("100") >= 2 and "100 tokens/s" in text
    again = shown(Reading(snapshot(5), 14.0), Reading(snapshot(277), 12.0))
    assert "0 tokens/s" in again, "a scheduler that began anew is no negative speed"


def test_cached_blocks_are_told_from_free_ones() -> None:
    text = shown(Reading(snapshot(free_blocks=90, cached_blocks=60), 1.0))
    bar = re.search(r"(█+)(▒+)(·+)", text)
    assert bar
    used, cached, free = (len(part) for part in bar.groups())
    assert abs(used / (used + cached + free) - 0.1) < 0.05 and abs(cached / (used + cached + free) - 0.5) < 0.05


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_fits_its_window(width: int) -> None:
    text = shown(Reading(snapshot(), 1.0), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "ready" in text and "█" in text and "worker-0" in text


def test_a_replica_without_a_worker_has_no_blocks() -> None:
    text = shown(Reading(snapshot(state="down", free_blocks=0, total_blocks=0, cached_blocks=0), 1.0))
    assert "0 of 1 replicas" in text and "down" in text and "40 / 100" not in text


def test_quantiles_are_spread_within_their_bucket() -> None:
    assert quantile((1.0, 2.0), [0, 4, 0], 0.5) == 1.5
    assert quantile((1.0, 2.0), [2, 0, 2], 0.5) == 1.0
    assert quantile((1.0, 2.0), [0, 0, 3], 0.5) == 2.0
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.GetMetrics):
            server.send(identity, snapshot())
        return isinstance(message, m.GetMetrics)

    with ScriptedServer(f"ipc://{tmp_path}/client.sock", tiny_model(), handler) as scripted:
        yield scripted


def command(server: ScriptedServer, *flags: str) -> list[str]:
    return [sys.executable, "-m", "client", "top", "--endpoint", server.endpoint, *flags]


def test_once_prints_and_ends(server: ScriptedServer) -> None:
    done = subprocess.run(command(server, "--once"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "40 / 100" in done.stdout and "\x1b" not in done.stdout


class Screen:
    """`top` in a terminal of its own."""

    def __init__(self, server: ScriptedServer, columns: int = 120):
        self.terminal, inner = pty.openpty()
        self.resize(columns)
        environment = {**os.environ, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.settings = termios.tcgetattr(inner)
        self.process = subprocess.Popen(
            command(server), stdin=inner, stdout=inner, stderr=inner, cwd=ROOT, env=environment, start_new_session=True
        )
        self._inner = inner
        self.text = ""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        os.close(self._inner)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> None:
        """Until the pattern was written since the last call."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"never written: {pattern}\n{self.text[-3000:]}"
            self.text += re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", os.read(self.terminal, 65536).decode(errors="replace"))
        self.text = ""

    def wait_end(self) -> int:
        """Its exit code; the terminal is as it was before."""
        deadline = time.monotonic() + 30
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            if select.select([self.terminal], [], [], 0.05)[0]:
                os.read(self.terminal, 65536)  # or it could not write its last words
        assert code is not None, "it does not end"
        assert termios.tcgetattr(self._inner)[3] == self.settings[3], "echo and line mode are back"
        return code


def test_q_leaves_after_a_change_of_size(server: ScriptedServer) -> None:
    with Screen(server) as screen:
        screen.wait_for("float32")
        screen.resize(70)
        os.kill(screen.process.pid, signal.SIGWINCH)
        screen.wait_for(r"epoch *┃\s*\n")  # the columns behind it have gone
        os.write(screen.terminal, b"x")
        os.write(screen.terminal, b"q")
        assert screen.wait_end() == 0


def test_ctrl_c_leaves_too(server: ScriptedServer) -> None:
    with Screen(server) as screen:
        screen.wait_for("worker-0")
        os.kill(screen.process.pid, signal.SIGINT)
        assert screen.wait_end() == 130
