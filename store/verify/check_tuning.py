"""Checks prompts, rollouts, resamples, and versions that share an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.column_types import NOT_DECODED
from ratchet.store.policies.prompts import prompt_id
from ratchet.store.states import TrajectoryState
from ratchet.store.verify.violation import Page, Violation


def check_prompts(_: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that prompts match their id, so that versions serve an unchanged text."""
    for row in page:
        if prompt_id(row.mode, row.text, _families(row.families)) != row.id:
            remedy = "restore it from a backup; versions serve its current text"
            yield Violation(row=f"prompt {row.id}", problem="its id does not match its text", remedy=remedy)


def _families(stored: Any) -> Mapping[str, str]:
    """Return a prompt's texts by family, which PostgreSQL's driver has decoded; none if they are damaged."""
    try:
        return msgspec.json.decode(stored, type=dict[str, str]) if isinstance(stored, str) else stored
    except NOT_DECODED:
        return {}


def check_rollouts(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that rollouts of evaluations were not trained."""
    trajectories = schema.trajectories
    names = [row.id for row in page if row.purpose == "eval"]
    trained = sa.select(trajectories.c.id).where(
        trajectories.c.id.in_(names), trajectories.c.state == TrajectoryState.TRAINED
    )
    for name in connection.scalars(trained):
        problem = "it is of an evaluation, and its trajectory was trained"
        yield Violation(row=f"rollout {name}", problem=problem, remedy="roll back to the version before that round")


def check_resamples(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that trained resamples share the group of their original."""
    trajectories, originals = schema.trajectories, schema.trajectories.alias("original")
    query = (
        sa.select(schema.resamples.c.id)
        .join(trajectories, trajectories.c.id == schema.resamples.c.id)
        .join(originals, originals.c.id == schema.resamples.c.original_id)
        .where(schema.resamples.c.id.in_([row.id for row in page]), trajectories.c.state == TrajectoryState.TRAINED)
        .where(sa.func.coalesce(originals.c.group_id, "") != trajectories.c.group_id)
    )
    for name in connection.scalars(query):
        problem = "it was trained, and not in the group of its original"
        yield Violation(row=f"resample {name}", problem=problem, remedy="roll back to the version before that round")


def check_policies(connection: sa.Connection) -> Iterator[Violation]:
    """Check that versions with the same served name share an adapter and differ only by their prompt."""
    table = schema.policies
    adapters: dict[tuple[str, str], str | None] = {}
    columns = (table.c.alias, table.c.version, table.c.served_name, table.c.adapter)
    for row in connection.execute(sa.select(*columns).order_by(table.c.alias, table.c.version)):
        first = adapters.setdefault((row.alias, row.served_name), row.adapter)
        if first != row.adapter:
            problem = f"vLLM knows it as {row.served_name}, and an earlier version of that name has adapter {first}"
            remedy = "restore the table policies from a backup; what it serves is the earlier version's adapter"
            yield Violation(row=f"policy {row.alias}@{row.version}", problem=problem, remedy=remedy)
