"""`python -m scheduler --config FILE --runtime DIR`: started by the supervisor."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from protocol import logs
from protocol.config import ConfigError, EngineConfig
from protocol.lifeline import die_with_supervisor
from protocol.model_config import ModelConfigError
from protocol.sockets import BindError
from scheduler.server import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler", description="The control plane process.")
    parser.add_argument("--config", type=Path, required=True, help="configuration written by the supervisor")
    parser.add_argument("--runtime", type=Path, required=True, help="runtime folder for sockets")
    arguments = parser.parse_args()
    die_with_supervisor()
    try:
        config = EngineConfig.load(arguments.config)
        log = logs.set_up("scheduler", config.log_level)
        try:
            serve(config, arguments.runtime)
        except (BindError, ModelConfigError) as error:
            log.error("%s", error)
            return 1
    except ConfigError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
