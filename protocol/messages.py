"""The closed set of messages that cross a process boundary, by plane and direction. Types only: no I/O, no policy.

Arrays travel as bytes: int32, little-endian (`protocol.arrays` converts and checks them). Structs are array-like, so a
field is known by its place: new fields come last, with defaults. Names are vLLM's where the thing is the same.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1

Int32Array = bytes
"""int32 little-endian elements, any number of them."""

FinishReason = Literal["stop", "length", "abort", "kv_capacity", "error"]
"""stop: a stop token was sampled. length: max_tokens or the model's length reached. abort: the client asked or left.
kv_capacity: the sequence outgrew the whole pool while alone. error: the message says what happened."""

RejectCode = Literal[
    "invalid_request", "too_long", "duplicate_request", "unknown_request", "overloaded", "shutting_down", "worker_lost"
]


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages: encoded as [tag, field, field, ...]."""


# ------------------------------------------------------------------------------------------------ shared parts


class StructuredOutputsParams(msgspec.Struct, array_like=True, frozen=True):
    """The shape that an output must have; exactly one field is set. What fits no shape, or is too complex, is told by
    `protocol.grammar`."""

    json: str | None = None
    """A JSON schema, as JSON."""
    regex: str | None = None
    """Of the whole output, in Rust's syntax."""
    choice: tuple[str, ...] = ()
    """The output is one of these."""
    json_object: bool = False
    """Any JSON object."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How one request's tokens are drawn and when it ends. Checked by the scheduler at submit."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 (or below 1e-5) is greedy."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: the scheduler draws one when it accepts the request. 64 bits, unsigned."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """So many tokens are generated before a stop token can be drawn."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output has. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the output has the token. In [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides a positive logit, multiplies another, of every token that prompt or output has. In (0, 2]; 1: off."""
    logit_bias: dict[int, float] | None = None
    """Token id → added to its logit, in [-100, 100]."""
    logprobs: int | None = None
    """Log-probabilities with each output token: its own and those of so many most probable ones (0: its own alone)."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt but the first."""
    structured_outputs: StructuredOutputsParams | None = None


class KVCacheGroupSpec(msgspec.Struct, array_like=True, frozen=True):
    """Layers that share one block table. Same block size for all groups of a model."""

    sliding_window: int
    """Keys a query sees, itself included; 0: all of them (full attention)."""
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int


