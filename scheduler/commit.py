"""What a step's result means: tokens appended to their rows, requests that end, late tokens of those that left.

Pure: a result in, an outcome out. Sending it is the engine's work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.messages import FinishReason
from scheduler.batch import I64, RowBatch
from scheduler.replica import Replica, Step, publish_rows
from scheduler.request import Request

NAN_MESSAGE = "the model produced no valid logits (NaN) for this request"
GRAMMAR_MESSAGE = "the grammar of structured_outputs cannot be compiled, or became too complex"
GRAMMAR_FAILED = -2


class Outcome(NamedTuple):
    """Committed tokens, five integer arrays of one length: client connection, request handle, output index, token,
    place in the result; and the requests that ended, each with its reason and a message."""

    connections: I64
    handles: I64
    indices: I64
    tokens: I64 | NDArray[np.int32]
    places: I64
    ended: list[tuple[Request, FinishReason, str]]


def commit(replica: Replica, step: Step, tokens: NDArray[np.int32], now: float) -> Outcome:
    """Apply the result of `step`. A token counts only for the admission that caused it and only if its index is the
    request's committed length; whoever ended or moved meanwhile loses it.

    tokens: int32 [number of sampling rows]; a negative one marks a row that failed. The caller has checked the length.
    """
    rows = replica.rows
    bound = rows.binding[step.rows] == step.binding
    good = np.nonzero(bound & (tokens >= 0))[0]
    row, token, index = step.rows, tokens, step.token_index
    if len(good) < len(tokens):
        row, token, index = row[good], token[good], index[good]
    assert (rows.committed[row] == index).all(), "a bound row's results arrive in order"
    rows.token_ids[row, index] = token
    length = index + 1
    rows.committed[row] = length
    replica.stats.generated_tokens += len(row)
    replica.stats.tokens(rows, row, index, now)
    stopped = _stopped(rows, row, token, length)
    over = stopped | (length >= rows.limit[row])
    emitted = [rows.connection[row], rows.handle[row], index - rows.prompt_len[row], token, good]
    publish_rows(replica)
    ended: list[tuple[Request, FinishReason, str]] = []
    for place in np.nonzero(over)[0].tolist():
        ended.append((_end(replica, int(row[place])), "stop" if stopped[place] else "length", ""))
    late: list[tuple[int, int, int, int, int]] = []
    if len(good) < len(tokens):
        for place in np.nonzero(bound & (tokens < 0))[0].tolist():
            request = _end(replica, int(step.rows[place]))
            replica.manager.unpublish(request)
            ended.append((request, "error", _failure(int(tokens[place]))))
        for place in np.nonzero(~bound)[0].tolist():
            _commit_late(replica, step, place, int(tokens[place]), now, late, ended)
    if late:
        columns = np.array(late, dtype=np.int64).T
        emitted = [np.concatenate(pair) for pair in zip(emitted, columns, strict=True)]
    return Outcome(emitted[0], emitted[1], emitted[2], emitted[3], emitted[4], ended)


def _stopped(rows: RowBatch, row: I64, token: NDArray[np.int32], length: I64) -> NDArray[np.bool_]:
    """bool [n]: whether the row's new token is one of its stop ids and its length one at which they count."""
    stopped = np.zeros(len(row), dtype=np.bool_)
    for stop_ids in rows.stop_ids:
        stopped |= stop_ids[row] == token
    if stopped.any():
        stopped &= length >= rows.min_len[row]
    return stopped


def _end(replica: Replica, row: int) -> Request:
    """Release a row whose request is over: what its other plans still sample reaches nobody."""
    request = replica.release(row)
    replica.loose.pop(request.binding, None)
    return request


def _failure(token: int) -> str:
    """Why a row failed, by the negative token of its result."""
    return GRAMMAR_MESSAGE if token == GRAMMAR_FAILED else NAN_MESSAGE


def _commit_late(
    replica: Replica,
    step: Step,
    place: int,
    token: int,
    now: float,
    late: list[tuple[int, int, int, int, int]],
    ended: list[tuple[Request, FinishReason, str]],
) -> None:
    """A token of an admission that has no row any more: it counts if its request drains or waits to go on."""
    binding, index = int(step.binding[place]), int(step.token_index[place])
    request = replica.loose.get(binding)
    if request is None:
        return  # ended or aborted meanwhile
    request.in_flight -= 1
    if request.in_flight == 0:
        del replica.loose[binding]
    if index != len(request.tokens):
        return
    reason: FinishReason | None
    message = ""
    if token < 0:
        replica.manager.unpublish(request)
        reason, message = "error", _failure(token)
    else:
        request.append_late(token)
        replica.stats.generated_tokens += 1
        replica.stats.late_token(request, now)
        late.append((request.connection, request.handle, index - request.prompt_len, token, place))
        reason = request.ends_with(token, len(request.tokens))
        if reason is None and request.in_flight == 0:
            reason = request.void_reason
    if reason is not None:
        replica.loose.pop(binding, None)
        ended.append((request, reason, message))
