"""One step of the data plane: plan → batch → device tables → metadata → model → sampler → result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from kernels.backend import team_of
from kernels.cpu.memory import Ahead
from kernels.metadata import AttentionMetadata
from kernels.selector import select_backend
from kernels.transfer import to_device
from protocol.arrays import pack, packer, unpack
from protocol.config import EngineConfig
from protocol.logprobs import join
from protocol.messages import LogprobsLists, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from protocol.model_config import ModelConfig
from worker.batch import InputBatch, PromptPart, StepInputs
from worker.device_table import DeviceTable
from worker.guided import Guides
from worker.kv_cache import KVCache, blocks_that_fit
from worker.kv_scales import KV_DTYPES, find_scales
from worker.lent_cores import LentCores
from worker.logit_rules import LogitRules
from worker.logprobs import logprobs_of
from worker.metadata import build_metadata
from worker.models import build_model
from worker.sampler import SamplingBatch, sample
from worker.weights import open_weights

_LOG = logging.getLogger("worker")

pack_timings = packer(5)
"""apply, commit, forward, sample, idle (microseconds) → ModelRunnerOutput.timings_us."""

PROMPT_LOGPROBS_ROWS = 64
"""Rows of logits that are computed at once for the tokens of a prompt."""


class StartError(RuntimeError):
    """This worker cannot serve the configuration; the message says why."""


Deliver = Callable[[ModelRunnerOutput], None]
"""Takes the result of a step as soon as it is known."""


def pick_device(requested: str, replica: int = 0) -> torch.device:
    """ "auto": a GPU if there is one; replicas take turns over the GPUs there are. Raises StartError when "cuda" was
    asked for and there is none."""
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise StartError("--device cuda: torch sees no GPU on this machine")
    if not available or requested == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", replica % torch.cuda.device_count())


def pick_dtype(requested: str) -> torch.dtype:
    """ "auto" is bfloat16."""
    return {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
        requested
    ]


class ModelRunner:
    """Model, KV memory and batch state of one worker.

    One step at a time, from plan to result (`PipelinedRunner` overlaps them). `on_progress(fraction)` is told how far
    the loading of weights is. Raises StartError, NoBackend, WeightError or KVMemoryError.
    """

    lends_cores = False
    """Whether its cores compute for other workers of this machine while it runs no step."""
    ready_fd: int | None = None
    """Readable when `take_ready` may have something; None: never."""

    def __init__(
        self,
        config: EngineConfig,
        num_threads: int,
        on_progress: Callable[[float], None] = lambda done: None,
        *,
        replica: int = 0,
    ):
        self.config = config
        self.model_config = ModelConfig.from_folder(config.model)
        self.device = pick_device(config.device, replica)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.dtype = pick_dtype(config.dtype)
        self.kv_dtype = KV_DTYPES[config.kv_cache_dtype]
        groups = self.model_config.cache_groups
        windows = self.model_config.windows
        self.selection = select_backend(
            config.attention_backend,
            device=self.device,
            dtype=self.dtype,
            head_dim=self.model_config.head_dim,
            block_size=config.block_size,
            window=max(windows) or None,
            kv_dtype=self.kv_dtype,
            num_threads=num_threads,
        )
        _LOG.info("%s", self.selection.reason)
        self.backend = self.selection.backend
        total = sum(path.stat().st_size for path in Path(config.model).glob("*.safetensors")) or 1
        weights = open_weights(
            config.model,
            load_format=config.load_format,
            seed=config.seed,
            on_bytes=lambda done: on_progress(min(1.0, done / total)),
        )
        self.model = build_model(
            self.model_config,
            weights,
            self.dtype,
            self.device,
            max_positions=config.max_model_len,
            quantization=config.quantization,
            team=team_of(self.backend),
        )
        scales = find_scales(self.model, self.kv_dtype, config.max_model_len) if self.kv_dtype else None
        cache_dtype = self.kv_dtype or self.dtype
        num_blocks = blocks_that_fit(config, groups, cache_dtype, self.device)
        self.cache = KVCache(groups, config.block_size, num_blocks, cache_dtype, self.device, scales)
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, windows, config.block_size)
        guides = Guides(Path(config.model), self.model_config.vocab_size, self.model_config.eos_token_ids, num_threads)
        self.rules = LogitRules(guides)
        self.tables = [DeviceTable(table, self.device) for table in self.batch.tables]
        self._group_of = [0] * self.model_config.num_layers
        for index, group in enumerate(groups):
            for layer in group.layer_ids:
                self._group_of[layer] = index
        self._last_end = time.monotonic()

    @property
    def counters(self) -> Mapping[str, int]:
        """Calls of each kernel up to the result that was delivered last."""
        return self.backend.counters

    def borrow(self, cores: LentCores) -> None:
        """Compute on idle cores of other workers, too, as they do on ours; only where layers are the CPU's."""
        if self.model.team is not None:
            self.model.team.borrow(cores.others, cores.borrower)
            self.lends_cores = True

    def items(self) -> tuple[int, int]:
        """How many items of layers and attention were computed so far, and on borrowed cores. From any thread."""
        return (0, 0) if self.model.team is None else self.model.team.items()

    def submit(self, plan: SchedulerOutput, deliver: Deliver) -> None:
        """Run a plan and deliver its result, now or later, but in order. Raises as `run` does."""
        deliver(self.run(plan))
        if self.cache.ahead is not None and self.cache.ahead.touched < self.cache.ahead.total:
            self._touch_ahead(self.cache.ahead, plan)

    def _touch_ahead(self, ahead: Ahead, plan: SchedulerOutput) -> None:
        """Ask for memory to be made ready, for the blocks that come after those of this plan."""
        ids = [unpack(table) for tables in (plan.grow_ids, *(new.block_ids for new in plan.admit)) for table in tables]
        ids = [each for each in ids if len(each)]
        if ids:
            ahead.handed_out(sum(len(each) for each in ids), max(int(each.max()) for each in ids))

    def take_ready(self, deliver: Deliver) -> None:
        """Deliver what was submitted and is done by now."""

    def flush(self, deliver: Deliver) -> None:
        """Deliver everything that was submitted."""

    def start_epoch(self, epoch: int) -> None:
        """Forget all requests; what was submitted and not delivered is void."""
        self.batch.start_epoch(epoch)
        self.rules.start_epoch()

    def close(self) -> None:
        """Nothing is submitted any more."""

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply a plan and run it. Raises PlanError (nothing was computed) when the planes disagree."""
        began = time.monotonic()
        step = self.batch.apply(plan)
        self.rules.follow(plan)
        applied = time.monotonic()
        for table in self.tables:
            table.commit()
        committed = time.monotonic()
        hidden = self._forward(step)
        computed = time.monotonic()
        parts = self.batch.reported_prompts(step)
        tokens, logprobs = self._sample(step, hidden)
        prompt_logprobs = tuple(self._prompt_logprobs(part, hidden) for part in parts) if parts else ()
        before, self._last_end = self._last_end, (end := time.monotonic())
        timings_us = pack_timings(
            int((applied - began) * 1e6),
            int((committed - applied) * 1e6),
            int((computed - committed) * 1e6),
            int((end - computed) * 1e6),
            min(int((began - before) * 1e6), 2**31 - 1),
        )
        return ModelRunnerOutput(
            epoch=plan.epoch,
            step=plan.step,
            tokens=pack(tokens),
            digest=plan.digest,  # `apply` proved ours equal
            timings_us=timings_us,
            started_ns=int(began * 1e9),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _forward(self, step: StepInputs) -> torch.Tensor:
        """The hidden states of all T tokens, [T, H]."""
        if len(step.copy_src):
            source, target = torch.from_numpy(step.copy_src.copy()), torch.from_numpy(step.copy_dst.copy())
            self.backend.copy_blocks(self.cache.tensors, source.long(), target.long())
        metadata = build_metadata(step, self.tables, self.device)
        return self.model.forward(
            torch.from_numpy(step.input_ids).to(self.device),
            torch.from_numpy(step.positions).to(self.device),
            self.cache.layers,
            [metadata[group] for group in self._group_of],
            self.backend,
        )

    def _sample(self, step: StepInputs, hidden: torch.Tensor) -> tuple[np.ndarray, LogprobsLists | None]:
        """Sample for the rows that know all they have computed; int32 [R], and the batch knows them too. And their
        log-probabilities, if any row reports some."""
        if not len(step.sampling):
            return np.zeros(0, dtype=np.int32), None
        rows = step.rows[step.sampling]
        last = torch.from_numpy(step.query_start_loc[step.sampling + 1] - 1).to(self.device)
        logits = self.model.compute_logits(hidden.index_select(0, last))
        drawn, logprobs = self._draw(rows, logits)
        tokens = self.rules.name_failures(rows, drawn.to(device="cpu", dtype=torch.int32).numpy())
        self.batch.append_sampled(rows, tokens)
        self.rules.note(rows, tokens)
        return tokens, logprobs

    def _draw(self, rows: np.ndarray, logits: torch.Tensor) -> tuple[torch.Tensor, LogprobsLists | None]:
        """The next token of each of the rows (int64 [R]) by what the batch knows of them, int64 [R] on the device; and
        their log-probabilities if any row reports some. The rules of rows change the logits in place."""
        batch = self.batch
        reports, ruled = bool(batch.num_logprobs[rows].any()), self.rules.concern(rows)
        raw = logits.clone() if reports and ruled else logits
        if ruled:
            self.rules.apply(logits, rows, batch.num_tokens[rows])
        params = SamplingBatch(
            batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows], batch.seed[rows]
        )
        drawn = sample(logits, params, to_device(batch.num_tokens[rows], self.device))
        return drawn, logprobs_of(raw, drawn, batch.num_logprobs[rows]) if reports else None

    def _prompt_logprobs(self, part: PromptPart, hidden: torch.Tensor) -> PromptLogprobs:
        """What the model says of the tokens that follow a part of a prompt, so many at a time that their logits stay
        small."""
        batch, pieces = self.batch, []
        for done in range(0, part.num_tokens, PROMPT_LOGPROBS_ROWS):
            count = min(PROMPT_LOGPROBS_ROWS, part.num_tokens - done)
            first, position = part.first + done, part.start + done + 1
            targets = torch.from_numpy(batch.token_ids[part.row, position : position + count].astype(np.int64))
            logits = self.model.compute_logits(hidden[first : first + count])
            told = np.full(count, batch.num_prompt_logprobs[part.row])
            pieces.append(logprobs_of(logits, targets.to(self.device), told))
        return PromptLogprobs(part.row, part.start + 1, join(pieces))

    def warm_up(self) -> None:
        """Compile and touch everything a step can need, so that no request waits for it."""
        for window in self.model_config.windows:
            self.backend.warm_up(
                num_q_heads=self.model_config.num_heads,
                num_kv_heads=self.model_config.num_kv_heads,
                head_dim=self.model_config.head_dim,
                block_size=self.config.block_size,
                dtype=self.dtype,
                window=window or None,
                kv_dtype=self.kv_dtype,
            )
        usable = (self.cache.num_blocks - 1) * self.config.block_size
        longest = min(self.config.max_num_batched_tokens, self.config.max_model_len, usable)
        for length in sorted({1, longest}):
            self._rehearse(length)

    def _rehearse(self, length: int) -> None:
        """Run one sequence of `length` tokens through model and sampler. It leaves its traces in blocks nobody owns."""
        size = self.config.block_size
        metadata = AttentionMetadata.build(
            [length], [length], [list(range(1, -(-length // size) + 1))], size, self.device
        )
        hidden = self.model.forward(
            torch.zeros(length, dtype=torch.int32, device=self.device),
            torch.arange(length, device=self.device),
            self.cache.layers,
            [metadata] * self.model_config.num_layers,
            self.backend,
        )
        logits = self.model.compute_logits(hidden[-1:])
        for temperature in (0.0, 1.0):
            params = SamplingBatch(
                temperature=np.array([temperature], dtype=np.float32),
                top_k=np.array([5]),
                top_p=np.array([0.9], dtype=np.float32),
                min_p=np.array([0.1], dtype=np.float32),
                seed=np.array([1], dtype=np.uint64),
            )
            sample(logits, params, torch.ones(1, dtype=torch.int64, device=self.device))
