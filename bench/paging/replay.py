"""A load run through an allocator in virtual time: what is held, what is wasted, who has to wait. No model, no clock.

In a step each running request computes one token more. Requests are admitted in the order of their arrival, each when
the head of the queue has room for the tokens it knows; the latest admitted is preempted when another cannot grow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from bench.paging.allocators import Allocator, Contiguous
from bench.paging.load import Load


class DoesNotFit(ValueError):
    """A request needs more slots than there are."""


@dataclass(frozen=True)
class Replay:
    """Slots are means over all steps, shares are of the whole memory or of the allocated slots, as named."""

    num_slots: int
    steps: int
    effective_slots: float
    """Slots that hold keys and values of a token."""
    allocated_slots: float
    free_slots: float
    internal_waste: float
    """Allocated slots that hold nothing, as a share of the allocated ones."""
    waste_per_request: float
    """The same in slots, for each running request."""
    external_waste: float
    """Free slots in the steps whose head of the queue needs no more than are free and yet gets none, as a share of the
    memory over all steps."""
    running: float
    """Requests that run at once, mean of the steps in which others wait; 0: nobody ever waited."""
    most_running: int
    preemptions: int
    moves: int
    """Regions moved so that running requests could grow."""
    moved_slots: int
    """Tokens whose keys and values these moves copy."""
    moves_to_admit: int
    """Regions that would have had to move too, had no request waited for a hole while enough was free; the first time
    each of them waits counts."""

    def json(self) -> dict[str, float]:
        return asdict(self)


def replay(load: Load, allocator: Allocator) -> Replay:
    """Run the load to its end. Raises DoesNotFit."""
    if allocator.need(load.longest) > allocator.num_slots:
        raise DoesNotFit(f"the longest request holds {load.longest} tokens, the memory {allocator.num_slots} slots")
    items = load.items
    waiting: deque[int] = deque()
    lengths: dict[int, int] = {}  # of the running, in the order of admission
    known = [item.prompt_len for item in items]
    arrived = steps = busy = effective = allocated = request_steps = external = waited = running = 0
    most = preemptions = moves_to_admit = 0
    counted: set[int] = set()
    while arrived < len(items) or waiting or lengths:
        if not waiting and not lengths:
            steps = max(steps, items[arrived].arrival)
        while arrived < len(items) and items[arrived].arrival <= steps:
            waiting.append(arrived)
            arrived += 1
        for key in list(lengths):
            if key not in lengths:
                continue
            while not allocator.grow(key, lengths[key] + 1):
                victim = next(reversed(lengths))
                del lengths[victim]
                allocator.free(victim)
                waiting.appendleft(victim)
                preemptions += 1
                if victim == key:
                    break
            if key in lengths:
                lengths[key] += 1
        while waiting and allocator.admit(waiting[0], known[waiting[0]]):
            lengths[waiting[0]] = known[waiting[0]]
            waiting.popleft()
        effective += sum(lengths.values())
        allocated += allocator.num_slots - allocator.num_free
        request_steps += len(lengths)
        most = max(most, len(lengths))
        if waiting:
            waited += 1
            running += len(lengths)
            size = allocator.need(known[waiting[0]])
            if size <= allocator.num_free:
                external += allocator.num_free
                if isinstance(allocator, Contiguous) and waiting[0] not in counted:
                    counted.add(waiting[0])
                    found = allocator.moves_to_fit(size)
                    assert found is not None
                    moves_to_admit += found[2] - found[1]
        for key, length in list(lengths.items()):
            known[key] = length + 1
            if length == items[key].held:
                del lengths[key]
                allocator.free(key)
        steps += 1
        busy += 1
    assert allocator.num_free == allocator.num_slots, "every slot came back"
    return Replay(
        num_slots=allocator.num_slots,
        steps=busy,
        effective_slots=effective / busy,
        allocated_slots=allocated / busy,
        free_slots=allocator.num_slots - allocated / busy,
        internal_waste=1 - effective / allocated,
        waste_per_request=(allocated - effective) / request_steps,
        external_waste=external / busy / allocator.num_slots,
        running=running / waited if waited else 0.0,
        most_running=most,
        preemptions=preemptions,
        moves=allocator.moves,
        moved_slots=allocator.moved_slots,
        moves_to_admit=moves_to_admit,
    )
