"""The filter of trajectories for lists, exports and deletions, and the pages of a list.

A page follows an index, newest first, and starts at a key instead of an offset. A filter by tag reads the tag's index,
unless few trajectories match the rest of the filter. A search by id prefix reads the ids, which sort by time if Ratchet
created them. Builds statements; no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.shipping import short_task
from ratchet.store.db import schema
from ratchet.store.db.verbs import matches
from ratchet.store.states import TrajectoryState

_LAST = "\U0010ffff"
FEW = 1000  # with at most this many matches, the trajectories are read instead of the tag's index


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """Conditions that all must hold. Times are Unix seconds."""

    state: str | None = None
    alias: str | None = None
    version: int | None = None
    task: str | None = None
    key: str | None = None  # the id of an API key
    tag: str | None = None
    since: float | None = None  # opened then or later
    until: float | None = None  # opened before then
    search: str | None = None  # prefix of the id
    id: str | None = None  # the whole id; includes its successors
    inactive_since: float | None = None  # no call since then, also not of a successor that needs its tokens
    trained: bool | None = None  # whether a round trained it
    round: str | None = None  # the id of the round that trained it
    role: str | None = None  # of one of its calls
    scored: bool | None = None  # whether a judge scored it
    min_score: float | None = None  # of its latest score
    max_score: float | None = None
    tool: str | None = None  # one of its tool calls names it
    outcome: str | None = None  # ToolOutcome or ToolResult of such a tool call

    @property
    def is_unrestricted(self) -> bool:
        """Whether every trajectory matches."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def where(self) -> sa.ColumnElement[bool]:
        """Return the condition on the table of trajectories, including the tag."""
        trajectories, tags = schema.trajectories, schema.trajectory_tags
        same = {"task": short_task(self.task), "key_id": self.key, "round_id": self.round}
        conditions = [matches(trajectories, state=self.state, alias=self.alias, version=self.version, **same)]
        if self.since is not None:
            conditions.append(trajectories.c.opened_at >= self.since)
        if self.until is not None:
            conditions.append(trajectories.c.opened_at < self.until)
        if self.trained is not None:
            conditions.append((trajectories.c.state == TrajectoryState.TRAINED) == sa.literal(self.trained))
        if self.inactive_since is not None:
            conditions += [trajectories.c.last_active_at < self.inactive_since, ~self._is_needed(self.inactive_since)]
        if self.search:
            conditions += [trajectories.c.id >= self.search, trajectories.c.id < self.search + _LAST]
        if self.id is not None:
            conditions.append(sa.or_(trajectories.c.id == self.id, successors_of(self.id)))
        if self.tag is not None:
            tagged = sa.select(tags.c.trajectory_id).where(tags.c.tag == self.tag[:128])
            conditions.append(trajectories.c.id.in_(tagged))
        return sa.and_(sa.true(), *conditions, *self._of_calls(), *self._of_score())

    def _of_calls(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on calls and tool calls, each an index lookup per trajectory."""
        trajectories, calls, tools = schema.trajectories, schema.calls, schema.tool_calls
        mine = calls.c.trajectory_id == trajectories.c.id
        conditions: list[sa.ColumnElement[bool]] = []
        if self.role is not None:
            conditions.append(sa.exists().where(mine, calls.c.role == self.role[:128]))
        if self.tool is not None or self.outcome is not None:
            called = sa.exists().where(mine, tools.c.call_id == calls.c.id, matches(tools, tool=self.tool))
            if self.outcome is not None:
                called = called.where(sa.or_(tools.c.outcome == self.outcome, tools.c.result == self.outcome))
            conditions.append(called)
        return conditions

    def _of_score(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the latest score."""
        trajectories, verdicts = schema.trajectories, schema.verdicts
        given = sa.and_(verdicts.c.trajectory_id == trajectories.c.id, verdicts.c.score.is_not(None))
        latest = sa.select(verdicts.c.score).where(given).order_by(verdicts.c.id.desc()).limit(1).scalar_subquery()
        conditions: list[sa.ColumnElement[bool]] = []
        if self.scored is not None:
            conditions.append(latest.is_not(None) if self.scored else latest.is_(None))
        if self.min_score is not None:
            conditions.append(latest >= self.min_score)
        if self.max_score is not None:
            conditions.append(latest <= self.max_score)
        return conditions

    def _is_needed(self, inactive_since: float) -> sa.ColumnElement[bool]:
        """Return the condition that a successor outside the filter needs the trajectory's tokens."""
        trajectories, later = schema.trajectories, schema.trajectories.alias("later")
        retained = later.c.last_active_at >= inactive_since
        if self.trained is not None:
            retained = sa.or_(retained, (later.c.state == TrajectoryState.TRAINED) != sa.literal(self.trained))
        return sa.and_(trajectories.c.successors > 0, sa.exists().where(_succeeds(later, trajectories), retained))


def _succeeds(later: Any, run: Any) -> sa.ColumnElement[bool]:
    return sa.and_(later.c.id > run.c.id + "~", later.c.id < run.c.id + "~:")


def ids_with_successors(chosen: sa.ColumnElement[bool]) -> sa.CompoundSelect[Any]:
    """Return the ids of matching trajectories, of their successors, and of their resamples."""
    trajectories, later = schema.trajectories, schema.trajectories.alias("later")
    own = sa.select(trajectories.c.id).where(chosen)
    after = (
        sa.select(later.c.id)
        .join(trajectories, _succeeds(later, trajectories))
        .where(chosen, trajectories.c.successors > 0)
    )
    planned = sa.select(schema.resamples.c.id).join(trajectories, trajectories.c.id == schema.resamples.c.original_id)
    resample = planned.join(later, later.c.id == schema.resamples.c.id).where(chosen)  # those with a trajectory
    return own.union(after, resample)


def successors_of(name: str) -> sa.ColumnElement[bool]:
    """Return the condition that a trajectory is a successor of this one, by its id."""
    trajectories = schema.trajectories
    # A number follows the ~, and a colon sorts after the 9.
    return sa.and_(trajectories.c.id > f"{name}~", trajectories.c.id < f"{name}~:")


def count_without_tag(chosen: TrajectoryFilter) -> sa.Select[int] | None:
    """Return the count of trajectories that match the filter without its tag, at most `FEW` + 1.

    None if there is no tag, or if the index of the tag serves the whole filter.
    """
    rest = replace(chosen, tag=None, since=None, until=None)
    if chosen.tag is None or chosen.search or rest.is_unrestricted:
        return None
    some = sa.select(sa.literal(1)).select_from(schema.trajectories).where(replace(chosen, tag=None).where())
    return sa.select(sa.func.count()).select_from(some.limit(FEW + 1).subquery())


def select_page_ids(
    chosen: TrajectoryFilter, limit: int, before: str | None, opened_at: float, *, by_tag: bool = True
) -> sa.Select[str]:
    """Return the ids of a page in order. `before`, opened at `opened_at`, is the last trajectory of the previous page.

    `by_tag`: read the index of the tag, if there is one, instead of the trajectories.
    """
    trajectories, tags = schema.trajectories, schema.trajectory_tags
    if chosen.search:
        query = sa.select(trajectories.c.id).where(chosen.where()).order_by(trajectories.c.id.desc())
        return query.where(trajectories.c.id < before).limit(limit) if before else query.limit(limit)
    if chosen.tag is not None and by_tag:
        query, time, name = _tagged(chosen), tags.c.opened_at, tags.c.trajectory_id
    else:
        query = sa.select(trajectories.c.id).where(replace(chosen, tag=None).where())
        time, name = trajectories.c.opened_at, trajectories.c.id
        if chosen.tag is not None:
            mine = sa.and_(tags.c.opened_at == trajectories.c.opened_at, tags.c.trajectory_id == trajectories.c.id)
            query = query.where(sa.exists().where(tags.c.tag == chosen.tag[:128], mine))
    if before:
        # Redundant, but an index on the time alone can start at the first condition.
        last = sa.tuple_(sa.literal(opened_at), sa.literal(before))
        query = query.where(time <= opened_at, sa.tuple_(time, name) < last)
    return query.order_by(time.desc(), name.desc()).limit(limit)


def _tagged(chosen: TrajectoryFilter) -> sa.Select[str]:
    """Return the matching ids of a tag, from its index, which has their times."""
    trajectories, tags = schema.trajectories, schema.trajectory_tags
    query = sa.select(tags.c.trajectory_id).where(tags.c.tag == (chosen.tag or "")[:128])
    if chosen.since is not None:
        query = query.where(tags.c.opened_at >= chosen.since)
    if chosen.until is not None:
        query = query.where(tags.c.opened_at < chosen.until)
    rest = replace(chosen, tag=None, since=None, until=None)
    if rest.is_unrestricted:
        return query
    return query.join(trajectories, trajectories.c.id == tags.c.trajectory_id).where(rest.where())
