"""A gateway that answers every connection with its pid, and beats in between.

SCRIPT_GATEWAY: "hang" stops beating, and accepting, once it has answered; "fail" ends before its first beat.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys

from protocol.lifeline import die_with_supervisor


def main() -> None:
    die_with_supervisor()
    parser = argparse.ArgumentParser()
    for flag in ("--config", "--runtime"):
        parser.add_argument(flag)
    for flag in ("--listener-fd", "--beat-fd"):
        parser.add_argument(flag, type=int)
    options = parser.parse_args()
    behaviour = os.environ["SCRIPT_GATEWAY"]
    if behaviour == "fail":
        print("no module named gateway", file=sys.stderr)
        sys.exit(5)
    listener = socket.socket(fileno=options.listener_fd)
    while True:
        os.write(options.beat_fd, b".")
        if not select.select([listener], [], [], 0.1)[0]:
            continue
        with listener.accept()[0] as connection:
            connection.sendall(str(os.getpid()).encode())
        if behaviour == "hang":
            signal.pause()


if __name__ == "__main__":
    main()
