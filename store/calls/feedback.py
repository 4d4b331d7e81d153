"""Feedback: what people item of answers, where it belongs, and whether a judge has heard it.

Promises: what was item is only ever added, once per id; it is placed at its trajectory as soon as that is stored, in
the transaction that stores the later of the two, also where two proxies ship them at once; what one key says of another
key's trajectory is never placed.

A response is known by the id that the client saw: `resp_...` and `msg_...` follow from the call's id, any other is the
engine's own and was recorded with the call. Where an engine gave an id twice, the newest call of the speaker is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import sqlalchemy as sa

from ratchet.store.access.ownership import may_share_trajectory
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import CallEnded, CallRecord, Feedback
from ratchet.store.records.base import row_to
from ratchet.store.states import GroupState, TrajectoryState

TRAJECTORY, CALL, RESPONSE = "trajectory", "call", "response"
_WORDED = ("resp_", "msg_")  # the beginnings of ids that this proxy makes of a call's
_CALL = "call_"
_SAME_ID = 100  # calls with one engine's id that are looked at
_LOCK = 0x52414D46  # advisory lock: shared by those who ship calls, held alone by who ships feedback

Place = tuple[str, str | None]  # trajectory, call

UNAPPLIED = (
    schema.feedback.c.applied_at.is_(None),
    schema.feedback.c.value.is_not(None),
)  # as the index of these says it


class FeedbackVerbs:
    """Operations on feedback."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def add(self, item: Sequence[Feedback]) -> None:
        """Add what is not there yet."""
        with write(self._engine) as connection:
            lock_feedback_order(connection, feedback=True)
            add(connection, item)

    def target_of(self, item: Feedback) -> Place | None:
        """Return where it belongs; None if that is not stored, or is another key's."""
        with read(self._engine) as connection:
            return _place(connection, item)

    def get(self, name: str) -> Feedback:
        """Return one. Raises RecordNotFound."""
        found = self._select(schema.feedback.c.id == name, 1)
        if not found:
            raise RecordNotFound(f"no feedback {name}")
        return found[0]

    def page(self, limit: int = 100, before: str | None = None, trajectory: str | None = None) -> list[Feedback]:
        """Return at most `limit`, newest first, older than the one with the id `before`. Raises RecordNotFound."""
        table = schema.feedback
        where = [table.c.trajectory_id == trajectory] if trajectory else []
        if before:
            last = self.get(before)
            at = sa.tuple_(sa.literal(last.given_at), sa.literal(last.id))
            where.append(sa.tuple_(table.c.given_at, table.c.id) < at)
        return self._select(sa.and_(sa.true(), *where), min(limit, 1000))

    def first_value_at(self, trajectory_ids: Sequence[str]) -> dict[str, float]:
        """Return when somebody first gave a value, for each of these trajectories that has one."""
        table = schema.feedback
        found: dict[str, float] = {}
        for start in range(0, len(trajectory_ids), MAX_IN_VALUES):
            chosen = table.c.trajectory_id.in_(trajectory_ids[start : start + MAX_IN_VALUES])
            query = sa.select(table.c.trajectory_id, sa.func.min(table.c.given_at))
            query = query.where(chosen, table.c.value.is_not(None)).group_by(table.c.trajectory_id)
            with read(self._engine) as connection:
                found |= {row[0]: row[1] for row in connection.execute(query)}
        return found

    def mark_applied(self, names: Sequence[str], now: float) -> None:
        """Note that a verdict took these into account."""
        table = schema.feedback
        with write(self._engine) as connection:
            for start in range(0, len(names), MAX_IN_VALUES):
                chosen = table.c.id.in_(names[start : start + MAX_IN_VALUES])
                connection.execute(sa.update(table).where(chosen, table.c.applied_at.is_(None)).values(applied_at=now))

    def applied_too_late(self, alias: str, limit: int = 100) -> list[str]:
        """Return an alias's trajectories that were judged or dropped before somebody gave a value for them."""
        table, trajectories, groups = schema.feedback, schema.trajectories, schema.groups
        state = unindexed(trajectories.c.state)
        settled = sa.or_(
            state.in_([TrajectoryState.TRAINED, TrajectoryState.DROPPED]),
            sa.and_(state == TrajectoryState.GROUPED, groups.c.state != GroupState.READY),
        )
        query = (
            sa.select(trajectories.c.id)
            .distinct()
            .join(table, table.c.trajectory_id == trajectories.c.id)
            .outerjoin(groups, groups.c.id == trajectories.c.group_id)
            .where(*UNAPPLIED, unindexed(trajectories.c.alias) == alias, settled)
            .order_by(trajectories.c.id)
            .limit(limit)
        )
        with read(self._engine) as connection:
            return list(connection.scalars(query))

    def _select(self, where: sa.ColumnElement[bool], limit: int) -> list[Feedback]:
        table = schema.feedback
        query = sa.select(table).where(where).order_by(table.c.given_at.desc(), table.c.id.desc()).limit(limit)
        with read(self._engine) as connection:
            return [row_to(Feedback, row) for row in connection.execute(query)]


