"""`python -m worker --config FILE --runtime DIR --worker-id worker-0 --replica 0`: started by the supervisor."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from protocol import logs
from protocol.config import ConfigError, EngineConfig
from protocol.exit_codes import CANNOT_SERVE
from protocol.lifeline import die_with_supervisor
from protocol.model_config import ModelConfigError
from protocol.runtime import RuntimeFolderError, read_endpoints


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m worker", description="One data plane process.")
    parser.add_argument("--config", type=Path, required=True, help="configuration written by the supervisor")
    parser.add_argument("--runtime", type=Path, required=True, help="runtime folder with endpoints.json")
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--incarnation", default=None, help="fresh name of this start; drawn if not given")
    arguments = parser.parse_args()
    die_with_supervisor()
    log = logs.set_up(arguments.worker_id, "info")
    try:
        config = EngineConfig.load(arguments.config)
        log = logs.set_up(arguments.worker_id, config.log_level)
        endpoints = read_endpoints(arguments.runtime)
    except (ConfigError, RuntimeFolderError) as error:
        log.error("%s", error)
        return 1
    # torch is imported from here on: what is wrong above is said at once
    from kernels.selector import NoBackend
    from worker.kv_cache import KVMemoryError
    from worker.layers.quantization import QuantizationUnavailable
    from worker.runner import StartError
    from worker.server import serve
    from worker.weights import WeightError

    try:
        incarnation = arguments.incarnation or secrets.token_hex(8)
        serve(config, arguments.worker_id, arguments.replica, incarnation, endpoints, arguments.runtime)
    except (StartError, NoBackend, WeightError, KVMemoryError, ModelConfigError, QuantizationUnavailable) as error:
        log.error("%s", error)
        return CANNOT_SERVE
    return 0


if __name__ == "__main__":
    sys.exit(main())
