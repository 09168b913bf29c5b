"""Log-probabilities on their way from a worker's result to the clients that asked for them. Pure.

Each goes out once, with its token or, for the prompt, in the order of the prompt; what is sent is also kept with the
request as long as it is unfinished, for a client that attaches. A prompt that is computed again, after a preemption or
on another worker, is told from where its client knows it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.codec import MalformedFrame
from protocol.logprobs import Logprobs, join, nothing
from protocol.messages import LogprobsLists, ModelRunnerOutput
from scheduler.replica import Step
from scheduler.request import Request


def problem_with(step: Step, result: ModelRunnerOutput) -> str | None:
    """What of a result's log-probabilities contradicts the step; None: nothing."""
    try:
        if result.logprobs is not None and len(Logprobs(result.logprobs)) != len(step.rows):
            return f"step {step.step}: logprobs of other places than the {len(step.rows)} tokens"
        for part in result.prompt_logprobs:
            request = step.reporting.get(part.row)
            end = part.start + len(Logprobs(part.logprobs))
            if request is None or not 1 <= part.start < end <= request.prompt_len:
                return f"step {step.step}: row {part.row} reports prompt logprobs that are not due"
            if part.start > request.num_prompt_logprobs:
                return f"step {step.step}: row {part.row} left out prompt logprobs"
    except MalformedFrame as error:
        return f"step {step.step}: {error}"
    return None


def new_prompt_logprobs(request: Request, start: int, lists: LogprobsLists) -> LogprobsLists | None:
    """What of a part, from prompt index `start`, its client does not know yet; the request keeps it. None: nothing."""
    part = Logprobs(lists)
    known = request.num_prompt_logprobs - start
    if known >= len(part):
        return None
    if known:
        lists = part.starting_at(known)
    request.prompt_logprobs.append(lists)
    request.num_prompt_logprobs = start + len(part)
    return lists


def keep(requests: dict[int, Request], handles: NDArray[np.int64], indices: NDArray[np.int64], part: Logprobs) -> None:
    """Remember what is told with the tokens `indices` of the requests `handles`, one place each."""
    for place in np.nonzero(part.counts)[0].tolist():
        request = requests.get(int(handles[place]))
        if request is not None:
            request.logprobs[int(indices[place])] = part.select(np.array([place]))


def kept(request: Request, first: int, count: int) -> LogprobsLists | None:
    """What was told with `count` output tokens from index `first` on; None if nothing was asked."""
    if request.sampling.logprobs is None:
        return None
    return join([request.logprobs.get(index) or nothing(1) for index in range(first, first + count)])
