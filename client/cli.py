"""Which command is meant, and what every command has in common: how it fails.

The first argument decides: if it is the name of a command it is that, anything else belongs to a prompt. So a prompt
that is just one of these words needs -p.
"""

from __future__ import annotations

import os
import sys

from client.commands import ask, batch, chat, profile, status, top, trace
from client.errors import ClientError

_COMMANDS = {
    "chat": chat.main,
    "batch": batch.main,
    "profile": profile.main,
    "status": status.main,
    "top": top.main,
    "trace": trace.main,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 Ctrl-C,
    141 whoever read our output went away."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command = _COMMANDS.get(arguments[0]) if arguments else None
        code = command(arguments[1:]) if command else ask.main(arguments)
        sys.stdout.flush()
        return code
    except (ClientError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # the interpreter flushes stdout once more at exit, and must not fail at it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