def unindexed(column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return a text column by which no index is walked: few are unheard, and very many have one state or alias."""
    return column.concat("")


def lock_feedback_order(connection: sa.Connection, *, feedback: bool) -> None:
    """Have no call and no feedback on it be stored at once, neither seeing the other. SQLite has one writer anyway.

    The first lock of its transaction; `feedback` says whether there is any in it.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock{'' if feedback else '_shared'}({_LOCK})")


def add(connection: sa.Connection, item: Iterable[Feedback]) -> None:
    """Add feedback inside the caller's transaction, at its place where that is known."""
    rows = []
    for one in item:
        trajectory, call = _place(connection, one) or (None, None)
        rows.append(msgspec.structs.asdict(one) | {"trajectory_id": trajectory, "call_id": call})
    insert_or_ignore(connection, schema.feedback, rows)


def attach_pending_feedback(connection: sa.Connection, records: Sequence[CallRecord]) -> None:
    """Put feedback that came before these calls where it belongs, inside the caller's transaction."""
    table = schema.feedback
    waits = table.c.trajectory_id.is_(None)
    if connection.scalar(sa.select(table.c.id).where(waits).limit(1)) is None:
        return
    names = sorted({name for record in records for name in _names(record)})
    for start in range(0, len(names), MAX_IN_VALUES):
        chosen = sa.select(table).where(waits, table.c.target.in_(names[start : start + MAX_IN_VALUES]))
        for row in connection.execute(chosen).all():
            place = _place(connection, row_to(Feedback, row))
            if place is not None:
                values = {"trajectory_id": place[0], "call_id": place[1]}
                connection.execute(sa.update(table).where(table.c.id == row.id).values(values))


def delete_pending_feedback_of(connection: sa.Connection, trajectory_ids: Sequence[str]) -> int:
    """Delete what names these trajectories or their calls and was never placed; return how many.

    Another key item it. What was placed goes with its trajectory.
    """
    calls = schema.calls
    own = sa.select(calls.c.id, calls.c.response_id).where(calls.c.trajectory_id.in_(trajectory_ids))
    names = {name for row in connection.execute(own) for name in _names_of(row.id, row.response_id)}
    return _delete_waiting(connection, sorted(names | set(trajectory_ids)))


def delete_pending_feedback(connection: sa.Connection, chosen: TrajectoryFilter) -> int:
    """Delete what was never placed, where a filter says no more than whose and how old; return how many."""
    table = schema.feedback
    item = [table.c.given_at < moment for moment in (chosen.until, chosen.inactive_since) if moment is not None]
    item += [table.c.key_id == chosen.key] if chosen.key is not None else []
    if not item or not replace(chosen, key=None, until=None, inactive_since=None, trained=None).is_unrestricted:
        return 0
    return int(connection.execute(sa.delete(table).where(table.c.trajectory_id.is_(None), *item)).rowcount)


def _delete_waiting(connection: sa.Connection, targets: Sequence[str]) -> int:
    table, count = schema.feedback, 0
    for start in range(0, len(targets), MAX_IN_VALUES):
        meant = table.c.target.in_(targets[start : start + MAX_IN_VALUES])
        count += connection.execute(sa.delete(table).where(table.c.trajectory_id.is_(None), meant)).rowcount
    return count


def feedback_of(connection: sa.Connection, trajectory_id: str) -> tuple[Feedback, ...]:
    """Return what was item of a trajectory, oldest first."""
    table = schema.feedback
    chosen = sa.select(table).where(table.c.trajectory_id == trajectory_id).order_by(table.c.given_at, table.c.id)
    return tuple(row_to(Feedback, row) for row in connection.execute(chosen))


def _names(record: CallRecord) -> list[str]:
    """Return what feedback may call a call."""
    start, response_id = (record.start, record.response_id) if isinstance(record, CallEnded) else (record, None)
    return [start.trajectory_id, *_names_of(start.call_id, response_id)]


def _names_of(call_id: str, response_id: str | None) -> list[str]:
    worded = [prefix + call_id.removeprefix(_CALL) for prefix in _WORDED]
    return [call_id, *worded, *([response_id] if response_id else [])]


def _place(connection: sa.Connection, item: Feedback) -> Place | None:
    """Return the trajectory, and the call, that are meant and may be spoken of."""
    trajectories, calls = schema.trajectories, schema.calls
    if item.kind == TRAJECTORY:
        found = connection.execute(
            sa.select(trajectories.c.id, trajectories.c.key_id).where(trajectories.c.id == item.target)
        ).first()
        return (found.id, None) if found and _may_speak(item, found.key_id) else None
    query = sa.select(calls.c.id, calls.c.trajectory_id, trajectories.c.key_id).join(
        trajectories, trajectories.c.id == calls.c.trajectory_id
    )
    name = _call_of(item)
    if name is not None and (one := connection.execute(query.where(calls.c.id == name)).first()):
        return (one.trajectory_id, one.id) if _may_speak(item, one.key_id) else None
    if item.kind == CALL:
        return None
    newest = query.where(calls.c.response_id == item.target).order_by(calls.c.id.desc()).limit(_SAME_ID)
    rows = [row for row in connection.execute(newest) if _may_speak(item, row.key_id)]
    return (rows[0].trajectory_id, rows[0].id) if rows else None


def _call_of(item: Feedback) -> str | None:
    """Return the id of the call that the target's own text names."""
    if item.kind == CALL:
        return item.target
    prefix = next((prefix for prefix in _WORDED if item.target.startswith(prefix)), None)
    return _CALL + item.target.removeprefix(prefix) if prefix else None


def _may_speak(item: Feedback, key_id: str | None) -> bool:
    return item.trusted or may_share_trajectory(item.key_id, key_id)
