"""The sampler against a plain float64 one, row by row; and what it must not depend on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.sampler import FAILED, SamplingBatch, sample
from worker.top import greatest, top
from worker.uniform import uniform, uniform_numpy


def batch(rows: list[tuple[float, int, float, float]], seeds: list[int] | None = None) -> SamplingBatch:
    """From (temperature, top_k, top_p, min_p) of each row."""
    columns = list(zip(*rows, strict=True))
    return SamplingBatch(
        temperature=np.array(columns[0], np.float32),
        top_k=np.array(columns[1], np.int32),
        top_p=np.array(columns[2], np.float32),
        min_p=np.array(columns[3], np.float32),
        seed=np.array(seeds or range(len(rows)), np.uint64),
    )


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def distribution(logits: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float) -> np.ndarray:
    """The probabilities of one row in float64: the reference."""
    logits = logits.astype(np.float64)
    if temperature < 1e-5 or top_p <= 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(weights):
        weights[weights < np.sort(weights)[-int(top_k)]] = 0
    weights[weights < min_p] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= top_p * weights.sum()]] = 0
    return weights / weights.sum()


def race(weights: np.ndarray, seed: int, position: int, first: int) -> tuple[int, float]:
    """The winner among the weights, and by which factor it is ahead; their random numbers begin at index `first`."""
    u = uniform_numpy(np.array(seed, np.uint64), np.array(position), np.arange(first, first + len(weights)))
    scores = weights / -np.log(u)
    lead = np.sort(scores)[-1] / np.sort(scores)[-2] if (scores > 0).sum() > 1 else np.inf
    return int(scores.argmax()), float(lead)


def pick(probabilities: np.ndarray, seed: int, position: int) -> tuple[int, float]:
    """The token drawn, and how sure that is: the lead of its block or the lead of the token in it, the smaller one."""
    vocab = len(probabilities)
    size = next((size for size in (256, 128, 64) if vocab % size == 0), 64)
    padded = np.pad(probabilities, (0, -vocab % size))
    block, block_lead = race(padded.reshape(-1, size).sum(axis=1), seed, position, 2**31)
    token, lead = race(padded[block * size : (block + 1) * size], seed, position, block * size)
    return block * size + token, min(block_lead, lead)


GRID = list(
    itertools.product(
        (0.0, 1e-12, 0.1, 0.7, 1.0, 2.5),
        (-1, 0, 1, 2, 5, 100, 10**6),
        (-0.5, 0.0, 1e-6, 0.3, 0.95, 1.0, 1.5),
        (0.0, 0.02, 0.5, 1.0),
    )
)


@pytest.mark.parametrize(("vocab", "every"), [(1, 1), (2, 1), (100, 1), (512, 1), (4100, 7)])
def test_every_setting_draws_what_the_reference_draws(vocab: int, every: int) -> None:
    """All settings in one batch, so that greedy, filtered and plain rows stand side by side."""
    grid = GRID[::every]
    logits = random_logits(len(grid), vocab)
    seeds = list(range(1000, 1000 + len(grid)))
    positions = torch.arange(len(grid)) * 7
    tokens = sample(logits, batch(grid, seeds), positions).tolist()
    wrong = []
    for row, (settings, token) in enumerate(zip(grid, tokens, strict=True)):
        probabilities = distribution(logits[row].numpy(), *(float(np.float32(value)) for value in settings))
        expected, lead = pick(probabilities, seeds[row], int(positions[row]))
        if token != expected and lead > 1 + 1e-5:
            wrong.append((settings, token, expected, lead))
    assert not wrong, wrong[:5]


def test_flat_row_needs_more_than_the_greatest_values_for_top_p() -> None:
    logits = random_logits(3, 3000, scale=0.1)
    settings = [(1.0, 0, 0.9, 0.0)] * 3
    tokens = sample(logits, batch(settings), torch.arange(3)).tolist()
    for row in range(3):
        assert tokens[row] == pick(distribution(logits[row].numpy(), *settings[row]), row, row)[0]


def test_frequencies_follow_the_probabilities() -> None:
    count = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -float("inf")]]).expand(count, -1)
    tokens = sample(logits, batch([(1.0, 0, 1.0, 0.0)] * count, [42] * count), torch.arange(count))
    expected = torch.softmax(logits[0].double(), 0)
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert frequencies[4] == 0
    assert (frequencies - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def test_frequencies_follow_the_probabilities_across_blocks() -> None:
    count, vocab = 40_000, 320
    row = random_logits(1, vocab, scale=1.0)
    logits = row.expand(count, -1)
    tokens = sample(logits, batch([(1.0, 0, 1.0, 0.0)] * count, [5] * count), torch.arange(count))
    expected = torch.softmax(row[0].double(), 0) * count
    chi_squared = ((torch.bincount(tokens, minlength=vocab) - expected) ** 2 / expected).sum()
    assert chi_squared < 425  # 319 degrees of freedom: exceeded once in 10,000


def test_rounding_of_the_logits_does_not_change_the_draw() -> None:
    """Flat tails included, where thousands of tokens are each less probable than the sum of all errors."""
    rows = 200
    logits = random_logits(rows, 49_152, scale=2.0)
    noisy = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)))
    settings = batch([(1.0, 0, 1.0, 0.0)] * rows)
    assert torch.equal(sample(logits, settings, torch.arange(rows)), sample(noisy, settings, torch.arange(rows)))


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5, 1e-4])
def test_tiny_temperatures_take_the_most_probable_token(temperature: float) -> None:
    logits = random_logits(50, 1000, scale=10.0)
    tokens = sample(logits, batch([(temperature, 0, 1.0, 0.0)] * 50), torch.arange(50))
    assert torch.equal(tokens, logits.argmax(dim=1))


@pytest.mark.parametrize("settings", [(1.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 1.0), (5.0, 1, 0.1, 0.0)])
def test_filters_that_leave_one_token_take_the_first_of_equals(settings: tuple[float, int, float, float]) -> None:
    logits = torch.zeros(4, 300)
    logits[:, [120, 121]] = 1.0
    assert sample(logits, batch([settings] * 4), torch.arange(4)).tolist() == [120] * 4


def test_a_broken_row_fails_alone() -> None:
    logits = random_logits(8, 500)
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.01)] * 4
    healthy = sample(logits, batch(settings), torch.arange(8))
    logits[2, 77] = float("nan")
    logits[3, 499] = float("nan")
    logits[4] = float("nan")
    logits[5] = -float("inf")
    logits[7, 0] = float("inf")
    tokens = sample(logits, batch(settings), torch.arange(8))
    assert tokens[[2, 3, 4, 5, 7]].tolist() == [FAILED] * 5
    assert torch.equal(tokens[[0, 1, 6]], healthy[[0, 1, 6]])


def test_a_draw_depends_on_its_row_alone() -> None:
    settings = [(1.0, 0, 1.0, 0.0), (0.8, 40, 1.0, 0.0), (1.2, 0, 0.9, 0.0), (1.0, 50, 0.95, 0.05), (0.0, 0, 1.0, 0.0)]
    logits = random_logits(5, 1024)
    together = sample(logits, batch(settings), torch.arange(5)).tolist()
    for row in reversed(range(5)):
        one = sample(logits[row : row + 1], batch([settings[row]], [row]), torch.tensor([row]))
        assert one.tolist() == [together[row]]
    order = [3, 0, 4, 2, 1]
    shuffled = sample(logits[order], batch([settings[i] for i in order], order), torch.tensor(order)).tolist()
    assert shuffled == [together[i] for i in order]


def test_a_request_continues_on_its_own_stream_after_a_move() -> None:
    """Tokens 0..19 in one go, or 0..9 here and 10..19 elsewhere in another batch: the same."""
    logits = random_logits(20, 400)
    whole = [sample(logits[i : i + 1], batch([(1.0, 0, 1.0, 0.0)], [7]), torch.tensor([i])).item() for i in range(20)]
    moved = whole[:10]
    for i in range(10, 20):
        settings, seeds = [(0.5, 3, 1.0, 0.0), (1.0, 0, 1.0, 0.0)], [99, 7]
        moved.append(int(sample(logits[[0, i]], batch(settings, seeds), torch.tensor([3, i]))[1]))
    assert moved == whole


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(2, 300)
    before = logits.clone()
    sample(logits, batch([(1.0, 5, 0.9, 0.1)] * 2), torch.arange(2))
    assert torch.equal(logits, before)


def test_a_batch_without_sampling_rows_is_known_as_such() -> None:
    assert SamplingBatch.greedy(3).all_greedy
    assert not batch([(1.0, 0, 1.0, 0.0)]).all_greedy
    assert batch([(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0)]).sampled_rows.tolist() == [0, 2]


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits"):
        sample(torch.zeros(2, 4), SamplingBatch.greedy(3), torch.arange(2))


@pytest.mark.parametrize("vocab", [1, 3, 64, 257, 4096])
def test_greatest_is_max_with_the_first_index(vocab: int) -> None:
    rows = torch.randint(0, 5, (40, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    values, indices = greatest(rows)
    assert torch.equal(values, rows.amax(dim=1))
    assert indices.tolist() == rows.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("count", [1, 2, 50, 64, 65, 128])
@pytest.mark.parametrize("vocab", [128, 1000, 4096, 9001])
def test_top_values_equal_those_of_a_sort_and_stand_at_their_indices(vocab: int, count: int) -> None:
    rows = random_logits(6, vocab, seed=count)
    rows[3:] = rows[3:].round()  # ties
    values, indices = top(rows, count)
    assert torch.equal(values, rows.sort(dim=1, descending=True).values[:, :count])
    assert torch.equal(rows.gather(1, indices), values)


def test_uniform_is_the_documented_function() -> None:
    """Against plain Python integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    positions = [0, 1, 5, 1000, 2**31, 7, 2**40]
    indices = [0, 49_151, 3, 2**31, 2**31 + 191, 1, 0]
    expected = []
    for seed, position, index in zip(seeds, positions, indices, strict=True):
        key = mix((mix((seed + gamma) % 2**64) + gamma * (position + 1)) % 2**64)
        expected.append(((mix((key + gamma * (index + 1)) % 2**64) >> 12) + 0.5) * 2.0**-52)
    bits = np.array(seeds, np.uint64)
    assert uniform_numpy(bits, np.array(positions), np.array(indices)).tolist() == expected
    as_torch = uniform(torch.from_numpy(bits.view(np.int64)), torch.tensor(positions), torch.tensor(indices))
    assert as_torch.tolist() == expected


def test_uniform_fills_the_open_interval_over_positions_seeds_and_indices() -> None:
    numbers, three = np.arange(50_000), np.array(3)
    for draws in (
        uniform_numpy(three, numbers, three),
        uniform_numpy(numbers.astype(np.uint64), three, three),
        uniform_numpy(three, three, numbers),
    ):
        assert draws.min() > 0 and draws.max() < 1
        histogram = np.histogram(draws, bins=50, range=(0, 1))[0]
        chi_squared = ((histogram - 1000) ** 2 / 1000).sum()
        assert chi_squared < 95  # 49 degrees of freedom: exceeded once in 10,000
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
