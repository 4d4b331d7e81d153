"""Which trajectories are meant: one filter for lists, exports and deletions, and the pages of a list.

A page follows its index: newest first, from a key on, never by counting rows. The filter by tag walks the tags, unless
few trajectories fit the rest of the filter: then it walks those. The search by the beginning of an id walks the ids
(which sort by time where Ratchet made them). Statements only; no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.shipping import short_task
from ratchet.store.db import schema
from ratchet.store.states import TrajectoryState

_LAST = "\U0010ffff"
FEW = 1000  # trajectories that are walked sooner than a tag's


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """The trajectories that fit everything that is said here. Times are Unix seconds."""

    state: str | None = None
    alias: str | None = None
    version: int | None = None
    task: str | None = None
    key: str | None = None  # the id of an API key
    tag: str | None = None
    since: float | None = None  # opened then or later
    until: float | None = None  # opened before then
    search: str | None = None  # the beginning of the id
    id: str | None = None  # the whole id, with the trajectories that succeeded it
    inactive_since: float | None = None  # no call since then, nor of a successor that needs its tokens
    trained: bool | None = None  # whether a round trained it

    @property
    def is_unrestricted(self) -> bool:
        """Whether every trajectory fits."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def where(self) -> sa.ColumnElement[bool]:
        """Return the condition on the table of trajectories; a tag is a condition as well here."""
        trajectories, tags = schema.trajectories, schema.trajectory_tags
        pairs: list[tuple[Any, Any]] = [
            (trajectories.c.state, self.state),
            (trajectories.c.alias, self.alias),
            (trajectories.c.version, self.version),
            (trajectories.c.task, short_task(self.task)),
            (trajectories.c.key_id, self.key),
        ]
        said = [column == value for column, value in pairs if value is not None]
        if self.since is not None:
            said.append(trajectories.c.opened_at >= self.since)
        if self.until is not None:
            said.append(trajectories.c.opened_at < self.until)
        if self.trained is not None:
            said.append((trajectories.c.state == TrajectoryState.TRAINED) == sa.literal(self.trained))
        if self.inactive_since is not None:
            said += [trajectories.c.last_active_at < self.inactive_since, ~self._is_needed(self.inactive_since)]
        if self.search:
            said += [trajectories.c.id >= self.search, trajectories.c.id < self.search + _LAST]
        if self.id is not None:
            said.append(sa.or_(trajectories.c.id == self.id, successors_of(self.id)))
        if self.tag is not None:
            said.append(trajectories.c.id.in_(sa.select(tags.c.trajectory_id).where(tags.c.tag == self.tag[:128])))
        return sa.and_(sa.true(), *said)

    def _is_needed(self, inactive_since: float) -> sa.ColumnElement[bool]:
        """Return whether a trajectory has a successor that is not meant: its contexts go on from this one's."""
        trajectories, later = schema.trajectories, schema.trajectories.alias("later")
        stays = later.c.last_active_at >= inactive_since
        if self.trained is not None:
            stays = sa.or_(stays, (later.c.state == TrajectoryState.TRAINED) != sa.literal(self.trained))
        return sa.and_(trajectories.c.successors > 0, sa.exists().where(_succeeds(later, trajectories), stays))


def _succeeds(later: Any, run: Any) -> sa.ColumnElement[bool]:
    return sa.and_(later.c.id > run.c.id + "~", later.c.id < run.c.id + "~:")


def ids_with_successors(chosen: sa.ColumnElement[bool]) -> sa.CompoundSelect[Any]:
    """Return the ids of the trajectories that fit, of those that took their later calls, and of their resamples."""
    trajectories, later = schema.trajectories, schema.trajectories.alias("later")
    own = sa.select(trajectories.c.id).where(chosen)
    after = (
        sa.select(later.c.id)
        .join(trajectories, _succeeds(later, trajectories))
        .where(chosen, trajectories.c.successors > 0)
    )
    asked = sa.select(schema.resamples.c.id).join(trajectories, trajectories.c.id == schema.resamples.c.original_id)
    resample = asked.join(later, later.c.id == schema.resamples.c.id).where(chosen)  # those that there are
    return own.union(after, resample)


def successors_of(name: str) -> sa.ColumnElement[bool]:
    """Return whether a trajectory's id says that it took the later calls of the one named."""
    trajectories = schema.trajectories
    return sa.and_(
        trajectories.c.id > f"{name}~", trajectories.c.id < f"{name}~:"
    )  # a number follows the ~; a colon follows the 9


def count_without_tag(chosen: TrajectoryFilter) -> sa.Select[int] | None:
    """Return the count, up to one more than `FEW`, of those that fit the rest of a filter by tag.

    None if the tag's own order serves the rest as well, or there is no tag.
    """
    rest = replace(chosen, tag=None, since=None, until=None)
    if chosen.tag is None or chosen.search or rest.is_unrestricted:
        return None
    some = sa.select(sa.literal(1)).select_from(schema.trajectories).where(replace(chosen, tag=None).where())
    return sa.select(sa.func.count()).select_from(some.limit(FEW + 1).subquery())


def select_page_ids(
    chosen: TrajectoryFilter, limit: int, before: str | None, opened_at: float, *, by_tag: bool = True
) -> sa.Select[str]:
    """Return the ids of a page in order. `opened_at` is that of `before`, the last trajectory of the page before.

    `by_tag` says to walk those of the tag, if there is one; else those that fit the rest are walked.
    """
    trajectories, tags = schema.trajectories, schema.trajectory_tags
    if chosen.search:
        query = sa.select(trajectories.c.id).where(chosen.where()).order_by(trajectories.c.id.desc())
        return query.where(trajectories.c.id < before).limit(limit) if before else query.limit(limit)
    if chosen.tag is not None and by_tag:
        query, time, name = _tagged(chosen), tags.c.opened_at, tags.c.trajectory_id
    else:
        query, time, name = (
            sa.select(trajectories.c.id).where(replace(chosen, tag=None).where()),
            trajectories.c.opened_at,
            trajectories.c.id,
        )
        if chosen.tag is not None:
            mine = sa.and_(tags.c.opened_at == trajectories.c.opened_at, tags.c.trajectory_id == trajectories.c.id)
            query = query.where(sa.exists().where(tags.c.tag == chosen.tag[:128], mine))
    if before:
        # Said twice: the first is what an index on the time alone can begin at.
        query = query.where(
            time <= opened_at, sa.tuple_(time, name) < sa.tuple_(sa.literal(opened_at), sa.literal(before))
        )
    return query.order_by(time.desc(), name.desc()).limit(limit)


def _tagged(chosen: TrajectoryFilter) -> sa.Select[str]:
    """Return the ids at a tag that fit; it knows their times itself."""
    trajectories, tags = schema.trajectories, schema.trajectory_tags
    query = sa.select(tags.c.trajectory_id).where(tags.c.tag == (chosen.tag or "")[:128])
    if chosen.since is not None:
        query = query.where(tags.c.opened_at >= chosen.since)
    if chosen.until is not None:
        query = query.where(tags.c.opened_at < chosen.until)
    rest = replace(chosen, tag=None, since=None, until=None)
    return (
        query
        if rest.is_unrestricted
        else query.join(trajectories, trajectories.c.id == tags.c.trajectory_id).where(rest.where())
    )
