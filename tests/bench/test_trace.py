"""Traces of all forms are read alike, a bad row is refused by its number, and prompts share what the trace says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.trace import TraceError, TraceRow, parse_trace, read_trace
from bench.trace_workload import TraceWorkload, choose_rows, cut_for_quick

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1000, "output_length": 500, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 600, "output_length": 52, "hash_ids": [46, 2354]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
PLAIN = """\
arrival_s,input_len,output_len,prefix_ids
1.5,7,3,"[1, 2]"
1.0,8,2,1 3
2.0,9,1,
"""

rows_of_a_trace = st.lists(
    st.builds(
        TraceRow,
        st.integers(0, 10**7).map(lambda ms: ms / 1e3),
        st.integers(1, 10**6),
        st.integers(1, 10**5),
        st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    ),
    min_size=1,
    max_size=30,
)


def test_each_form_is_known_by_its_columns():
    assert parse_trace(MOONCAKE, "f") == (
        "mooncake", [TraceRow(0.0, 1000, 500, (46, 47)), TraceRow(pytest.approx(3.053), 600, 52, (46, 2354))]
    )  # fmt: skip
    assert parse_trace(AZURE, "f") == ("azure", [TraceRow(0.0, 374, 44), TraceRow(pytest.approx(4.314579), 396, 109)])
    assert parse_trace(BURSTGPT, "f") == ("burstgpt", [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 230)])
    assert parse_trace(PLAIN, "f") == (
        "plain", [TraceRow(0.0, 8, 2, (1, 3)), TraceRow(0.5, 7, 3, (1, 2)), TraceRow(1.0, 9, 1)]
    )  # fmt: skip


@given(rows_of_a_trace)
def test_what_is_written_is_read_again_in_order_of_arrival(rows: list[TraceRow]):
    lines = "".join(
        json.dumps(
            {
                "timestamp": round(row.arrival_s * 1e3),
                "input_length": row.input_len,
                "output_length": row.output_len,
                "hash_ids": row.block_ids,
            }
        )
        + "\n"
        for row in rows
    )
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["arrival_s", "input_len", "output_len", "prefix_ids"])
    writer.writerows([row.arrival_s, row.input_len, row.output_len, list(row.block_ids)] for row in rows)
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    for text in (lines, table.getvalue()):
        _, found = parse_trace(text, "f")
        assert [row.arrival_s for row in found] == pytest.approx([r.arrival_s - ordered[0].arrival_s for r in ordered])
        assert [(row.input_len, row.output_len, row.block_ids) for row in found] == [
            (row.input_len, row.output_len, row.block_ids) for row in ordered
        ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MOONCAKE + '{"timestamp": 1', "f, row 3: no JSON"),
        (MOONCAKE + "[1]", "f, row 3: not a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}', "row 3: output_length is None"),
        (MOONCAKE.replace("600", '"many"'), "row 2: input_length is 'many'; it must be a whole number of at least 1"),
        (MOONCAKE.replace("600", "true"), "row 2: input_length is True"),
        (MOONCAKE.replace("500", "1e999"), "row 1: output_length is inf"),
        (MOONCAKE.replace("52,", "0,"), "row 2: output_length is 0"),
        (MOONCAKE.replace("30535", "null"), "row 2: timestamp is None, no time"),
        (MOONCAKE.replace("30535", "NaN"), "row 2: timestamp is nan, no time"),
        (MOONCAKE.replace("2354", "-1"), "row 2: hash_ids is .*not negative"),
        (MOONCAKE.replace("[46, 2354]", "7"), "row 2: hash_ids is 7"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "row 2: timestamp is 'yesterday', no time"),
        (AZURE + "2023-11-16 18:15:51.0,3", "row 3: generatedtokens is None"),
        (PLAIN.replace("1 3", "1 x"), "row 2: prefix_ids is '1 x'"),
        ("a,b\n1,2\n", "has the columns a, b; known are mooncake: timestamp"),
        ("a,b\n", "has no rows"),
        ("", "has no rows"),
    ],
)
def test_a_row_that_can_not_be_read_is_refused_by_number_column_and_value(text: str, named: str):
    with pytest.raises(TraceError, match=named):
        parse_trace(text, "f")


@given(
    st.sampled_from(["", "arrival_s,input_len,output_len,prefix_ids\n", '{"timestamp": ', MOONCAKE]),
    st.text(alphabet='{}[]",:. e-0123456789\n\0ä', max_size=40),
)
def test_whatever_a_file_holds_it_is_read_or_refused(begin: str, text: str):
    try:
        parse_trace(begin + text, "f")
    except TraceError as error:
        assert "trace f" in str(error)


def test_a_file_that_is_not_there_or_no_text_is_refused_by_name(tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", binary):
        with pytest.raises(TraceError, match=path.name):
            read_trace(path)


def test_prompts_share_the_tokens_of_equal_ids_and_no_others():
    _, rows = parse_trace(MOONCAKE, "f")
    load = TraceWorkload(trace="f", rows=tuple(rows), scale=2.0)
    first, second = load.requests(1)
    assert [len(first.prompt_token_ids), len(second.prompt_token_ids)] == [1000, 600]
    assert first.prompt_token_ids[:512] == second.prompt_token_ids[:512]
    assert first.prompt_token_ids[512:600] != second.prompt_token_ids[512:600]
    assert (first.output_len, second.output_len) == (500, 52)
    assert [first.arrival_s, second.arrival_s] == pytest.approx([0.0, 3.053 / 2])
    assert load.requests(1) == [first, second]
    assert load.requests(2)[0].prompt_token_ids[:512] != first.prompt_token_ids[:512]


def test_what_the_ids_do_not_cover_is_random():
    rows = (TraceRow(0.0, 40, 1, (7,)), TraceRow(0.0, 40, 1, (7,)))
    first, second = (r.prompt_token_ids for r in TraceWorkload(trace="f", rows=rows, block_size=16).requests(1))
    assert len(first) == 40 and first[:16] == second[:16] and first[16:] != second[16:]


def test_rows_too_long_are_left_out_and_counted():
    rows = [TraceRow(float(i), length, 10) for i, length in enumerate([500, 90, 91, 20, 30])]
    chosen, left_out = choose_rows(rows, 100, 2)
    assert [(row.arrival_s, row.input_len) for row in chosen] == [(0.0, 90), (2.0, 20)]
    assert left_out == 2
    assert choose_rows(rows, None, None) == (tuple(rows), 0)
    with pytest.raises(ValueError, match="5 are too long"):
        TraceWorkload(trace="f", rows=(), left_out=5)


def test_a_quick_look_is_short_in_every_way():
    rows = cut_for_quick([TraceRow(60.0 * i, 10_000, 500) for i in range(40)])
    assert len(rows) == 12
    assert max(row.arrival_s for row in rows) <= 4.0
    assert {(row.input_len, row.output_len) for row in rows} == {(64, 12)}


def test_the_result_says_what_the_rows_are_like():
    rows = (TraceRow(0.0, 10, 1), TraceRow(6.0, 20, 4))
    form = TraceWorkload(trace="f", form="plain", rows=rows, scale=3.0, left_out=1).as_json()
    assert "rows" not in form
    assert (form["kind"], form["num_prompts"], form["left_out"], form["span_s"]) == ("trace", 2, 1, 2.0)
    assert (form["mean_input_len"], form["mean_output_len"]) == (15.0, 2.5)
