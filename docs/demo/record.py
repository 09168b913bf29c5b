"""Kill a worker under 16 streams and write down what the clients saw:  python docs/demo/record.py RECORDING.json

Needs a running server with two workers (`python launch.py --workers 2`) and the right to kill its processes. The same
16 greedy requests run twice, undisturbed and with a kill -9 midway, so the recording also says whether tokens differ.
`draw.py` makes the picture of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from client import AsyncClient, SamplingParams, Status

NUM_STREAMS = 16
NUM_TOKENS = 160
KILL_AT_TOKEN = NUM_TOKENS // 2
"""The kill comes when the first stream has this many tokens."""
STATUS_EVERY_S = 0.1
PROMPT = "Write a short story about a lighthouse keeper. Story number {}."


class Recorder:
    """One run of all streams. `events`: [seconds since the start, stream, tokens that came]."""

    def __init__(self, client: AsyncClient):
        self.client = client
        self.began = time.monotonic()
        self.events: list[list[float]] = []
        self.tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.reasons: list[str | None] = [None] * NUM_STREAMS
        self.midway = asyncio.Event()

    def now(self) -> float:
        return round(time.monotonic() - self.began, 4)

    async def stream(self, number: int) -> None:
        """Read one stream to its end; fail when a token is missing or comes twice."""
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        messages = [{"role": "user", "content": PROMPT.format(number)}]
        async with self.client.generate(messages, sampling) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    self.events.append([self.now(), number, len(chunk.token_ids)])
                self.tokens[number] += chunk.token_ids
                self.reasons[number] = chunk.finish_reason
                if len(self.tokens[number]) >= KILL_AT_TOKEN:
                    self.midway.set()

    async def run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self.stream(number))


def pid_of(status: Status, worker_id: str) -> int:
    return next(worker.pid for worker in status.workers if worker.worker_id == worker_id)


async def record() -> dict[str, object]:
    async with AsyncClient() as client:
        before = await client.status()
        calm = Recorder(client)
        await calm.run_all()
        run = Recorder(client)
        streams = asyncio.create_task(run.run_all())
        await run.midway.wait()
        victim = before.workers[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed_at = run.now()
        back_at: float | None = None
        while back_at is None or not streams.done():
            status = await client.status()
            ready = all(replica.state == "ready" for replica in status.replicas)
            if back_at is None and ready and pid_of(status, victim.worker_id) != victim.pid:
                back_at = run.now()
            await asyncio.sleep(STATUS_EVERY_S)
        await streams
        after = await client.status()
    return {
        "worker": victim.worker_id,
        "pid": victim.pid,
        "new_pid": pid_of(after, victim.worker_id),
        "killed_at_s": killed_at,
        "back_at_s": back_at,
        "num_tokens": NUM_TOKENS,
        "finish_reasons": run.reasons,
        "same_tokens_as_undisturbed": [one == other for one, other in zip(run.tokens, calm.tokens, strict=True)],
        "recoveries": sum(replica.recoveries for replica in after.replicas),
        "events": run.events,
    }


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    recording = asyncio.run(record())
    Path(sys.argv[1]).write_text(json.dumps(recording) + "\n")
    summary = {name: value for name, value in recording.items() if name != "events"}
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
