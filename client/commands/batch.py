"""`python -m client batch FILE.jsonl --output FILE.jsonl`: every line answered, in the same order.

A bad line gives an error object in its place and the rest go on. Answers are written as soon as all before them are, so
what was finished when the run was cut short is in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from client.aio import AsyncClient
from client.commands.batch_line import LineError, answer, failure, read_line, read_object
from client.commands.options import parser
from client.errors import GenerationFailed, PromptError, RequestLost, RequestRejected

_ATTEMPTS = 3
"""How often a request is sent that a restarted server has lost."""

_DESCRIPTION = """\
Answer every line of a JSONL file, in the same order. A line is an object with prompt (text or token ids) or messages,
and OpenAI's fields: custom_id, max_tokens (256), temperature (1), top_p, seed, model; also top_k, min_p, min_tokens,
ignore_eos, stop_token_ids, priority, cache_salt. An answer has custom_id, text, token_ids, finish_reason and usage, or
an error. Failed lines do not change the exit code.
"""


def main(arguments: list[str]) -> int:
    """Answer the file; return the exit code."""
    command = parser(" batch", _DESCRIPTION)
    command.add_argument("input", type=Path, metavar="FILE.jsonl", help="requests, one a line")
    command.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="where the answers go")
    command.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests at a time (default: 16)")
    options = command.parse_args(arguments)
    if options.concurrency < 1:
        command.error("--concurrency must be at least 1")
    if options.output.exists() and os.path.samefile(options.input, options.output):
        command.error("--output must be another file than the input")
    with open(options.input, encoding="utf-8", errors="replace") as lines:
        total = sum(1 for line in lines if line.strip())
        lines.seek(0)
        with open(options.output, "w", encoding="utf-8") as output, _progress(total) as advance:
            batch = _Batch(lines, output, advance)
            asyncio.run(batch.run(options.endpoint, options.concurrency))
    print(f"{batch.answered} answered, {batch.failed} failed", file=sys.stderr)
    return 0


class _Batch:
    """Takes lines from one file and puts answers into another, in the same order."""

    def __init__(self, lines: TextIO, output: TextIO, advance: Callable[[], None]):
        self._lines = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        self._output = output
        self._advance = advance
        self._taken = 0
        self._written = 0
        self._done: dict[int, dict[str, Any]] = {}
        """Answers that wait for one before them, by position."""
        self.answered = 0
        self.failed = 0

    async def run(self, endpoint: str | None, concurrency: int) -> None:
        """All lines. Raises ClientError when the server is gone."""
        async with AsyncClient(endpoint) as client:
            model_name = (await client.server_info()).model_name
            await client.tokenizer()  # a missing one is no fault of any line
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(self._answer_lines(client, model_name))
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None

    async def _answer_lines(self, client: AsyncClient, model_name: str) -> None:
        for number, line in self._lines:
            position, self._taken = self._taken, self._taken + 1
            self._done[position] = await self._answer(client, model_name, number, line)
            self._advance()
            while self._written in self._done:
                self._write(self._done.pop(self._written))

    async def _answer(self, client: AsyncClient, model_name: str, number: int, text: str) -> dict[str, Any]:
        custom_id: object = None
        try:
            content = read_object(text)
            custom_id = content.get("custom_id")
            line = read_line(content, model_name)
            for attempt in range(_ATTEMPTS):
                try:
                    completion = await client.complete(
                        line.content, line.sampling, priority=line.priority, cache_salt=line.cache_salt
                    )
                    return answer(custom_id, completion)
                except RequestLost:
                    if attempt + 1 == _ATTEMPTS:
                        raise
            raise AssertionError("unreachable")
        except LineError as error:
            return failure(custom_id, number, "invalid_request", str(error), error.param)
        except PromptError as error:
            return failure(custom_id, number, "invalid_request", str(error), "messages")
        except RequestRejected as error:
            return failure(custom_id, number, error.code, error.message, error.param)
        except GenerationFailed as error:
            return failure(custom_id, number, "error", str(error))

    def _write(self, content: dict[str, Any]) -> None:
        self._output.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._output.flush()
        self._written += 1
        if "error" in content:
            self.failed += 1
        else:
            self.answered += 1


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)
