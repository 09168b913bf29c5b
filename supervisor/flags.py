"""The command line of `launch.py` → an EngineConfig and what concerns the supervisor alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from protocol.config import ConfigError, EngineConfig

_EPILOG = """\
Talk to it from another terminal:  python -m client "What is the capital of France?"
Watch it:                          python -m client status
Over HTTP, as OpenAI's API:        curl http://127.0.0.1:8000/v1/models
"""


class Options(msgspec.Struct, frozen=True):
    """What the command line says."""

    config: EngineConfig
    ready_file: Path | None


def parse(arguments: list[str] | None = None) -> Options:
    """Flags, over the settings of --config. Exits with code 2 and one line that names what is wrong."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    file: Path | None = given.pop("config", None)
    ready_file: Path | None = given.pop("ready_file", None)
    if trace := given.pop("trace", None):
        given["trace"] = str(trace.absolute())
    try:
        config = EngineConfig.from_toml(file, given) if file else EngineConfig.from_dict(given)
    except ConfigError as error:
        parser.error(str(error))
    return Options(config, ready_file)


def _parser() -> argparse.ArgumentParser:
    default = EngineConfig()
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Serve a language model from paged KV cache: one scheduler, many workers, restarted when they die.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )

    def choice(group: argparse._ArgumentGroup, flag: str, values: tuple[str, ...], text: str) -> None:
        group.add_argument(flag, choices=values, help=f"{text} (default: {values[0]})")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="X", help="folder, .gguf file or Hugging Face id (default: SmolLM2-135M-Instruct)"
    )
    choice(model, "--dtype", ("auto", "float32", "bfloat16", "float16"), "precision of weights and KV cache")
    choice(model, "--quantization", ("none", "int8"), "int8: 8-bit weights and activations, on the CPU")
    choice(model, "--load-format", ("auto", "dummy"), "dummy: random weights, for measurements")
    model.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest sequence (default: the model's, at most 8192)"
    )

    processes = parser.add_argument_group("processes")
    processes.add_argument("--workers", type=int, metavar="N", help=f"worker processes (default: {default.workers})")
    choice(processes, "--device", ("auto", "cpu", "cuda"), "where the workers compute")
    processes.add_argument(
        "--attention-backend", metavar="NAME", help="auto, or a name that `python -m kernels` prints (default: auto)"
    )
    processes.add_argument(
        "--threads-per-worker", type=int, metavar="N", help="CPU threads of a worker (default: cores / workers)"
    )
    processes.add_argument(
        "--no-lend-cores",
        dest="lend_cores",
        action="store_false",
        help="on the CPU, idle workers do not lend their cores to busy ones, and none that only decodes rests while "
        "another computes a long prompt",
    )
    processes.add_argument(
        "--enforce-eager", action="store_true", help="on a GPU, record no decode steps (no CUDA graphs)"
    )
    choice(processes, "--transport", ("ipc", "tcp"), "how the processes and clients are connected")

    processes.add_argument(
        "--client-port", type=int, metavar="N", help="loopback port for clients, with --transport tcp (default: any)"
    )

    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", metavar="ADDRESS", help=f"where the HTTP API listens (default: {default.host})")
    http.add_argument("--port", type=int, metavar="N", help=f"its port; 0: any that is free (default: {default.port})")
    http.add_argument(
        "--api-key", metavar="KEY", help="what HTTP clients must send as a bearer token (default: nothing)"
    )
    http.add_argument(
        "--no-kill-button",
        dest="kill_button",
        action="store_false",
        help="the live page has no button that kills a worker (it has one on this machine only)",
    )
    http.add_argument("--no-gateway", dest="gateway", action="store_false", help="no HTTP API")

    cache = parser.add_argument_group("KV cache")
    choice(cache, "--kv-cache-dtype", ("auto", "fp8_e4m3", "int8"), "one byte a number instead of --dtype")
    cache.add_argument("--block-size", type=int, metavar="N", help=f"tokens in a block (default: {default.block_size})")
    cache.add_argument(
        "--kv-memory", metavar="SIZE", help="per worker, for example 512MiB or 2G (default: from what is free)"
    )
    cache.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not share blocks between requests with a common prefix",
    )

    batch = parser.add_argument_group("batching")
    batch.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"requests that run at once in a worker (default: {default.max_num_seqs})",
    )
    batch.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"tokens computed in one step (default: {default.max_num_batched_tokens})",
    )
    batch.add_argument(
        "--max-step-stretch",
        type=float,
        metavar="X",
        help="while requests decode, prompts are computed in pieces such that a step takes at most X times what "
        f"decoding alone takes; 0: no such bound (default: {default.max_step_stretch})",
    )
    batch.add_argument(
        "--seed", type=int, metavar="N", help=f"for requests that bring no seed (default: {default.seed})"
    )

    other = parser.add_argument_group("other")
    other.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of settings, named as the flags with _ for -; flags win"
    )
    other.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="JSON with endpoints and pids, written when requests can be served",
    )
    other.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace of every step and request, for Perfetto; written as it grows"
    )
    choice(other, "--log-level", ("info", "debug", "warning", "error"), "how much is logged")
    return parser
