"""docs/wire.md says what the codec does: every frame, every size, every field of every message."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()

EXAMPLE = re.compile(r"```python\n(?P<source>.*?)```\s+Frame of (?P<size>\d+) bytes:\s+```text\n(?P<dump>.*?)```", re.S)
EXAMPLES = [match.groupdict() for match in EXAMPLE.finditer(TEXT)]

STRUCTS = {
    name: kind
    for name, kind in vars(m).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not name.startswith("_")
}

DECODERS = (
    codec.worker_to_scheduler,
    codec.scheduler_to_worker,
    codec.client_to_scheduler,
    codec.scheduler_to_client,
    codec.supervisor_to_scheduler,
    codec.scheduler_to_supervisor,
)


def bytes_of(dump: str) -> bytes:
    """The bytes of a dump: hex pairs in front of each line, a gap, then words."""
    pairs = [re.match(r"(?:[0-9a-f]{2} ?)+(?= |$)", line) for line in dump.splitlines() if line.strip()]
    assert all(pairs), dump
    return bytes.fromhex(" ".join(match[0] for match in pairs if match))


def message_of(example: dict[str, str]) -> msgspec.Struct:
    names = {**STRUCTS, "pack": pack, "__builtins__": {}}
    message = eval(example["source"], names)
    assert isinstance(message, msgspec.Struct)
    return message


def section(name: str) -> str:
    """The text under the heading that ends in `name`."""
    found = re.search(rf"^### (?:`(?P<tag>\w+)` )?{name}\n(?P<body>.*?)(?=^##|\Z)", TEXT, re.S | re.M)
    assert found, f"docs/wire.md has no section on {name}"
    assert found["tag"] == STRUCTS[name].__struct_config__.tag, f"tag of {name}"
    return found["body"]


def test_there_are_examples_of_the_messages_of_every_step() -> None:
    kinds = [type(message_of(example)) for example in EXAMPLES]
    assert {m.SchedulerOutput, m.ModelRunnerOutput, m.TokenBatch, m.Submit} <= set(kinds)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["source"].split("(")[0])
def test_the_codec_makes_the_frame_that_is_shown(example: dict[str, str]) -> None:
    frame = codec.encode(message_of(example))
    assert bytes_of(example["dump"]).hex(" ") == frame.hex(" ")
    assert int(example["size"]) == len(frame)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["source"].split("(")[0])
def test_the_frame_that_is_shown_is_read_back(example: dict[str, str]) -> None:
    message, frame = message_of(example), bytes_of(example["dump"])
    read = []
    for decoder in DECODERS:
        try:
            read.append(decoder.decode(frame))
        except codec.MalformedFrame:
            continue  # not a message of this plane and direction
    assert read == [message]


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_stands_in_its_table_in_order(name: str) -> None:
    documented = re.findall(r"^\| `(\w+)` \|", section(name), re.M)
    assert tuple(documented) == STRUCTS[name].__struct_fields__


def test_plans_have_the_sizes_of_the_table() -> None:
    table = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", TEXT, re.M)
    assert len(table) >= 4
    for running, blocks, size in (map(int, line) for line in table):
        assert blocks == running // 16
        plan = m.SchedulerOutput(
            epoch=0,
            step=1000,
            finish_rows=b"",
            admit=(),
            grow_rows=pack(np.arange(0, running, 16)),
            grow_counts=b"",
            grow_ids=(pack(np.arange(blocks)),),
            digest=2**63 + 1,
            copy_src=b"",
            copy_dst=b"",
            prefill_rows=b"",
            prefill_num_tokens=b"",
            hold_rows=b"",
        )
        assert len(codec.encode(plan)) == size


def test_the_limits_are_those_of_the_code() -> None:
    assert codec.MAX_FRAME_BYTES == 64 * 2**20 and "64 MiB" in TEXT
    assert f"protocol version ({m.PROTOCOL_VERSION})" in TEXT
