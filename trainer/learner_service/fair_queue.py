"""FairQueue: whose operation the learner runs next. Pure: the caller measures the time.

Guarantees, with compute time in seconds and `share` per agent:

1.  Operations are short (open, load, score, save, close) or rounds. A short one goes before rounds, so a proof or a
    save never waits for another agent's round; but while a round waits, at most MAX_SHORT_IN_A_ROW short ones run
    before it. So nobody starves, whatever the others send.
2.  Among operations of one kind, the agent with the least virtual time is next; its virtual time is its compute time
    divided by its share (start-time fair queuing, Goyal et al. 1996). While two agents i and j only train and always
    have a round waiting, |W_i / share_i - W_j / share_j| <= L_i / share_i + L_j / share_j, where W is the compute time
    and L the time of an agent's slowest round. Short operations count as well: they delay the agent's own next round.
    Ties go to the one that came first.
3.  An agent that was idle cannot save up turns: when it comes back it is ahead of the others by at most
    MAX_LAG_SECONDS of their compute time. It may keep that much, because an agent is idle for moments between its
    rounds, and would else lose its turn to each slow round of another agent.

Operations of one agent and kind run in the order in which they came.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_SHORT_IN_A_ROW = 32
MAX_LAG_SECONDS = 300.0

Item = TypeVar("Item")


@dataclass(slots=True)
class _AgentQueue(Generic[Item]):
    """One agent's waiting operations, and its virtual time."""

    share: float = 1.0
    virtual_time: float = 0.0
    running: bool = False
    short: deque[tuple[int, Item]] = field(default_factory=deque)
    rounds: deque[tuple[int, Item]] = field(default_factory=deque)

    def waiting(self, is_round: bool) -> deque[tuple[int, Item]]:
        return self.rounds if is_round else self.short

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.short or self.rounds)


class FairQueue(Generic[Item]):
    """The waiting operations of all agents. Not thread-safe."""

    def __init__(self, max_short_in_a_row: int = MAX_SHORT_IN_A_ROW) -> None:
        self._agents: dict[str, _AgentQueue[Item]] = {}
        self._numbers = itertools.count()
        self._virtual_time = 0.0  # of the operation that ran last
        self._short_in_a_row = 0  # since the last round, while a round waited
        self._max_short_in_a_row = max_short_in_a_row

    def __len__(self) -> int:
        return sum(len(agent.short) + len(agent.rounds) for agent in self._agents.values())

    def waiting_of(self, agent: str) -> int:
        queue = self._agents.get(agent)
        return 0 if queue is None else len(queue.short) + len(queue.rounds)

    def set_share(self, agent: str, share: float) -> None:
        """Set an agent's share of the compute time, relative to the other agents' shares."""
        self._agent(agent).share = share

    def push(self, agent: str, item: Item, *, is_round: bool) -> None:
        queue = self._agent(agent)
        if queue.is_idle:
            queue.virtual_time = max(queue.virtual_time, self._virtual_time - MAX_LAG_SECONDS)
        queue.waiting(is_round).append((next(self._numbers), item))

    def pop(self) -> tuple[str, Item] | None:
        """Return the next operation and its agent, None if none waits; `charge` must follow."""
        has_short, has_rounds = (
            any(agent.waiting(is_round) for agent in self._agents.values()) for is_round in (False, True)
        )
        if not has_short and not has_rounds:
            return None
        is_round = has_rounds and (not has_short or self._short_in_a_row >= self._max_short_in_a_row)
        self._short_in_a_row = self._short_in_a_row + 1 if has_rounds and not is_round else 0
        name = min(
            (name for name, agent in self._agents.items() if agent.waiting(is_round)),
            key=lambda name: (self._agents[name].virtual_time, self._agents[name].waiting(is_round)[0][0]),
        )
        agent = self._agents[name]
        agent.running = True
        self._virtual_time = max(self._virtual_time, agent.virtual_time)
        return name, agent.waiting(is_round).popleft()[1]

    def charge(self, agent: str, seconds: float) -> None:
        """Count the compute time of the operation that `pop` returned."""
        queue = self._agent(agent)
        queue.running = False
        queue.virtual_time += seconds / queue.share

    def remove(self, agent: str, item: Item) -> bool:
        """Remove a waiting operation; return whether it was waiting."""
        queue = self._agents.get(agent)
        for waiting in (queue.short, queue.rounds) if queue else ():
            for entry in waiting:
                if entry[1] is item:
                    waiting.remove(entry)
                    return True
        return False

    def forget(self, agent: str) -> None:
        """Forget an agent that was closed, unless that would be worth a turn: then only its share."""
        queue = self._agents.get(agent)
        if queue is None:
            return
        if queue.is_idle and queue.virtual_time <= self._virtual_time - MAX_LAG_SECONDS:
            del self._agents[agent]
        else:
            queue.share = 1.0

    def _agent(self, name: str) -> _AgentQueue[Item]:
        return self._agents.setdefault(name, _AgentQueue())
