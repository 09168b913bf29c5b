"""Every draw keeps to the grammar, whatever the logits say; rows stay apart; a bad grammar harms its row alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client.tokenizer import Tokenizer
from protocol.arrays import pack
from protocol.grammar import BadGrammar, check_grammar, open_vocabulary
from protocol.messages import NewRequestData, SamplingParams, SchedulerOutput
from protocol.messages import StructuredOutputsParams as Shape
from tests.tiny_model import IM_END, VOCAB_SIZE, tiny_model
from worker.guided import Guides
from worker.logit_rules import GRAMMAR_FAILED, LogitRules
from worker.sampler import SamplingBatch, sample

TOKENIZER = Tokenizer(tiny_model())
VOCABULARY = open_vocabulary(tiny_model(), VOCAB_SIZE, (IM_END,))


def plan(admit: tuple[NewRequestData, ...] = (), finish: tuple[int, ...] = ()) -> SchedulerOutput:
    empty = b""
    return SchedulerOutput(0, 0, pack(finish), admit, empty, empty, (), 0, empty, empty, empty, empty, empty)


def entering(row: int, shape: Shape | None, output: list[int], **sampling: Any) -> NewRequestData:
    params = SamplingParams(structured_outputs=shape, stop_token_ids=(IM_END,), **sampling)
    return NewRequestData(row, pack([1, *output]), 1, 0, (), params)


def rules_of(num_threads: int = 1) -> LogitRules:
    return LogitRules(Guides(tiny_model(), VOCAB_SIZE, (IM_END,), num_threads))


class Row:
    """Draws from random logits, in a row of its own, until the end token."""

    def __init__(self, rules: LogitRules, number: int, seed: int):
        self.rules, self.number, self.seed = rules, number, seed
        self.output: list[int] = []

    def step(self, temperature: float = 1.0) -> int:
        position = 1 + len(self.output)
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * self.seed + position)) * 3
        rows = np.array([self.number])
        self.rules.apply(logits, rows, np.array([position]))
        params = SamplingBatch(
            np.array([temperature], np.float32),
            np.zeros(1, np.int32),
            np.ones(1, np.float32),
            np.zeros(1, np.float32),
            np.array([self.seed], np.uint64),
        )
        drawn = sample(logits, params, torch.tensor([position])).numpy().astype(np.int32)
        token = int(self.rules.name_failures(rows, drawn)[0])
        self.rules.note(rows, np.array([token], dtype=np.int32))
        self.output.append(token)
        return token

    def run(self, most: int = 3000) -> str:
        while self.step() != IM_END:
            assert self.output[-1] >= 0 and len(self.output) < most
        return TOKENIZER.decode(self.output)


def run(shape: Shape, seed: int, **sampling: Any) -> str:
    rules = rules_of()
    rules.follow(plan((entering(0, shape, [], **sampling),)))
    return Row(rules, 0, seed).run()


LEAF = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 1234},
        {"enum": ["a", 'with "quotes"', "日本", 7, None]},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]$"},
    ]
)
SCHEMA = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}, inner),
        st.builds(
            lambda parts: {
                "type": "object",
                "properties": {f"p{i}": part for i, part in enumerate(parts)},
                "required": [f"p{i}" for i in range(len(parts))],
                "additionalProperties": False,
            },
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=5,
)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON schema that SCHEMA makes."""
    match schema.get("type"):
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return len(value) <= schema.get("maxLength", 99) and bool(re.search(schema.get("pattern", ""), value))
        case "array":
            return 1 <= len(value) <= 3 and all(conforms(item, schema["items"]) for item in value)
        case "object":
            parts = schema["properties"]
            return value.keys() == parts.keys() and all(conforms(value[name], parts[name]) for name in parts)
    return value in schema["enum"]


@settings(max_examples=25, deadline=None)
@given(SCHEMA, st.integers(0, 10**6))
def test_a_schema_gives_json_that_conforms_to_it_every_time(schema: dict[str, Any], seed: int) -> None:
    assert conforms(json.loads(run(Shape(json=json.dumps(schema)), seed)), schema)


@pytest.mark.parametrize("regex", ["[a-c]{2,6}", r"(\d{3}-){2}x?", "yes|no|maybe", "日(本|語){1,3}"])
def test_a_regex_matches_the_whole_output(regex: str) -> None:
    for seed in range(5):
        assert re.fullmatch(regex, run(Shape(regex=regex), seed))


def test_a_choice_is_one_of_them() -> None:
    choices = ("plain", 'a"b', "c\\d", "日本", "new\nline", "/x/", "{{}}", "start: x")
    found = {run(Shape(choice=choices), seed) for seed in range(40)}
    assert found <= set(choices) and len(found) > 3


