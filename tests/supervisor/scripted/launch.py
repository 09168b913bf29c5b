"""`launch.py` with scripted processes: Fleet, sockets, signals and processes are real, the model is not needed.

usage: launch.py RUNTIME READY_FILE WORKERS START_TIMEOUT_S
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from protocol import logs
from protocol.config import EngineConfig
from supervisor.fleet import Fleet
from supervisor.front_door import FrontDoor
from supervisor.prepare import StartFailed
from supervisor.processes import Commands
from supervisor.stop_signal import StopSignal
from supervisor.terminal import Terminal

HERE = Path(__file__).parent


def main() -> int:
    runtime, ready_file = Path(sys.argv[1]), Path(sys.argv[2])
    config = EngineConfig(
        model_name="scripted",
        workers=int(sys.argv[3]),
        start_timeout_s=float(sys.argv[4]),
        heartbeat_interval_s=0.1,
        heartbeat_timeout_s=1.0,
        port=0,
    )
    terminal = Terminal()
    logs.set_up("supervisor", "info", terminal)
    config.save(runtime / "config.json")
    commands = Commands(
        config=runtime / "config.json",
        runtime=runtime,
        threads_per_worker=1,
        scheduler_module=(str(HERE / "scheduler.py"),),
        worker_module=(str(HERE / "worker.py"),),
        gateway_module=(str(HERE / "gateway.py"),),
    )
    stop, door = StopSignal(), FrontDoor.open(config) if "SCRIPT_GATEWAY" in os.environ else None
    try:
        Fleet(config, commands, stop, terminal, ready_file=ready_file, began=time.monotonic(), front_door=door).run()
    except StartFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
