"""A whole decode step of a worker: plans in, tokens out, with random weights in the shape of a model.

No scheduler and no socket: the plans are those that a scheduler would send to rows in steady decode whose blocks are
all there. The rows come as if their prompts had been found in the prefix cache, so nothing need be computed before the
first measured step; what the cache holds is random.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.kernels.cases import DecodeStepCase
from bench.kernels.device import DTYPES, Bench
from bench.kernels.results import Measured
from bench.kernels.timing import Timing
from bench.kernels.work import ModelShape
from protocol.arrays import pack, unpack
from protocol.config import EngineConfig
from protocol.digest import TableDigest
from protocol.messages import ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from protocol.model_config import ModelConfig
from worker.kv_cache import block_bytes
from worker.server import runner_class

WARM_UP_STEPS = 3
MOST_STEPS = 40
PARTS = ("apply", "commit", "forward", "sample", "idle")
_NONE = pack(np.zeros(0, dtype=np.int32))


def write_config(model: ModelShape, folder: Path, max_positions: int) -> None:
    """The config.json of a Llama of this shape."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.heads.num_q,
        "num_key_value_heads": model.heads.num_kv,
        "head_dim": model.heads.head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": model.tied,
    }
    (folder / "config.json").write_text(json.dumps(config))


def fill(caches: list[Tensor]) -> None:
    """Random values; of a quantised cache random bytes that are numbers in any of its dtypes."""
    for cache in caches:
        if cache.dtype.itemsize == 1:
            cache.view(torch.int8).random_(0, 100)
        else:
            cache.normal_()


class SteadyDecode:
    """The plans for rows 0 … batch-1, each of which knows seq_len tokens in the first step and one more in each next.

    room: steps that the rows' blocks last for.
    """

    def __init__(self, batch: int, seq_len: int, block_size: int, room: int) -> None:
        self.batch = batch
        self.seq_len = seq_len
        per_row = -(-(seq_len + room) // block_size)
        self.num_blocks = batch * per_row + 1
        """The null block included."""
        ids = np.random.default_rng(0).permutation(self.num_blocks - 1).astype(np.int32) + 1
        self.tables = ids.reshape(batch, per_row)
        self._digest = TableDigest(batch)
        for row, table in enumerate(self.tables):
            self._digest.add(np.full(per_row, row), 0, np.arange(per_row), table)
        self.steps = 0

    def next_plan(self) -> SchedulerOutput:
        """The first admits all rows; every one runs one token of each."""
        admit = () if self.steps else tuple(self._admission(row) for row in range(self.batch))
        computed = np.full(self.batch, self.seq_len + self.steps, dtype=np.int64)
        plan = SchedulerOutput(
            epoch=0, step=self.steps, finish_rows=_NONE, admit=admit, grow_rows=_NONE, grow_counts=_NONE,
            grow_ids=(_NONE,), digest=self._digest.value(computed), copy_src=_NONE, copy_dst=_NONE,
            prefill_rows=_NONE, prefill_num_tokens=_NONE, hold_rows=_NONE,
        )  # fmt: skip
        self.steps += 1
        return plan

    def _admission(self, row: int) -> NewRequestData:
        tokens = np.random.default_rng(row).integers(0, 256, self.seq_len).astype(np.int32)
        return NewRequestData(
            row=row,
            token_ids=pack(tokens),
            prompt_len=self.seq_len,
            num_computed_tokens=self.seq_len - 1,
            block_ids=(pack(self.tables[row]),),
            sampling=SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True),
        )


def measure_decode_step(case: DecodeStepCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """From tokens on the host to the next ones there, by the wall clock, with the steps under way that a worker has."""
    first_len = case.seq_len - MOST_STEPS // 2  # so that the average step is the case's
    decode = SteadyDecode(case.batch, first_len, case.block_size, MOST_STEPS + WARM_UP_STEPS + 2)
    max_model_len = first_len + MOST_STEPS + WARM_UP_STEPS + 2
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        write_config(case.model, Path(name), max_model_len)
        groups = ModelConfig.from_folder(name).cache_groups
        config = EngineConfig(
            model=name,
            workers=1,
            device="cuda" if bench.device.type == "cuda" else "cpu",
            attention_backend=backend_name,
            dtype=case.dtype,  # type: ignore[arg-type]
            block_size=case.block_size,
            kv_memory=str(decode.num_blocks * block_bytes(groups, case.block_size, DTYPES[case.kv_dtype])),
            kv_cache_dtype="auto" if case.kv_dtype == case.dtype else case.kv_dtype,  # type: ignore[arg-type]
            max_model_len=max_model_len,
            max_num_seqs=case.batch,
            max_num_batched_tokens=max(case.batch, 512),
            load_format="dummy",
            enforce_eager=case.eager,
        )
        runner = runner_class(config)(config, bench.num_threads or 1)
    with torch.inference_mode():
        fill(runner.cache.tensors)
        runner.warm_up()
        runner.start_epoch(0)
        bench.synchronize()
        ends, parts = [], []

        def deliver(result: ModelRunnerOutput) -> None:
            ends.append(time.perf_counter())
            parts.append(unpack(result.timings_us, "timings_us"))

        deadline = time.perf_counter() + limit_s
        for _ in range(WARM_UP_STEPS + MOST_STEPS):
            runner.submit(decode.next_plan(), deliver)
            if len(ends) > WARM_UP_STEPS + 1 and ends[-1] > deadline:
                break
        measured = len(ends)  # what is still under way ends with nothing behind it
        runner.flush(deliver)
        runner.close()
    samples = np.diff(ends[:measured])[WARM_UP_STEPS - 1 :] * 1e6
    medians = np.median(np.stack(parts[WARM_UP_STEPS:]), axis=0)
    return Measured(
        case,
        backend_name,
        Timing.of(samples.tolist(), calls_per_sample=1, timed_by="clock", cold=True),
        parts_us=dict(zip(PARTS, medians.tolist(), strict=True)),
    )