def test_any_object_is_an_object() -> None:
    rules = rules_of()
    rules.follow(plan((entering(0, Shape(json_object=True), []),)))
    row = Row(rules, 0, 5)
    for _ in range(200):
        if row.step() == IM_END:
            assert isinstance(json.loads(TOKENIZER.decode(row.output)), dict)
            break
    assert TOKENIZER.decode(row.output).lstrip().startswith("{")


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_row_that_is_admitted_again_goes_on_where_it_was(cut: int) -> None:
    shape = Shape(json=json.dumps({"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 4}))
    whole, moved = rules_of(), rules_of()
    whole.follow(plan((entering(0, shape, []),)))
    golden = Row(whole, 0, 8)
    for _ in range(40):
        golden.step()
    moved.follow(plan((entering(3, shape, golden.output[:cut]),)))
    second = Row(moved, 3, 8)
    second.output = golden.output[:cut]
    while len(second.output) < 40:
        second.step()
    assert second.output == golden.output


def test_the_end_waits_for_min_tokens_unless_nothing_else_is_left() -> None:
    rules = rules_of()
    rules.follow(
        plan((entering(0, Shape(regex="a*"), [], min_tokens=5), entering(1, Shape(regex="ab"), [], min_tokens=5)))
    )
    open_end, fixed = Row(rules, 0, 1), Row(rules, 1, 1)
    for _ in range(5):
        assert open_end.step() == ord("a")
    assert [fixed.step() for _ in range(4)] == [ord("a"), ord("b"), IM_END, IM_END]


def test_masks_made_in_parallel_are_those_made_one_by_one() -> None:
    shapes = [Shape(regex="[a-m]+"), Shape(regex="[n-z"), Shape(json='{"type": "boolean"}'), Shape(choice=("b", "cd"))]
    found = []
    for num_threads in (1, 3):
        rules = rules_of(num_threads)
        rules.follow(plan(tuple(entering(row, shape, [], min_tokens=1) for row, shape in enumerate(shapes))))
        logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
        rules.apply(logits, np.arange(4), np.ones(4, dtype=np.int64))
        found.append(logits)
    assert torch.equal(found[0].nan_to_num(nan=5.0), found[1].nan_to_num(nan=5.0))
    assert torch.isnan(found[0][1]).all() and torch.isfinite(found[0][3]).sum() == 2


def test_rows_without_a_grammar_are_left_bit_for_bit_beside_rows_with_one() -> None:
    rules = rules_of()
    rules.follow(plan((entering(1, Shape(regex="[ab]+"), []),)))
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rules.apply(logits, np.array([0, 1, 2]), np.array([1, 1, 1]))
    assert (logits[[0, 2]] == before[[0, 2]]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [ord("a"), ord("b")]
    assert (logits[1, [ord("a"), ord("b")]] == before[1, [ord("a"), ord("b")]]).all()


@pytest.mark.parametrize(
    "shape", [Shape(regex="[a-z"), Shape(json="{"), Shape(json='{"type": "objec"}'), Shape(choice=("",)), Shape()]
)
def test_a_bad_grammar_fails_its_row_and_no_other(shape: Shape) -> None:
    rules = rules_of()
    rules.follow(plan((entering(0, shape, []), entering(1, Shape(regex="ok"), []))))
    assert Row(rules, 0, 1).step() == GRAMMAR_FAILED
    assert Row(rules, 1, 1).run() == "ok"
    rules.follow(plan((entering(0, Shape(regex="fine"), []),), finish=(0,)))
    assert Row(rules, 0, 1).run() == "fine"


def test_a_grammar_that_becomes_too_complex_fails_its_row_on_the_way() -> None:
    rules = rules_of()
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
    check_grammar(VOCABULARY, Shape(json=json.dumps(many)))
    rules.follow(plan((entering(0, Shape(json=json.dumps(many)), []),)))
    row = Row(rules, 0, 1)
    while row.step() >= 0:
        assert len(row.output) < 600
    assert row.output[-1] == GRAMMAR_FAILED and len(row.output) > 1


def test_a_model_without_a_tokenizer_fails_guided_rows_only(tmp_path: Path) -> None:
    rules = LogitRules(Guides(tmp_path, VOCAB_SIZE, (IM_END,)))
    rules.follow(plan((entering(0, Shape(regex="a"), []), entering(1, None, [], presence_penalty=1.0))))
    assert Row(rules, 0, 1).step() == GRAMMAR_FAILED
    assert Row(rules, 1, 1).step() >= 0


@pytest.mark.parametrize(
    "shape",
    [
        Shape(regex=""),
        Shape(json="false"),
        Shape(json='{"type": "integer", "minimum": 2, "maximum": 1}'),
        Shape(json='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        Shape(json='{"unevaluatedProperties": false}'),
        Shape(regex="\ud800"),
        Shape(choice=("\ud800",)),
    ],
    ids=repr,
)
def test_what_nothing_satisfies_or_nobody_understands_is_refused(shape: Shape) -> None:
    with pytest.raises(BadGrammar):
        check_grammar(VOCABULARY, shape)
