"""`bench paging`: closed forms by hand, allocators under random histories, and the command's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.__main__ import main
from bench.paging import throughput
from bench.paging.allocators import Contiguous, Paged, Reserve
from bench.paging.block_size import decode, shared_prefix
from bench.paging.closed_forms import (
    hit_rate,
    lifetime_lengths,
    mean_length_over_time,
    mean_tail_waste_uniform,
    requests_that_fit,
    reserve_waste,
    tail_waste,
)
from bench.paging.experiments import Settings
from bench.paging.load import BadTrace, Item, Load, chat, from_file, uniform
from bench.paging.replay import DoesNotFit, replay


def test_closed_forms_by_hand() -> None:
    assert [tail_waste(length, 4) for length in (1, 4, 5, 8, 9)] == [3, 0, 3, 0, 3]
    assert reserve_waste([5, 12], 16) == pytest.approx(15 / 32)
    assert sum(tail_waste(length, 16) for length in range(1, 161)) / 160 == mean_tail_waste_uniform(16) == 7.5
    assert lifetime_lengths([Item(3, 1), Item(2, 3)]) == (1 + 3, 3 + 2 + 3 + 4)
    assert mean_length_over_time([Item(3, 1), Item(2, 3)]) == 3
    assert requests_that_fit(100, 18, 2) == 5
    assert hit_rate(8, 2, 64, 4, 16) == pytest.approx((8 - 2) * 64 / (8 * 68))


def test_two_reserved_regions_waste_what_they_do_not_use() -> None:
    books = Reserve(32, 16)
    assert books.admit(0, 5) and books.admit(1, 12) and not books.admit(2, 1)
    books.free(0)
    assert books.admit(2, 16) and books.num_free == 0


def test_fourteen_free_slots_hold_no_ten_unless_one_region_moves() -> None:
    books = Contiguous(20, 1)
    assert books.admit(0, 8) and books.admit(1, 6) and books.admit(2, 6)
    books.free(0)
    books.free(2)
    assert books.num_free == 14 and books.largest_hole == 8 and not books.admit(3, 10)
    assert books.moves_to_fit(10) == (6, 0, 1), "six tokens are copied: those of the one in the middle"
    assert books.moves_to_fit(15) is None
    assert Paged(20, 1).admit(3, 10)


def test_growing_into_a_neighbour_moves_and_pushes_together() -> None:
    books = Contiguous(12, 1)
    assert all(books.admit(key, 3) for key in range(4))
    assert not books.grow(0, 4) and books.moves == 0, "nothing is free"
    books.free(2)
    assert books.grow(0, 4), "no hole holds 4 until the neighbour is pushed down"
    books.check()
    assert books.moves == 2 and books.moved_slots == 6
    assert books.grow(0, 6) and books.moves == 2 and books.num_free == 0, "in place"
    books.check()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4]))
def test_allocators_keep_their_books_in_random_histories(data: st.DataObject, size: int) -> None:
    allocators = [Reserve(48, 12), Contiguous(48, size), Paged(48, size)]
    lengths: list[dict[int, int]] = [{}, {}, {}]
    for key in range(data.draw(st.integers(1, 30))):
        what, pick, length = data.draw(st.tuples(st.sampled_from("agf"), st.integers(0, 30), st.integers(1, 12)))
        for books, held in zip(allocators, lengths, strict=True):
            free, needed = books.num_free, books.need(length)
            if what == "a":
                if books.admit(key, length):
                    held[key] = length
                    assert books.num_free == free - needed
                else:
                    assert books.num_free == free and (needed > free or isinstance(books, Contiguous))
            elif held:
                mine = sorted(held)[pick % len(held)]
                if what == "f":
                    books.free(mine)
                    assert books.num_free == free + books.need(held.pop(mine))
                elif held[mine] < 12:
                    more = books.need(held[mine] + 1) - books.need(held[mine])
                    assert books.grow(mine, held[mine] + 1) == (more <= free), "contiguous moves rather than refuse"
                    held[mine] += more <= free
            books.check()
            assert books.num_free == books.num_slots - sum(books.need(each) for each in held.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(Item, st.integers(1, 9), st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=20))
def test_a_replay_ends_and_its_slots_add_up(items: list[Item]) -> None:
    load = Load("any", tuple(sorted(items, key=lambda item: item.arrival)))
    for allocator in (Reserve(40, 17), Contiguous(40, 4), Paged(40, 1), Paged(40, 4)):
        seen = replay(load, allocator)
        allocator.check()
        assert seen.allocated_slots + seen.free_slots == pytest.approx(seen.num_slots)
        assert seen.effective_slots <= seen.allocated_slots and 0 <= seen.external_waste < 1
        if not isinstance(allocator, Contiguous):
            assert seen.external_waste == seen.moves == 0, "only a contiguous allocator needs moves"
        if isinstance(allocator, Reserve):
            assert seen.preemptions == 0
            assert seen.internal_waste == pytest.approx(1 - mean_length_over_time(load.items) / 17)


def test_measured_waste_is_that_of_the_closed_forms() -> None:
    load = uniform(150, 1)
    for size in (1, 16, 64):
        assert replay(load, Paged(8192, size)).waste_per_request == pytest.approx((size - 1) / 2, rel=0.02)
    reserved, paged = replay(load, Reserve(8192, load.longest)), replay(load, Paged(8192, 16))
    assert reserved.running == reserved.most_running == 8192 // load.longest
    assert paged.running > 1.8 * reserved.running and paged.steps < reserved.steps
    with pytest.raises(DoesNotFit):
        replay(load, Paged(512, 16))


def test_loads_are_seeded_and_arrive_as_asked() -> None:
    assert chat(50, 1) == chat(50, 1) != chat(50, 2)
    late = uniform(50, 1, rate=0.5)
    arrivals = [item.arrival for item in late.items]
    assert arrivals == sorted(arrivals) and 50 < arrivals[-1] < 200 and "Poisson" in late.name
    assert [(i.prompt_len, i.output_len) for i in late.items] == [
        (i.prompt_len, i.output_len) for i in uniform(50, 1).items
    ]


def test_a_trace_file_is_read_or_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_len": 3, "output_len": 2, "arrival": 4}\n\n{"prompt_len": 1, "output_len": 1}\n')
    assert from_file(path).items == (Item(1, 1, 0), Item(3, 2, 4))
    for bad, named in (
        ('{"prompt_len": 3}', "line 1"),
        ('{"prompt_len": 0, "output_len": 1}', "at least 1"),
        ("", "no"),
    ):
        path.write_text(bad)
        with pytest.raises(BadTrace, match=named):
            from_file(path)
    with pytest.raises(BadTrace, match="cannot read"):
        from_file(tmp_path / "none")


@pytest.mark.parametrize("size", [1, 16, 256])
def test_the_engine_agrees_with_the_closed_forms_at_each_block_size(size: int) -> None:
    hits = shared_prefix(size, 16)
    assert hits["hit_rate"] == pytest.approx(hits["hit_rate_closed_form"])
    assert decode(size, 8)["tail_waste"] == pytest.approx((size - 1) / 2, abs=0.51)


def test_alone_nothing_is_gained_and_together_it_is() -> None:
    load = chat(12, 1)
    prompts = throughput.prompts_of(load)
    alone = [throughput.run(load, prompts, kind, 4096, 1) for kind in throughput.KINDS[:2]]
    assert alone[0]["tokens_per_pass"] == alone[1]["tokens_per_pass"]
    reserved, paged, cached = (throughput.run(load, prompts, kind, 4096, 64) for kind in throughput.KINDS)
    assert paged["tokens_per_pass"] > 1.2 * reserved["tokens_per_pass"]
    assert cached["hit_rate"] > 0.2 and cached["ttft_p50_passes"] < paged["ttft_p50_passes"]
    passes = throughput.ACCELERATOR.passes
    assert passes(1, 0) == passes(256, 0) == 1 and passes(512, 0) == 2


def test_json_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Settings((4, 16), decode_rows=4, prefix_requests=8, memories=(4096,), repeat=1)
    monkeypatch.setattr(Settings, "quick", lambda: few)
    trace, out, picture = tmp_path / "t.jsonl", tmp_path / "r.json", tmp_path / "r.png"
    trace.write_text("".join(json.dumps({"prompt_len": 9 * i, "output_len": 5 * i}) + "\n" for i in range(1, 13)))
    flags = ["--quick", "--trace", str(trace), "--slots", "512", "--json", str(out), "--plot", str(picture)]
    assert main(["paging", *flags]) == 0
    result = json.loads(out.read_text())
    assert result["schema"] == 1 and result["settings"]["num_slots"] == 512
    assert [(row["allocator"], row["block_size"]) for row in result["allocators"]] == [
        ("reserve max", 167), ("contiguous", 16), ("paged", 4), ("paged", 16),
    ]  # fmt: skip
    assert [row["block_size"] for row in result["block_sizes"]] == [4, 16]
    rows = result["throughput"]["rows"]
    assert [row["at_once"] for row in rows] == [64] * 3 + [1] * 3 and rows[4]["gain"] == 1
    assert picture.stat().st_size > 1000


def test_what_can_not_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paging", "--slots", "1"]) == 2
    assert main(["paging", "--trace", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().out
