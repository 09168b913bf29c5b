"""Start a deployment and keep it running:  python launch.py --workers 2   (--help for all flags).

Exit code 0 after SIGINT or SIGTERM, 1 when it cannot be started, 2 for a wrong flag or setting.
"""

from __future__ import annotations

import sys
import time

from protocol import logs, runtime
from supervisor.flags import parse
from supervisor.fleet import Fleet
from supervisor.front_door import FrontDoor
from supervisor.prepare import Interrupted, StartFailed, begin_trace, clear_ready_file, complete, resolve_model
from supervisor.processes import Commands
from supervisor.stop_signal import StopSignal
from supervisor.terminal import Terminal


def main(arguments: list[str] | None = None) -> int:
    """Run until a stop signal; return the exit code."""
    began = time.monotonic()
    options = parse(arguments)
    terminal = Terminal()
    logs.set_up("supervisor", options.config.log_level, terminal)
    stop = StopSignal()
    try:
        if options.ready_file:
            clear_ready_file(options.ready_file)
        if options.config.trace:
            begin_trace(options.config.trace)
        front_door = FrontDoor.open(options.config) if options.config.gateway else None
        config = complete(options.config, resolve_model(options.config, stop))
        folder = runtime.create()
        try:
            config.save(folder / "config.json")
            commands = Commands(folder / "config.json", folder, config.threads_per_worker)
            Fleet(
                config, commands, stop, terminal, ready_file=options.ready_file, began=began, front_door=front_door
            ).run()
        finally:
            runtime.remove(folder)
    except Interrupted:
        return 0
    except (StartFailed, runtime.RuntimeFolderError, OSError) as error:
        print(f"launch.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
