"""Deletion: trajectories go with their calls, tokens, verdicts and messages. What was trained stays, and is named.

Promises: nothing that only a deleted trajectory said stays in the tables: its calls, blocks, tags and tool calls, its
verdicts, what its group's judges asked (it quotes every member) and their explanations, what people said of it, placed
or not, what a workflow returned as its rollout and why it failed, and each message and tool list that no other call
names. A group that loses a member before
it is trained is dropped, so that no round trains what has gone. One transaction per batch; whatever stops a deletion,
the next one goes on where it was.

Messages go in a second step, the sweep: a running proxy leaves out messages that it knows to be stored. It sees a
deletion within a second or so and writes them again from then on; the sweep waits until everything that it recorded
before that has been shipped.

Not deleted: adapters and checkpoints (`trained_into` names them), prompts, the rows of task sets, backups, and journals
that are not yet shipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.feedback import delete_pending_feedback, delete_pending_feedback_of
from ratchet.store.calls.shipping import MESSAGES_LOCK
from ratchet.store.calls.trajectory_filter import TrajectoryFilter, ids_with_successors
from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.deletion.affected_versions import AffectedVersion, versions_trained_by, versions_with_deleted_data
from ratchet.store.ids import new_id
from ratchet.store.reasons import DropReason
from ratchet.store.records.base import Record
from ratchet.store.states import CallState, GroupState, TrajectoryState
from ratchet.store.tuning.rollouts import erase_content

_BATCH = 100  # trajectories in one transaction
_PAGE = 500  # messages
_SEEN_AFTER = 3.0  # seconds in which a running proxy has seen a deletion
_SILENCE = 10.0  # seconds after which a proxy that says nothing is not running


class Deletion(Record, frozen=True):
    """What one deletion did."""

    id: str
    reason: str
    started_at: float
    updated_at: float
    trajectory_count: int = 0
    call_count: int = 0
    messages: int = 0  # and tool lists; on_batch once, not kept
    groups_dropped: int = 0  # that were not trained yet; likewise
    unswept_messages: int = 0  # messages that wait for a proxy; likewise
    feedback: int = 0  # that waited for a call; likewise
    policies: tuple[AffectedVersion, ...] = ()


class Deletions:
    """Operations on deletions."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def count(self, selection: TrajectoryFilter) -> int:
        """Return how many trajectories `delete` would delete."""
        with read(self._engine) as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(_selected(selection))) or 0)

    def calls_in_flight(self, selection: TrajectoryFilter, since: float) -> int:
        """Return how many calls of the selection began after `since` and have no end: their ends would come back."""
        calls = schema.calls
        query = sa.select(sa.func.count()).where(
            calls.c.trajectory_id.in_(sa.select(_selected(selection).c.id)),
            calls.c.state == CallState.STARTED,
            calls.c.started_at > since,
        )
        with read(self._engine) as connection:
            return int(connection.scalar(query) or 0)

    def versions_trained_on(self, selection: TrajectoryFilter) -> tuple[AffectedVersion, ...]:
        """Return the versions that hold something of the selection trajectories, in order."""
        trajectories, imitated = schema.trajectories, schema.sft_trajectories
        selected = sa.select(_selected(selection).c.id)
        trained = sa.select(trajectories.c.round_id).where(
            trajectories.c.id.in_(selected), trajectories.c.round_id.is_not(None)
        )
        demonstrated = sa.select(imitated.c.round_id).where(imitated.c.trajectory_id.in_(selected))
        with read(self._engine) as connection:
            return versions_trained_by(
                connection, {name for name in connection.scalars(trained.union(demonstrated)) if name}
            )

    def versions_with_deleted_data(self) -> tuple[AffectedVersion, ...]:
        """Return the versions that hold something of trajectories that were deleted, in order."""
        with read(self._engine) as connection:
            return versions_with_deleted_data(connection)

    def delete(
        self,
        selection: TrajectoryFilter,
        reason: str,
        on_batch: Callable[[int], None] = lambda count: None,
        timeout_seconds: float = 30.0,
    ) -> Deletion:
        """Delete the selection trajectories and what is theirs alone; `on_batch` hears of each batch's size.

        Waits at most `timeout_seconds` seconds for running proxies; what then remains is swept by the next deletion.
        """
        deletion = Deletion(id=new_id("del"), reason=reason, started_at=time.time(), updated_at=time.time())
        rounds: set[str] = set()
        for names in self._batches(selection):
            with write(self._engine) as connection:
                deletion = _delete_batch(connection, names, deletion, rounds)
            on_batch(len(names))
        with write(self._engine) as connection:
            waited = delete_pending_feedback(connection, selection)
        deletion = msgspec.structs.replace(deletion, feedback=deletion.feedback + waited)
        swept = self.sweep(timeout_seconds)
        return msgspec.structs.replace(deletion, messages=swept, unswept_messages=self._orphan_candidate_count())

    def latest(self) -> float:
        """Return when something was deleted last (Unix seconds), 0 where nothing was: it changes with each deletion."""
        with read(self._engine) as connection:
            return float(connection.scalar(sa.select(sa.func.max(schema.deletions.c.updated_at))) or 0.0)

    def all(self, limit: int = 100) -> list[Deletion]:
        """Return the latest deletions, the last one first."""
        table = schema.deletions
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.id.desc()).limit(limit)).all()
        return [msgspec.convert({str(k): v for k, v in row._mapping.items()}, Deletion) for row in rows]

    def sweep(self, timeout_seconds: float) -> int:
        """Delete the messages that nobody names any more; return how many went. Waits for proxies as `delete` does."""
        since = self.latest() + _SEEN_AFTER
        if not self._orphan_candidate_count() or not self._proxies_know(since, time.monotonic() + timeout_seconds):
            return 0
        gone = 0
        while True:
            with write(self._engine) as connection:
                looked_at, deleted = _sweep_page(connection)
            gone += deleted
            if not looked_at:
                break
        self._truncate()
        return gone

    def _batches(self, selection: TrajectoryFilter) -> Iterator[list[str]]:
        """Yield the selection, each batch with its successors."""
        trajectories, last = schema.trajectories, ""
        while True:
            page = (
                sa.select(trajectories.c.id)
                .where(selection.where(), trajectories.c.id > last)
                .order_by(trajectories.c.id)
                .limit(_BATCH)
            )
            with read(self._engine) as connection:
                names = list(connection.scalars(page))
                whole = sorted(connection.scalars(ids_with_successors(trajectories.c.id.in_(names)))) if names else []
            if not names:
                return
            last = names[-1]
            yield whole

    def _orphan_candidate_count(self) -> int:
        with read(self._engine) as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(schema.orphan_candidates)) or 0)

    def _proxies_know(self, since: float, until: float) -> bool:
        """Wait until every running proxy has shipped what it recorded before `since`; return whether all have."""
        instances = schema.proxy_instances
        query = sa.select(sa.func.min(instances.c.shipped_until))
        while True:
            with read(self._engine) as connection:
                oldest = connection.scalar(query.where(instances.c.heartbeat_at > time.time() - _SILENCE))
            if oldest is None or oldest >= since:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)

    def _truncate(self) -> None:
        """SQLite: empty the log of changes, which holds pages as they were; where a reader is in the way, it stays."""
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")


