"""Loads as they were recorded: arrival times, lengths and, where a trace has them, what prompts share.

A trace is JSON lines or CSV with a header. Its columns tell its form (names as below, in any case):
  form      arrival (unit)        prompt          answer            what is shared
  mooncake  timestamp (ms)        input_length    output_length     hash_ids
  azure     TIMESTAMP (ISO 8601)  ContextTokens   GeneratedTokens   -
  burstgpt  Timestamp (s)         Request tokens  Response tokens   -
  plain     arrival_s (s)         input_len       output_len        prefix_ids
An id stands for `block_size` tokens of the prompt, in order: prompts with equal ids at their front share those tokens.
What the ids don't cover is random. Other columns are ignored. Arrivals count from the earliest one.
Sources: the traces of Qin et al. 2025, Mooncake (FAST 25); of Patel et al. 2024, Splitwise (Azure LLM inference trace);
of Wang et al. 2025, BurstGPT.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace can't be read. The message says the file, the row (1-based, the header not counted), and why."""


@dataclass(frozen=True)
class TraceRow:
    arrival_s: float  # from the first arrival of the trace
    input_len: int  # tokens
    output_len: int  # tokens
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Form:
    name: str
    arrival: str  # names of columns, in lower case
    input_len: str
    output_len: str
    block_ids: str | None
    seconds: Callable[[Any], float]  # of a value of the arrival column


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


def _iso_time(value: Any) -> float:
    return (datetime.fromisoformat(str(value)).replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


FORMS = (
    Form("mooncake", "timestamp", "input_length", "output_length", "hash_ids", _milliseconds),
    Form("azure", "timestamp", "contexttokens", "generatedtokens", None, _iso_time),
    Form("burstgpt", "timestamp", "request tokens", "response tokens", None, float),
    Form("plain", "arrival_s", "input_len", "output_len", "prefix_ids", float),
)


def read_trace(path: Path) -> tuple[str, list[TraceRow]]:
    """The name of its form, and its rows in order of their arrivals. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path}: {error}") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, name: str) -> tuple[str, list[TraceRow]]:
    """As read_trace, of its contents; `name` is for messages."""
    form: Form | None = None
    rows: list[TraceRow] = []
    for number, cells in _records(text, name):
        form = form or _form_of(cells, name)
        try:
            rows.append(_row(form, cells))
        except ValueError as error:
            raise TraceError(f"trace {name}, row {number}: {error}") from error
    if form is None:
        raise TraceError(f"trace {name} has no rows")
    first = min(row.arrival_s for row in rows)
    rows = [TraceRow(row.arrival_s - first, row.input_len, row.output_len, row.block_ids) for row in rows]
    return form.name, sorted(rows, key=lambda row: row.arrival_s)


def _records(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, column in lower case -> value) of each row."""
    if text.lstrip().startswith("{"):
        lines = [line for line in text.splitlines() if line.strip()]
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TraceError(f"trace {name}, row {number}: no JSON: {error}") from error
            if not isinstance(record, dict):
                raise TraceError(f"trace {name}, row {number}: not a JSON object")
            yield number, {str(key).lower(): value for key, value in record.items()}
        return
    try:
        for number, record in enumerate(csv.DictReader(text.splitlines()), start=1):
            yield number, {str(key).strip().lower(): value for key, value in record.items() if key is not None}
    except csv.Error as error:
        raise TraceError(f"trace {name}: no CSV: {error}") from error


def _form_of(cells: dict[str, Any], name: str) -> Form:
    for form in FORMS:
        if {form.arrival, form.input_len, form.output_len} <= cells.keys():
            return form
    known = "; ".join(f"{form.name}: {form.arrival}, {form.input_len}, {form.output_len}" for form in FORMS)
    raise TraceError(f"trace {name} has the columns {', '.join(cells)}; known are {known}")


def _row(form: Form, cells: dict[str, Any]) -> TraceRow:
    arrival = cells.get(form.arrival)
    try:
        arrival_s = form.seconds(arrival)
    except (TypeError, ValueError):
        arrival_s = float("nan")
    if not abs(arrival_s) < float("inf"):
        raise ValueError(f"{form.arrival} is {arrival!r}, no time")
    return TraceRow(
        arrival_s,
        _whole(cells, form.input_len, least=1),
        _whole(cells, form.output_len, least=1),
        _ids(cells, form.block_ids) if form.block_ids else (),
    )


def _whole(cells: dict[str, Any], column: str, least: int) -> int:
    value = cells.get(column)
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")  # type: ignore[arg-type]
        if number == int(number) >= least:
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{column} is {value!r}; it must be a whole number of at least {least}")


def _ids(cells: dict[str, Any], column: str) -> tuple[int, ...]:
    """A JSON list, or in CSV its text, or numbers with spaces between them; nothing: no ids."""
    value = cells.get(column)
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.lstrip().startswith("[") else [int(word) for word in value.split()]
        ids = tuple(value or ())
        if all(type(number) is int and number >= 0 for number in ids):
            return ids
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{column} is {value!r}; it must be a list of whole numbers that are not negative")
