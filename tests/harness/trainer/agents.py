"""Store one-call trajectories as agents produce them, with the scores that they will get, and damage them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.store import Store
from tests.harness.records import call_start, ended
from tests.harness.trainer import judge_samples


def agents_work(
    store: Store,
    task: str,
    scores: Sequence[Any],
    prompt: Sequence[int] = (5, 6, 7),
    temperature: float = 1.0,
    **changes: Any,
) -> list[str]:
    """Ship one-call trajectories of one task; return their names. `changes` apply to the record of each call's start.

    Their tokens depend on the task, so that the gradients of two tasks with opposite scores do not cancel.
    """
    names = []
    for number, score in enumerate(scores):
        name = f"{task}-{number}"
        judge_samples.by_answer[name] = score
        start = call_start(f"call_{name}", name, task=task, sampling={"temperature": temperature}, **changes)
        ids = (10 + number, 11 + sum(task.encode()) % 7, 2)
        reply = {"role": "assistant", "content": name}
        shipped = ended(start, reply, prompt=prompt, ids=ids)
        if "at" in changes:  # it must end before the judge reads the clock
            shipped = msgspec.structs.replace(shipped, ended_at=start.started_at)
        store.calls.ship([shipped])
        names.append(name)
    return names


def damage_tokens(store: Store, trajectory_id: str) -> None:
    """Cut off the token ids of a trajectory's answers."""
    of_trajectory = "call_id IN (SELECT id FROM calls WHERE trajectory_id = :name)"
    with store._engine.begin() as connection:
        statement = sa.text(f"UPDATE choices SET token_ids = :bytes WHERE {of_trajectory}")
        assert connection.execute(statement, {"bytes": b"\x09", "name": trajectory_id}).rowcount == 1