def _selected(selection: TrajectoryFilter) -> sa.Subquery:
    return ids_with_successors(selection.where()).subquery()


def _delete_batch(connection: sa.Connection, names: Sequence[str], deletion: Deletion, rounds: set[str]) -> Deletion:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")  # freed pages are overwritten
    trajectories, calls = schema.trajectories, schema.calls
    locked = (
        sa.select(trajectories.c.group_id, trajectories.c.round_id)
        .where(trajectories.c.id.in_(names))
        .order_by(trajectories.c.id)
    )
    found = connection.execute(locked.with_for_update()).all()
    groups = sorted({row.group_id for row in found if row.group_id})
    demonstrated = sa.select(schema.sft_trajectories.c.round_id).where(
        schema.sft_trajectories.c.trajectory_id.in_(names)
    )
    new = ({row.round_id for row in found if row.round_id} | set(connection.scalars(demonstrated))) - rounds
    rounds |= new
    dropped = _drop_groups(connection, groups, names)
    _add_orphan_candidates(connection, names)
    _delete_verdicts(connection, names, groups)
    erase_content(connection, names)
    waited = delete_pending_feedback_of(connection, names)
    count = connection.execute(sa.delete(calls).where(calls.c.trajectory_id.in_(names))).rowcount
    gone = connection.execute(sa.delete(trajectories).where(trajectories.c.id.in_(names))).rowcount
    _delete_empty(connection, groups)
    deletion = msgspec.structs.replace(
        deletion,
        updated_at=max(time.time(), deletion.updated_at + 1e-6),
        trajectory_count=deletion.trajectory_count + gone,
        call_count=deletion.call_count + count,
        groups_dropped=deletion.groups_dropped + dropped,
        feedback=deletion.feedback + waited,
        policies=versions_trained_by(connection, rounds) if new else deletion.policies,
    )
    _save_progress(connection, deletion)
    return deletion


def _save_progress(connection: sa.Connection, deletion: Deletion) -> None:
    """Record what has been deleted so far."""
    table = schema.deletions
    row = {column.name: getattr(deletion, column.name) for column in table.c}
    row["policies"] = [msgspec.structs.asdict(policy) for policy in deletion.policies]
    insert_or_ignore(connection, table, [row])
    connection.execute(sa.update(table).where(table.c.id == deletion.id).values(**row))


