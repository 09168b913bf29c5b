"""What `transformers` would have said: for every output token, its choice after the tokens before it. In float32.

If all choices equal the output, then the output is the one that `transformers` generates, token for token (by
induction over the tokens), and one forward pass shows it where generation takes one for each token. `judge` runs in a
process of its own, with one thread, so that neither memory nor thread settings reach the tests; `verdict` is for models
so small that it does not matter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protocol.messages import SamplingParams

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """One answer to judge. Greedy if the temperature is 0, else drawn with temperature and seed and no filters."""

    prompt: list[int]
    output: list[int]
    sampling: SamplingParams


class Verdict(NamedTuple):
    """`choices`: the token that transformers takes at each place of the output. `margin`: how near the nearest of
    them was to another token: a difference of logits where greedy, else of the logarithms in the sampler's race."""

    choices: list[int]
    margin: float


def judge(model: Path, cases: list[Case], timeout_s: float = 150.0) -> list[Verdict]:
    """One verdict for each case. Fails with the process's stderr."""
    asked = {
        "model": str(model),
        "cases": [[case.prompt, case.output, case.sampling.temperature, case.sampling.seed or 0] for case in cases],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.oracle"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return [Verdict(*json.loads(line)) for line in done.stdout.splitlines()]


def _greedy(logits: np.ndarray) -> tuple[int, float]:
    second, first = np.partition(logits, -2)[-2:]
    return int(logits.argmax()), float(first - second)


def _drawn(logits: np.ndarray, temperature: float, seed: int, position: int) -> tuple[int, float]:
    """The token that wins the sampler's race (worker/sampler.py), first as a block of 256 ids, then inside it."""
    from worker.uniform import uniform_numpy

    def race(weights: np.ndarray, first: int) -> tuple[int, float]:
        u = uniform_numpy(np.array(seed, np.uint64), np.array(position), np.arange(first, first + len(weights)))
        winner, lead = _greedy(np.log(weights / -np.log(u)))
        return winner, lead

    assert len(logits) % 256 == 0, "the default model's vocabulary is a multiple of the sampler's block"
    blocks = np.exp((logits - logits.max()).astype(np.float64) / temperature).reshape(-1, 256)
    block, block_lead = race(blocks.sum(axis=1), 1 << 31)
    token, lead = race(blocks[block], block * 256)
    return block * 256 + token, min(block_lead, lead)


def load(model: Path) -> Any:
    """The model as transformers has it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def verdict(model: Any, case: Case) -> Verdict:
    """The same in this process, with a loaded model. One thread: on a busy machine several wait for each other."""
    import torch

    ids, (temperature, seed) = case.prompt + case.output[:-1], (case.sampling.temperature, case.sampling.seed or 0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), logits_to_keep=len(case.output), use_cache=False).logits[0].numpy()
    finally:
        torch.set_num_threads(num_threads)
    made = [
        _drawn(row, temperature, seed, len(case.prompt) + index) if temperature else _greedy(row)
        for index, row in enumerate(logits)
    ]
    return Verdict([token for token, _ in made], min(margin for _, margin in made))


def _main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    model = load(asked["model"])
    for prompt, output, temperature, seed in asked["cases"]:
        case = Case(prompt, output, SamplingParams(temperature=temperature, seed=seed))
        print(json.dumps(verdict(model, case)))


if __name__ == "__main__":
    _main()
