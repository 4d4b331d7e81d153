"""Feedback on answers and trajectories: stored, attached to its trajectory, and marked when a judge has applied it.

Guarantees: feedback is only added, once per id. It is attached to its trajectory by the transaction that stores the
later of the two, even if two proxies ship them at the same time. Feedback of one key on another key's trajectory is
never attached.

A response is named by the id that the client received: `resp_...` and `msg_...` are derived from the call id; any
other id is the engine's and is stored with the call. If an engine used an id twice, the key's newest call is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
from ratchet.store.ids import may_share_trajectory
from ratchet.store.reasons import DropReason
from ratchet.store.records import CallEnded, CallRecord, Feedback, row_to
from ratchet.store.states import GroupState, TrajectoryState

TRAJECTORY, CALL, RESPONSE = "trajectory", "call", "response"
_RESPONSE_PREFIXES = ("resp_", "msg_")  # of response ids that the proxy derives from call ids
_CALL = "call_"
_MAX_SAME_ID = 100  # calls with the same engine id that are read
_LOCK = 0x52414D46  # advisory lock: shared to ship calls, exclusive to ship feedback

Place = tuple[str, str | None]  # trajectory, call

UNAPPLIED = (
    schema.feedback.c.applied_at.is_(None),
    schema.feedback.c.value.is_not(None),
)  # the condition of a partial index

_PENDING = schema.feedback.c.trajectory_id.is_(None)
_ANY_PENDING = sa.select(schema.feedback.c.id).where(_PENDING).limit(1)


class FeedbackVerbs(Verbs):
    def add(self, items: Sequence[Feedback]) -> None:
        """Add feedback; existing ids are ignored."""
        with write(self._engine) as connection:
            lock_feedback_order(connection, feedback=True)
            add(connection, items)

    def target_of(self, item: Feedback) -> Place | None:
        """Return the trajectory and call of its target; None if unknown, or if another key owns it."""
        with read(self._engine) as connection:
            return _place(connection, item)

    def get(self, name: str) -> Feedback:
        """Return feedback by id. Raises RecordNotFound."""
        query = sa.select(schema.feedback).where(schema.feedback.c.id == name)
        return self._one(Feedback, query, f"no feedback {name}")

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        trajectory: str | None = None,
        alias: str | None = None,
    ) -> list[Feedback]:
        """Return at most `limit` items older than the id `before`, newest first. Raises RecordNotFound.

        `alias`: only those that are attached to an agent's trajectory.
        """
        table = schema.feedback
        query = sa.select(table).where(matches(table, trajectory_id=trajectory or None))
        if alias:
            runs = schema.trajectories
            query = query.where(sa.exists().where(runs.c.id == table.c.trajectory_id, runs.c.alias == alias))
        if before:
            last = self.get(before)
            at = sa.tuple_(sa.literal(last.given_at), sa.literal(last.id))
            query = query.where(sa.tuple_(table.c.given_at, table.c.id) < at)
        newest_first = query.order_by(table.c.given_at.desc(), table.c.id.desc())
        return self._records(Feedback, newest_first.limit(min(limit, MAX_PAGE)))

    def first_value_at(self, trajectory_ids: Sequence[str]) -> dict[str, float]:
        """Return the time of the first value of each trajectory that has one."""
        table = schema.feedback
        found: dict[str, float] = {}
        for names in chunks(trajectory_ids):
            query = sa.select(table.c.trajectory_id, sa.func.min(table.c.given_at)).group_by(table.c.trajectory_id)
            query = query.where(table.c.trajectory_id.in_(names), table.c.value.is_not(None))
            found |= {row[0]: row[1] for row in self._rows(query)}
        return found

    def mark_applied(self, names: Sequence[str], now: float) -> None:
        """Record that a verdict has applied these."""
        table = schema.feedback
        with write(self._engine) as connection:
            for some in chunks(names):
                new = sa.update(table).where(table.c.id.in_(some), table.c.applied_at.is_(None))
                connection.execute(new.values(applied_at=now))

    def applied_too_late(self, alias: str, limit: int = 100) -> list[str]:
        """Return an alias's trajectories that got a value after they were judged or dropped, but no damaged ones."""
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
            .where(trajectories.c.drop_reason.is_distinct_from(DropReason.DAMAGED))
            .order_by(trajectories.c.id)
            .limit(limit)
        )
        return self._values(query)


