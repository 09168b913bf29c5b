"""How many prompt tokens a step may compute while other rows decode, so that those do not wait too long for it.

A chunk of a prompt makes a step longer, and every row that decodes in the step waits. What a step costs differs a
hundredfold between machines, models and kernels, so it is learned from the steps' own times: `StepCosts`. `StepBudget`
turns that into tokens: the step shall take at most `stretch` times what its decoding rows alone would take. Nothing
known, or nobody decoding: the whole static budget. Pure: no clock, times are given; the same steps lead to the same
answers.

Chunking costs those who decode nothing but evenness: they lose the time of the prompts' computation in any case. It
costs those who wait: at a stretch of s they get (s - 1) / s of the speed. So the stretch grows when many wait.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

KEPT_DECODES = 8
"""Latest steps without a chunk that are learned from when a chunk is due."""
LEAST_KNOWN = 3
"""Steps without a chunk before anything is concluded."""
NOISE = 0.1
"""Standard error of a step's time, as a share of it."""
DRIFT = 0.03
"""How much each cost may change from step to step, as a share of it: how fast old steps are forgotten."""
MOST_LATE = 10.0
"""A step counts as at most so many times longer than expected: one that was held up by something else is no news."""
HELP_GAIN = 0.3
"""Weight of the latest step in the average of what help brings."""
SHARED = 1.6
"""While the streams of all workers bear a long prompt's cost, the stretch is so many times itself: none waits longer
than the others then, and the prompt, which all wait for, is over sooner."""
MOST_HELP = 0.1
"""Share of its usual time that a step takes at least, whatever help it has; and it takes no longer than without."""
SHORTEST_S = 1e-5
"""No step is expected to take less."""
PRIOR = np.array([1.0, 0.2, 0.3, 1.0, 0.3])
"""Of the first step that shows a cost, the share that may be due to it: a step is believed to cost by itself rather
than by its rows, a chunk by its tokens rather than by being there or by what its tokens attend to."""

LEAST_CHUNK = 16
"""Prompt tokens that every step may take: a prompt always comes to its end."""
WORTH_ITS_COST = 1.0
"""A chunk's tokens take at least this share of what a chunk costs by being there. Else prompts would pay that over and
over, for instance on a GPU where a step with a chunk is launched kernel by kernel."""
CROWD = 6.0
"""The stretch grows when, for every row that decodes, more than 1 / CROWD requests wait behind the first one."""
MOST_GROWN = 4.0
"""It grows to so many times itself; beyond, those who wait would gain little."""
INTERRUPTED = 16.0
"""For interrupted streams (their worker died, or they were preempted) it grows to so many times itself for each of them
by row that decodes, without a limit: they are silent already, and where they are many the silence of all is shortest
when they are dealt with at once."""


