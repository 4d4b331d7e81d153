"""Trajectories that lack messages or tools which their calls name are found, on both databases."""

from __future__ import annotations

import msgspec

from ratchet.store.records import CallStarted
from ratchet.store.store import Store
from tests.harness import records

REPLY = {"role": "assistant", "content": "Oslo"}


def without_first_message(name: str) -> CallStarted:
    question = [{"role": "system", "content": f"Answer {name}."}, {"role": "user", "content": "Where?"}]
    start = records.call_start(f"call_{name}", name, question)
    return msgspec.structs.replace(start, nodes=start.nodes[1:])


def test_a_trajectory_whose_first_message_is_not_there_is_incomplete_until_somebody_sends_it_again(
    store: Store,
) -> None:
    torn, bare = without_first_message("torn"), records.call_start("call_bare", "bare", tools_hash="b2:none", tools=b"")
    whole = records.call_start("call_whole", "whole")
    store.calls.ship([records.ended(one, REPLY) for one in (torn, bare, whole)])
    names = ["torn", "bare", "whole", "unknown"]
    assert store.trajectories.incomplete(names) == {"torn", "bare"}
    assert store.trajectories.incomplete([]) == set()
    again = records.call_start("call_again", "again", [{"role": "system", "content": "Answer torn."}])
    store.calls.ship([records.ended(again, REPLY)])
    assert store.trajectories.incomplete(names) == {"bare"}