def unindexed(column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return a text column in a form that uses no index: few rows are unapplied, very many share a state or alias."""
    return column.concat("")


def lock_feedback_order(connection: sa.Connection, *, feedback: bool) -> None:
    """Prevent two transactions from storing a call and feedback on it at the same time, without seeing each other.

    Must be the first lock of the transaction; `feedback`: whether it stores any. SQLite has a single writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock{'' if feedback else '_shared'}({_LOCK})")


def add(connection: sa.Connection, items: Iterable[Feedback]) -> None:
    """Add feedback in the caller's transaction, attached to its target if that is known."""
    rows = []
    for one in items:
        trajectory, call = _place(connection, one) or (None, None)
        rows.append(msgspec.structs.asdict(one) | {"trajectory_id": trajectory, "call_id": call})
    insert_or_ignore(connection, schema.feedback, rows)


def attach_pending_feedback(connection: sa.Connection, records: Sequence[CallRecord]) -> None:
    """Attach feedback that arrived before these calls, in the caller's transaction."""
    table = schema.feedback
    if connection.scalar(_ANY_PENDING) is None:
        return
    names = sorted({name for record in records for name in _names(record)})
    for some in chunks(names):
        for row in connection.execute(sa.select(table).where(_PENDING, table.c.target.in_(some))).all():
            place = _place(connection, row_to(Feedback, row))
            if place is not None:
                values = {"trajectory_id": place[0], "call_id": place[1]}
                connection.execute(sa.update(table).where(table.c.id == row.id).values(values))


def delete_pending_feedback_of(connection: sa.Connection, trajectory_ids: Sequence[str]) -> int:
    """Delete unattached feedback on these trajectories or their calls, which another key sent; return the number.

    Attached feedback is deleted with its trajectory.
    """
    calls = schema.calls
    own = sa.select(calls.c.id, calls.c.response_id).where(calls.c.trajectory_id.in_(trajectory_ids))
    names = {name for row in connection.execute(own) for name in _names_of(row.id, row.response_id)}
    table, targets = schema.feedback, sorted(names | set(trajectory_ids))
    meant = [sa.delete(table).where(_PENDING, table.c.target.in_(some)) for some in chunks(targets)]
    return sum(connection.execute(one).rowcount for one in meant)


def delete_pending_feedback(connection: sa.Connection, chosen: TrajectoryFilter) -> int:
    """Delete unattached feedback if the filter restricts only key and age; return the number."""
    table = schema.feedback
    conditions = [table.c.given_at < moment for moment in (chosen.until, chosen.inactive_since) if moment is not None]
    conditions += [table.c.key_id == chosen.key] if chosen.key is not None else []
    if not conditions or not replace(chosen, key=None, until=None, inactive_since=None, trained=None).is_unrestricted:
        return 0
    return int(connection.execute(sa.delete(table).where(table.c.trajectory_id.is_(None), *conditions)).rowcount)


def feedback_of(connection: sa.Connection, trajectory_id: str) -> tuple[Feedback, ...]:
    """Return the feedback on a trajectory, oldest first."""
    table = schema.feedback
    chosen = sa.select(table).where(table.c.trajectory_id == trajectory_id).order_by(table.c.given_at, table.c.id)
    return tuple(row_to(Feedback, row) for row in connection.execute(chosen))


def _names(record: CallRecord) -> list[str]:
    """Return the names that feedback may use for a call."""
    start, response_id = (record.start, record.response_id) if isinstance(record, CallEnded) else (record, None)
    return [start.trajectory_id, *_names_of(start.call_id, response_id)]


def _names_of(call_id: str, response_id: str | None) -> list[str]:
    responses = [prefix + call_id.removeprefix(_CALL) for prefix in _RESPONSE_PREFIXES]
    return [call_id, *responses, *([response_id] if response_id else [])]


def _place(connection: sa.Connection, item: Feedback) -> Place | None:
    """Return the trajectory and call of the target, if the sender may give feedback on them."""
    trajectories, calls = schema.trajectories, schema.calls
    if item.kind == TRAJECTORY:
        found = connection.execute(
            sa.select(trajectories.c.id, trajectories.c.key_id).where(trajectories.c.id == item.target)
        ).first()
        return (found.id, None) if found and _may_give_feedback(item, found.key_id) else None
    query = sa.select(calls.c.id, calls.c.trajectory_id, trajectories.c.key_id).join(
        trajectories, trajectories.c.id == calls.c.trajectory_id
    )
    name = _call_of(item)
    if name is not None and (one := connection.execute(query.where(calls.c.id == name)).first()):
        return (one.trajectory_id, one.id) if _may_give_feedback(item, one.key_id) else None
    if item.kind == CALL:
        return None
    newest = query.where(calls.c.response_id == item.target).order_by(calls.c.id.desc()).limit(_MAX_SAME_ID)
    rows = [row for row in connection.execute(newest) if _may_give_feedback(item, row.key_id)]
    return (rows[0].trajectory_id, rows[0].id) if rows else None


def _call_of(item: Feedback) -> str | None:
    """Return the call id that the target contains, if any."""
    if item.kind == CALL:
        return item.target
    prefix = next((prefix for prefix in _RESPONSE_PREFIXES if item.target.startswith(prefix)), None)
    return _CALL + item.target.removeprefix(prefix) if prefix else None


def _may_give_feedback(item: Feedback, key_id: str | None) -> bool:
    return item.trusted or may_share_trajectory(item.key_id, key_id)