def _drop_groups(connection: sa.Connection, groups: Sequence[str], leaving: Sequence[str]) -> int:
    """Drop the groups that are not trained yet with the members that stay; return how many."""
    table, trajectories = schema.groups, schema.trajectories
    waiting = (GroupState.READY, GroupState.JUDGED)
    drop = sa.update(table).where(table.c.id.in_(groups), table.c.state.in_(waiting)).returning(table.c.id)
    dropped = list(connection.scalars(drop.values(state=GroupState.DROPPED, drop_reason=DropReason.MEMBER_DELETED)))
    connection.execute(
        sa.update(trajectories)
        .where(
            trajectories.c.group_id.in_(dropped),
            trajectories.c.state == TrajectoryState.GROUPED,
            trajectories.c.id.not_in(leaving),
        )
        .values(state=TrajectoryState.DROPPED, drop_reason=DropReason.MEMBER_DELETED)
    )
    return len(dropped)


def _add_orphan_candidates(connection: sa.Connection, names: Sequence[str]) -> None:
    """Note what the calls of trajectories name: it may be nobody else's."""
    calls, choices = schema.calls, schema.choices
    own = calls.c.trajectory_id.in_(names)
    prompts = connection.execute(sa.select(calls.c.prompt_node, calls.c.tools_hash).where(own))
    hashes = {name for row in prompts for name in row}
    replies = sa.select(choices.c.reply_node).join(calls, calls.c.id == choices.c.call_id).where(own)
    hashes |= set(connection.scalars(replies))
    insert_or_ignore(connection, schema.orphan_candidates, [{"hash": name} for name in sorted(hashes - {""})])


def _delete_verdicts(connection: sa.Connection, names: Sequence[str], groups: Sequence[str]) -> None:
    """Delete what judges said of trajectories, what they asked of their groups, and explanations that may quote it."""
    verdicts, judge_requests = schema.verdicts, schema.judge_requests
    own = verdicts.c.trajectory_id.in_(names)
    asked = sa.or_(
        judge_requests.c.group_id.in_(groups),
        judge_requests.c.id.in_(
            sa.select(verdicts.c.judge_request_id).where(own, verdicts.c.judge_request_id.is_not(None))
        ),
    )
    connection.execute(sa.delete(judge_requests).where(asked))
    connection.execute(sa.delete(verdicts).where(own))
    connection.execute(
        sa.update(verdicts).where(verdicts.c.group_id.in_(groups)).values(explanation="", judge_request_id=None)
    )


def _delete_empty(connection: sa.Connection, groups: Sequence[str]) -> None:
    """Delete the groups that have no member left."""
    table, trajectories, verdicts = schema.groups, schema.trajectories, schema.verdicts
    connection.execute(
        sa.delete(table).where(
            table.c.id.in_(groups),
            ~sa.exists().where(trajectories.c.group_id == table.c.id),
            ~sa.exists().where(verdicts.c.group_id == table.c.id),
        )
    )


def _sweep_page(connection: sa.Connection) -> tuple[int, int]:
    """Look at some orphan_candidates messages and tool lists; return how many, and how many of them were deleted."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    else:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MESSAGES_LOCK})")
    orphan_candidates = schema.orphan_candidates
    page = list(connection.scalars(sa.select(orphan_candidates.c.hash).order_by(orphan_candidates.c.hash).limit(_PAGE)))
    if not page:
        return 0, 0
    connection.execute(sa.delete(orphan_candidates).where(orphan_candidates.c.hash.in_(page)))
    parents = _delete_orphans(connection, page)
    # A message whose last child has gone may be nobody's as well.
    insert_or_ignore(connection, orphan_candidates, [{"hash": name} for name in sorted(set(parents.values()) - {""})])
    return len(page), len(parents) + _delete_toolsets(connection, page)


def _delete_orphans(connection: sa.Connection, page: Sequence[str]) -> Mapping[str, str]:
    """Delete those of these messages that no message, prompt or answer needs; return their parents."""
    table, child = schema.messages, schema.messages.alias("child")
    orphans = sa.select(table.c.hash, table.c.parent).where(
        table.c.hash.in_(page),
        ~sa.exists().where(child.c.parent == table.c.hash),
        ~sa.exists().where(schema.calls.c.retained_node == table.c.hash),
        ~sa.exists().where(schema.choices.c.reply_node == table.c.hash),
    )
    found = {row.hash: row.parent for row in connection.execute(orphans)}
    connection.execute(sa.delete(table).where(table.c.hash.in_(list(found))))
    return found


def _delete_toolsets(connection: sa.Connection, page: Sequence[str]) -> int:
    table, trajectories, calls = schema.toolsets, schema.trajectories, schema.calls
    unused: Any = sa.delete(table).where(
        table.c.hash.in_(page),
        ~sa.exists().where(trajectories.c.tools_hash == table.c.hash),
        ~sa.exists().where(calls.c.tools_hash == table.c.hash),
    )
    return int(connection.execute(unused).rowcount)
