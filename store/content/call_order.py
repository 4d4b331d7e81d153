"""The order of a trajectory's calls. Pure.

Start times alone do not give it: while a clock is set back, a call may have an earlier time than the call that it
continues.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol, TypeVar


class ContinuingCall(Protocol):
    """What the order depends on."""

    @property
    def id(self) -> str: ...

    @property
    def parent_call(self) -> str | None: ...


_OneCall = TypeVar("_OneCall", bound=ContinuingCall)


def parents_first(calls: Sequence[_OneCall]) -> Sequence[_OneCall]:
    """Return calls, given in the order of their start, so that each follows its parent if that is among them.

    Otherwise the order stays. Calls that continue each other in a circle, which are damaged, come last.
    """
    places = {call.id: place for place, call in enumerate(calls)}
    parents = [places.get(call.parent_call or "", -1) for call in calls]
    if all(parent < place for place, parent in enumerate(parents)):
        return calls
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
    order, ready = [], children.pop(-1, [])  # in order, as a heap is
    while ready:
        order.append(heapq.heappop(ready))
        for place in children.pop(order[-1], ()):
            heapq.heappush(ready, place)
    order += sorted(place for circle in children.values() for place in circle)
    return [calls[place] for place in order]
