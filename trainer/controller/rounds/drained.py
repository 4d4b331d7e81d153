"""Settling: whether the trainer has done what it can with the traffic so far.

Reads only. Traffic of others may keep it from ever being so: whoever waits bounds how long.
"""

from __future__ import annotations

import time

from ratchet.store.states import PolicyState, RoundState
from ratchet.store.store import Store


def is_drained(store: Store, alias: str, *, num_generations: int, groups_per_round: int) -> bool:
    """Return whether nothing is open, and nothing that waits is enough for a group, a verdict, a round or a swap."""
    waiting = store.trajectories.counts()
    return (
        waiting["open"] == 0
        and waiting["sealed"] < num_generations
        and not store.groups.awaiting_verdict(alias, time.time())
        and len(store.groups.awaiting_round(alias)) < groups_per_round
        and not any(policy.state is PolicyState.CANDIDATE for policy in store.policies.all(alias))
        and not any(held.state is RoundState.STARTED for held in store.rounds.page(alias, limit=1))
    )