class StepCosts:
    """What the steps of one replica cost, from its results. Survives epochs: a new worker is taken for like the old.

    A step with D decoding rows and a chunk of n tokens at position p takes

        step + row · D  (+ chunk + token · n + context · n · p, if n > 0)   seconds.

    A Kalman filter (R. E. Kalman, 1960) follows the five, which are taken to drift: what a step cannot tell apart is
    left as it was believed to be. A step's error is a share of its own time, so a late one says little, and an early
    one corrects what was wrong. No cost is ever negative.

    While other workers rest for the sake of its prompts (`scheduler.rest`) a step takes only a share of that, `help`,
    which is all that is learned of such a step: so nothing has to be learned anew when help ends. Chunks without help
    were all of about one size, so they cannot tell well what of their cost was due to their tokens; larger ones with
    help are expected to cost more in proportion. The share is anew for each time that help is there.
    """

    def __init__(self) -> None:
        self.known: F64 = np.zeros(5)
        """step, row, chunk, token, context: seconds."""
        self.help = 1.0
        self._num_helped = 0
        self._usual_chunk = LEAST_CHUNK
        """Tokens of the latest chunk beside rows that decoded, without help."""
        self._variance: F64 = np.zeros((5, 5))
        self._decodes: deque[tuple[int, float]] = deque(maxlen=KEPT_DECODES)
        """(rows, seconds) not learned from yet."""
        self._num_decodes = 0
        self._num_chunks = 0

    def observe(self, decoding: int, chunk: int, position: float, seconds: float, helped: bool = False) -> None:
        """A step's result: rows that decoded in it, prompt tokens it computed, their mean position, its computing time;
        helped: whether others rested for the sake of that chunk.

        Costs next to nothing without a chunk: it is learned from when someone asks."""
        if not chunk:
            self._decodes.append((decoding, seconds))
            return
        self._catch_up()
        size = np.array([1.0, decoding, 1.0, chunk, chunk * position])
        if helped:
            usual_s = self.known[0] + self.known[1] * decoding + self._token_s(position) * chunk
            self._learn_help(seconds / max(float(usual_s), SHORTEST_S))
            return
        self._num_chunks += 1
        if decoding and chunk >= LEAST_CHUNK:  # neither a prompt by itself nor the end of one
            self._usual_chunk = chunk
        self._learn(size, seconds)

    def decode_s(self, decoding: int) -> float | None:
        """Seconds of a step in which so many rows decode, and nothing else runs; None: not known yet."""
        self._catch_up()
        if self._num_decodes < LEAST_KNOWN:
            return None
        return float(self.known[0] + self.known[1] * decoding)

    def chunk_s(self, position: float, helped: bool = False) -> tuple[float, float] | None:
        """Seconds that a chunk at `position` adds: by being there, and for each token; None: not known yet. helped: it
        is one that will have help, by the clock of a step that has none."""
        if not self._num_chunks:
            return None
        if helped:
            return 0.0, self._token_s(position)
        return float(self.known[2]), float(self.known[3] + self.known[4] * position)

    def _token_s(self, position: float) -> float:
        """What a token of a chunk cost without help, all that the chunk cost included."""
        return float(self.known[2] / self._usual_chunk + self.known[3] + self.known[4] * position)

    def help_begins(self) -> None:
        """From now on others rest; what that brings may differ from last time."""
        self.help, self._num_helped = 1.0, 0

    def _learn_help(self, share: float) -> None:
        """share: of its usual time that a step took with help. The first is believed, later ones are averaged."""
        if share > 0.0:  # else not told
            self._num_helped += 1
            gain = max(HELP_GAIN, 1.0 / self._num_helped)
            self.help = (1.0 - gain) * self.help + gain * min(max(share, MOST_HELP), 1.0)

    def _catch_up(self) -> None:
        while self._decodes:
            decoding, seconds = self._decodes.popleft()
            self._num_decodes += 1
            self._learn(np.array([1.0, decoding, 0.0, 0.0, 0.0]), seconds)

    def _learn(self, size: F64, seconds: float) -> None:
        """size: how much of each cost there was in the step. The update is in Joseph's form, so that rounding makes no
        variance negative."""
        if not seconds > 0.0:
            return  # not told
        seen = size > 0.0
        fresh = seen & (self._variance.diagonal() == 0.0)
        expected = float(size @ self.known)
        if not fresh.any():
            seconds = min(seconds, MOST_LATE * max(expected, SHORTEST_S))
        whole = np.divide(seconds, size, out=np.zeros(5), where=seen)  # each, if it were all of this step
        step = np.where(fresh, PRIOR * whole, DRIFT * (self.known + 0.1 * whole)) * seen
        variance = self._variance + np.diag(step**2)
        noise = (NOISE * seconds) ** 2
        along = variance @ size
        gain = along / (size @ along + noise)
        keep = np.eye(5) - np.outer(gain, size)
        self._variance = keep @ variance @ keep.T + noise * np.outer(gain, gain)
        self.known = np.maximum(0.0, self.known + gain * (seconds - expected))


class StepBudget:
    """The rule. stretch: see `EngineConfig.max_step_stretch`. most_tokens: of a step, decoding rows included."""

    def __init__(self, stretch: float, most_tokens: int, block_size: int):
        self.stretch = stretch
        self.most_tokens = most_tokens
        self.block_size = block_size

    def prefill_tokens(
        self,
        costs: StepCosts,
        decoding: int,
        waiting: float,
        interrupted: float = 0.0,
        position: float = 0.0,
        helped: bool = False,
    ) -> int:
        """Prompt tokens that a step with `decoding` rows may take: LEAST_CHUNK or more, but never more than the static
        budget leaves. waiting: requests whose prompts are to be computed, `interrupted` of which are streams that have
        produced tokens before; position: where the first of them goes on; helped: whether others rest for their sake.
        """
        most = self.most_tokens - decoding
        if not self.stretch or not decoding:
            return most
        decode_s, chunk = costs.decode_s(decoding), costs.chunk_s(position, helped)
        if decode_s is None or chunk is None:
            return most
        fixed_s, token_s = chunk
        crowd = min(MOST_GROWN, CROWD * (waiting - 1) / decoding)
        stretch = self.stretch * max(1.0, crowd, INTERRUPTED * interrupted / decoding)
        if helped and costs.help < 1.0:
            stretch *= SHARED
            stretch /= costs.help  # by the clock of a step without help
        spare_s = max((stretch - 1.0) * decode_s - fixed_s, WORTH_ITS_COST * fixed_s)
        if most * token_s <= spare_s:
            return most
        tokens = max(LEAST_CHUNK, int(spare_s / token_s))
        if tokens >= 4 * self.block_size:
            tokens -= tokens % self.block_size  # whole blocks, where that costs little: others can hit them at once
        return min(tokens, most)