class LogprobsLists(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at several places of a text: of the token that stands there, then of the most probable ones,
    descending (`protocol.logprobs` packs and reads them). Of the model's logits as they are: before penalties, biases,
    grammar and temperature."""

    counts: Int32Array
    """Per place: how many candidates follow, its own token included; 0: nobody asked."""
    ranks: Int32Array
    """Per place: rank of its own token, 1 is the most probable; 0 where nobody asked."""
    token_ids: Int32Array
    """The candidates of all places, one after the other."""
    logprobs: bytes
    """float32 little-endian, one a candidate: natural logarithms."""


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of prompt tokens that one row computed in one step."""

    row: int
    start: int
    """Index in the prompt of the first token described."""
    logprobs: LogprobsLists


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """Token counts of one request. `cached_tokens`: prompt tokens found in the prefix cache when it first ran."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


# ------------------------------------------------------------------------------------------------ worker plane


class Hello(_Message, tag="hello", frozen=True):
    """Worker → scheduler: who I am and what memory I bring. Sent once, after the warm-up."""

    worker_id: str
    incarnation: str
    """Fresh for every start of the process; fences everything its predecessor may still send."""
    replica: int
    rank: int
    tp_size: int
    pid: int
    model_fingerprint: str
    block_size: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: int
    """Blocks that fit in this worker's KV memory, the null block included."""
    max_model_len: int
    max_num_seqs: int
    kv_memory_id: str
    """Identity of the memory that holds the KV; new with each allocation."""
    device: str
    dtype: str
    attention_backend: str
    backend_reason: str
    """One line: why this backend, and why not each other."""
    lends_cores: bool = False
    """While it is outside a step, its cores compute for the other workers of this machine."""


class Welcome(_Message, tag="welcome", frozen=True):
    """Scheduler → worker: you serve `replica` in `epoch`; `step` and the digest start at 0."""

    replica: int
    epoch: int
    num_blocks: int


class Refused(_Message, tag="refused", frozen=True):
    """Scheduler → worker: the handshake failed; the reason names both values. The worker exits."""

    reason: str


class NewRequestData(msgspec.Struct, array_like=True, frozen=True):
    """A request that enters a row: everything the worker will ever be told about it at once."""

    row: int
    token_ids: Int32Array
    """Prompt and committed output."""
    prompt_len: int
    num_computed_tokens: int
    """Tokens whose KV the blocks already hold (prefix hit)."""
    block_ids: tuple[Int32Array, ...]
    """Per cache group; 0 (the null block) in front of a sliding window."""
    sampling: SamplingParams
    """With the seed fixed."""


class SchedulerOutput(_Message, tag="plan", frozen=True):
    """Scheduler → worker: one step, as changes. Applied in the order of the fields.

    A row runs 0 tokens if in `hold_rows`, its number if in `prefill_rows`, else 1; it samples iff it has then computed
    all tokens it knows. Window fronts are derived by both sides, after `admit`, from the first position a row computes.
    """

    epoch: int
    step: int
    finish_rows: Int32Array
    """Rows to forget (ended, preempted, aborted); may be given away in this very plan."""
    admit: tuple[NewRequestData, ...]
    grow_rows: Int32Array
    grow_counts: Int32Array
    """Blocks appended per row; empty: one each."""
    grow_ids: tuple[Int32Array, ...]
    """Per cache group: the new block ids, in the order of the rows."""
    digest: int
    """uint64 over all block tables and positions after this plan; compared before anything runs."""
    copy_src: Int32Array
    copy_dst: Int32Array
    """Whole blocks to copy before the forward pass."""
    prefill_rows: Int32Array
    prefill_num_tokens: Int32Array
    hold_rows: Int32Array


class ModelRunnerOutput(_Message, tag="result", frozen=True):
    """Worker → scheduler: what one step sampled."""

    epoch: int
    step: int
    tokens: Int32Array
    """One per sampling row of that plan, rows ascending; -1: this row failed (NaN logits); -2: its grammar failed."""
    digest: int
    timings_us: Int32Array
    """[apply, commit, forward, sample, idle before, rest in that] in microseconds; the last only if it rested."""
    logprobs: LogprobsLists | None = None
    """A place for each of `tokens`; None when nobody asked."""
    started_ns: int = 0
    """When the worker began with the plan: CLOCK_MONOTONIC of its machine, nanoseconds; 0: not told."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    kernel_calls: dict[str, int] = {}
    """Calls of each kernel since the result before; empty unless a trace is taken."""


class PlanRefused(_Message, tag="plan_refused", frozen=True):
    """Worker → scheduler: I did not run this plan. `reason`: "digest" (the planes diverged) or what else was wrong."""

    epoch: int
    step: int
    reason: str
    expected: int = 0
    actual: int = 0


class Heartbeat(_Message, tag="beat", frozen=True):
    """Worker → scheduler, from a thread and socket of its own: the process is alive, whatever its step does."""

    worker_id: str
    incarnation: str
    state: str
    work_items: int = 0
    """Pieces of matrix products and attention that it has computed since its start; 0 on a GPU."""
    borrowed_items: int = 0
    """How many of them on idle cores of other workers."""


class CountKernels(_Message, tag="count_kernels", frozen=True):
    """Scheduler → worker: say in each result how often each kernel ran, or stop saying it."""

    on: bool


class ProfileSteps(_Message, tag="profile_steps", frozen=True):
    """Scheduler → worker: profile your next steps, then send ProfileResult; 0: send what you have."""

    steps: int


class KernelShare(msgspec.Struct, array_like=True, frozen=True):
    """One kernel or operation of a profile: how often it ran, and its own time, without what it called."""

    name: str
    calls: int
    self_us: int


class Profile(msgspec.Struct, array_like=True, frozen=True):
    """What some steps of a worker spent where."""

    steps: int
    """That ran; perhaps fewer than asked for."""
    wall_us: int
    """Of all these steps together, the profiler's own cost included."""
    device: str
    """cuda: the kernels of the GPU are listed; cpu: operations of the CPU."""
    kernels: tuple[KernelShare, ...]
    """The most expensive first."""


class ProfileResult(_Message, tag="profile_result", frozen=True):
    """Worker → scheduler: the profile that was asked for; sent when its last step has run."""

    epoch: int
    profile: Profile


class Rest(_Message, tag="rest", frozen=True):
    """Scheduler → worker: from now on wait so long between a step and the next, 0: no more. It counts at once, also for
    plans that were sent before, and for a rest that is being taken."""

    us: int
    """Microseconds, at most 1,000,000."""


class StopWorker(_Message, tag="stop", frozen=True):
    """Scheduler → worker: finish and exit with code 0."""

    reason: str


WorkerToScheduler = Hello | ModelRunnerOutput | PlanRefused | Heartbeat | ProfileResult
SchedulerToWorker = Welcome | Refused | SchedulerOutput | CountKernels | ProfileSteps | Rest | StopWorker


# ------------------------------------------------------------------------------------------------ client plane


class Submit(_Message, tag="submit", frozen=True):
    """Client → scheduler: generate. `request_id` is the client's, unique while the request is known."""

    request_id: str
    token_ids: Int32Array
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; ties by arrival."""
    cache_salt: str = ""
    """Prefix blocks are shared only under the same salt."""


class Attach(_Message, tag="attach", frozen=True):
    """Client → scheduler: send me this request's tokens from output index `next_index` on (after a reconnect)."""

    request_id: str
    next_index: int


class Abort(_Message, tag="abort", frozen=True):
    """Client → scheduler: end this request. Answered by Finished(reason) if it was still known."""

    request_id: str
    reason: Literal["abort", "stop"] = "abort"
    """stop: the client has all it wants, for example up to a stop string; counted as a success."""


class Describe(_Message, tag="describe", frozen=True):
    """Client → scheduler: which model do you serve? Answered by ServerInfo."""


class GetStatus(_Message, tag="get_status", frozen=True):
    """Client or supervisor → scheduler: one snapshot. Answered by Status."""


class ExplainPrefix(_Message, tag="explain_prefix", frozen=True):
    """Client → scheduler: how much of this prompt is cached where, and why not more? Answered by PrefixExplanation, or
    by Rejected with `query_id` as request id."""

    query_id: str
    token_ids: Int32Array
    cache_salt: str = ""


class StartTrace(_Message, tag="start_trace", frozen=True):
    """Client → scheduler: record what happens from now on. Answered by TraceChunks, or by Rejected with `query_id` as
    request id."""

    query_id: str
    seconds: float


class StartProfile(_Message, tag="start_profile", frozen=True):
    """Client → scheduler: profile steps of a replica's worker. Answered by ProfileReport, or by Rejected with
    `query_id` as its request id: also when the worker dies meanwhile."""

    query_id: str
    replica: int
    steps: int
    """1 to 1000."""
    seconds: float
    """Report what has run by then; at most 600."""


class GetSnapshot(_Message, tag="get_snapshot", frozen=True):
    """Client → scheduler: what a person would look at, compactly. Answered by Snapshot."""

    steps_after: tuple[int, ...] = ()
    """Per replica: the number of the last step record that the client has; fewer than replicas: 0 for the rest."""


class GetBlock(_Message, tag="get_block", frozen=True):
    """Client → scheduler: everything about one block. Answered by BlockInfo."""

    replica: int
    block_id: int


class GetTable(_Message, tag="get_table", frozen=True):
    """Client → scheduler: the block table of one request. Answered by RequestTable."""

    request_id: str


class GetMetrics(_Message, tag="get_metrics", frozen=True):
    """Client → scheduler: all counters and histograms. Answered by MetricsSnapshot."""


class Accepted(_Message, tag="accepted", frozen=True):
    """Scheduler → client: `handle` names the request in TokenBatch and Finished on this connection."""

    request_id: str
    handle: int
    prompt_tokens: int


class TokenBatch(_Message, tag="tokens", frozen=True):
    """Scheduler → client: the new tokens of one step for all of this connection's requests. Three arrays of one length;
    `indices` number each request's output tokens from 0. A slow reader gets several steps merged into one batch."""

    step: int
    handles: Int32Array
    indices: Int32Array
    tokens: Int32Array
    logprobs: LogprobsLists | None = None
    """A place for each token; None when nobody asked."""


class PromptLogprobsBatch(_Message, tag="prompt_logprobs", frozen=True):
    """Scheduler → client: log-probabilities of prompt tokens, as they are computed, all before the first output token.
    After an Attach they come from the start again."""

    handle: int
    start: int
    """Index in the prompt of the first token described."""
    logprobs: LogprobsLists


class Finished(_Message, tag="finished", frozen=True):
    """Scheduler → client: the last message about `handle`."""

    handle: int
    reason: FinishReason
    usage: Usage
    message: str = ""


class Rejected(_Message, tag="rejected", frozen=True):
    """Scheduler → client: not accepted; `param` names the field that was wrong, if one was."""

    request_id: str
    code: RejectCode
    message: str
    param: str = ""


class ServerInfo(_Message, tag="server_info", frozen=True):
    """Scheduler → client: what a client needs to tokenise and to bound its requests."""

    model_path: str
    """Folder with tokenizer.json and the chat template, on the server's machine."""
    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str


class WorkerStatus(msgspec.Struct, array_like=True, frozen=True):
    """One worker as the scheduler sees it. state: ready, dead or refused."""

    worker_id: str
    state: str
    replica: int
    epoch: int
    pid: int
    device: str
    dtype: str
    attention_backend: str
    backend_reason: str
    num_blocks: int
    block_size: int
    incarnation: str = ""
    """Which start of its process this is; names it beyond doubt where a pid may come again."""


class ReplicaStatus(msgspec.Struct, array_like=True, frozen=True):
    """One replica's queues, pool and counters (counters since the scheduler started)."""

    replica: int
    state: str
    epoch: int
    running: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    steps: int
    generated_tokens: int
    preemptions: int
    recoveries: int
    fenced_messages: int


class Status(_Message, tag="status", frozen=True):
    """Scheduler → client or supervisor: one snapshot of everything."""

    uptime_s: float
    waiting: int
    requests: int
    """Requests known and unfinished, wherever they are."""
    workers: tuple[WorkerStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    dropped_frames: int
    """Frames on any socket that were no valid message."""


BLOCK_STATES = ("null", "free", "cached", "used", "shared")
"""What a byte of ReplicaSnapshot.blocks means. null: block 0. free: holds nothing. cached: free, but a prefix lookup
can still find what it holds. used: one table entry names it. shared: several do."""

STEP_COLUMNS = (
    "number",
    "epoch",
    "step",
    "finished_ms",
    "round_us",
    "rows",
    "tokens",
    "plan_bytes",
    "encode_us",
    "apply_us",
    "commit_us",
    "forward_us",
    "sample_us",
    "idle_us",
    "schedule_us",
    "wire_us",
    "return_us",
    "result_us",
)
"""Of ReplicaSnapshot.steps. number: of the record, from 1 on, whatever the epoch. finished_ms: when the result came,
since the scheduler started. round_us: from plan to result. rows: those that sampled. apply_us to idle_us: as the worker
measured them. wire_us, return_us: on the way there and back, without the time that the worker was busy with others."""

REQUEST_COLUMNS = ("state", "replica", "row", "prompt", "output", "computed", "cached", "limit", "priority")
"""Of Snapshot.requests. state: 0 waiting, 1 running, 2 draining. replica, row, cached: -1 for none or not yet known."""


class ReplicaSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """One replica's blocks, how full they are, and its newest steps."""

    replica: int
    epoch: int
    blocks: bytes
    """One byte a block, the null block included: its place in BLOCK_STATES."""
    allocated_slots: int
    """Token slots in the block tables of the running requests, all groups."""
    wasted_slots: int
    """Those of them behind the last token of a request: the unfilled ends of last blocks."""
    steps: Int32Array
    """Records of finished steps, a row of STEP_COLUMNS each, oldest first."""


class Snapshot(_Message, tag="snapshot", frozen=True):
    """Scheduler → client: all replicas at one moment. Its cost is bounded: bytes are copied, some rows are listed."""

    status: Status
    replicas: tuple[ReplicaSnapshot, ...]
    request_ids: tuple[str, ...]
    """Running ones by replica and row, then draining ones, then the queue in its order; at most 200."""
    requests: Int32Array
    """A row of REQUEST_COLUMNS for each of them."""


class BlockInfo(_Message, tag="block_info", frozen=True):
    """Scheduler → client: one block, now. `state` is empty if the replica has no such block (or no worker)."""

    replica: int
    block_id: int
    epoch: int
    state: str
    ref_cnt: int
    block_hash: bytes
    """Its chained content hash; empty: a prefix lookup cannot find it."""
    group: int
    """Cache group of the table or hash that names it; -1: none does."""
    age_s: float
    """Since it was handed out, shared, freed or evicted last; -1: never since the epoch began."""
    owners: tuple[str, ...]
    """Requests whose tables name it, at most 16."""
    indices: Int32Array
    """For each of the owners: which entry of its table it is."""


class RequestTable(_Message, tag="request_table", frozen=True):
    """Scheduler → client: the blocks of a running request; no tables if it does not run (or is not known)."""

    request_id: str
    replica: int
    epoch: int
    num_hit_blocks: int
    """Leading blocks that were found in the prefix cache."""
    tables: tuple[Int32Array, ...]
    """Per cache group the block ids in logical order; 0 in front of a sliding window."""


class HistogramData(msgspec.Struct, array_like=True, frozen=True):
    """Values counted by size. The borders are in `protocol.histograms`."""

    counts: tuple[int, ...]
    """By bucket, not cumulative; the last is for what exceeds all borders."""
    sum: float
    """Of the values."""


class ReplicaMetrics(msgspec.Struct, array_like=True, frozen=True):
    """What one replica has done since the scheduler started, beyond ReplicaStatus."""

    replica: int
    prompt_tokens: int
    """Of requests that have come to their first token."""
    histograms: dict[str, HistogramData]
    """By the names of `protocol.histograms.BOUNDS`."""
    stages: dict[str, HistogramData]
    """Seconds of a step by stage, `protocol.histograms.STAGES`."""
    decode_step_s: float = 0.0
    """What a step is believed to take in which the rows that decode now do nothing else; 0: not known yet."""
    prefill_token_s: float = 0.0
    """What a prompt token is believed to add to a step; 0: not known yet."""
    prefill_budget: int = 0
    """Prompt tokens that the next step would take."""
    rested_s: float = 0.0
    """Waited between steps for the sake of a long prompt of another replica."""
    work_items: int = 0
    """Pieces of matrix products and attention computed on a CPU, as its workers' heartbeats tell."""
    borrowed_items: int = 0
    """How many of them on idle cores of other workers."""


class MetricsSnapshot(_Message, tag="metrics", frozen=True):
    """Scheduler → client: everything it counts, of one moment."""

    status: Status
    finished: dict[str, int]
    """Requests that are over, by reason."""
    replicas: tuple[ReplicaMetrics, ...]


class GroupPrefix(msgspec.Struct, array_like=True, frozen=True):
    """How far one cache group alone would hit, and the block that ends it."""

    group: int
    sliding_window: int
    """0: full attention."""
    hit_blocks: int
    hit_tokens: int
    cached_blocks: int
    """Blocks of the prompt that are cached, also behind a gap."""
    missing_block: int
    """The first block that differs from all that is cached: its index in the prompt; -1: none."""
    missing_first_token: int
    missing_last_token: int
    reason: str
    """evicted; lost (its worker died); withdrawn (it held no valid results); computing (a running request is at it);
    never_stored; unknown (never stored, or evicted too long ago to remember); disabled; empty: none is missing."""


class ReplicaPrefix(msgspec.Struct, array_like=True, frozen=True):
    """What one replica would find. A hit needs a length at which every group hits."""

    replica: int
    state: str
    epoch: int
    enabled: bool
    hit_blocks: int
    hit_tokens: int
    groups: tuple[GroupPrefix, ...]


class PrefixExplanation(_Message, tag="prefix_explanation", frozen=True):
    """Scheduler → client: the prefix cache as this prompt would find it now."""

    query_id: str
    num_tokens: int
    block_size: int
    most_blocks: int
    """Blocks that can hit at all: full ones, without the last token, which is always computed."""
    replicas: tuple[ReplicaPrefix, ...]


class ProfileReport(_Message, tag="profile_report", frozen=True):
    """Scheduler → client: the profile that was asked for."""

    query_id: str
    worker_id: str
    profile: Profile


class TraceChunk(_Message, tag="trace_chunk", frozen=True):
    """Scheduler → client: what was recorded since the chunk before."""

    query_id: str
    events: bytes
    """Chrome trace events, JSON objects with a comma and a line break behind each."""
    last: bool


ClientToScheduler = (
    Submit
    | Attach
    | Abort
    | Describe
    | GetStatus
    | GetMetrics
    | ExplainPrefix
    | StartTrace
    | StartProfile
    | GetSnapshot
    | GetBlock
    | GetTable
)
SchedulerToClient = (
    Accepted
    | TokenBatch
    | PromptLogprobsBatch
    | Finished
    | Rejected
    | ServerInfo
    | Status
    | MetricsSnapshot
    | PrefixExplanation
    | TraceChunk
    | ProfileReport
    | Snapshot
    | BlockInfo
    | RequestTable
)


# ----------------------------------------------------------------------------------------------- control plane


class Watch(_Message, tag="watch", frozen=True):
    """Supervisor → scheduler: tell me of WorkerChanged and KillWorker from now on."""


class WorkerExited(_Message, tag="worker_exited", frozen=True):
    """Supervisor → scheduler: this incarnation of the worker's process is gone."""

    worker_id: str
    incarnation: str
    reason: str


class WorkerChanged(_Message, tag="worker_changed", frozen=True):
    """Scheduler → supervisor: a worker became ready, dead, or was refused (`detail` says why)."""

    status: WorkerStatus
    detail: str = ""


class KillWorker(_Message, tag="kill_worker", frozen=True):
    """Scheduler → supervisor: end this incarnation's process and start another, because it was fenced (silent or
    diverged). Gateway → scheduler: somebody wants to see it die; passed on while this incarnation serves."""

    worker_id: str
    incarnation: str
    reason: str


class Shutdown(_Message, tag="shutdown", frozen=True):
    """Supervisor → scheduler: end every request with "abort", then exit."""


SupervisorToScheduler = Watch | WorkerExited | GetStatus | Shutdown | KillWorker
SchedulerToSupervisor = WorkerChanged | KillWorker | Status
