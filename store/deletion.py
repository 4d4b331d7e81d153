"""Deletion of trajectories with all that belongs to them, and the policy versions that were trained on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.calls import unnamed_messages
from ratchet.store.calls.feedback import delete_pending_feedback, delete_pending_feedback_of
from ratchet.store.calls.shipping import MESSAGES_LOCK
from ratchet.store.calls.trajectory_filter import TrajectoryFilter, ids_with_successors
from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.errors import InvalidTransition
from ratchet.store.ids import new_id
from ratchet.store.operation_records import AffectedVersion, Deletion
from ratchet.store.policies.policies import forks
from ratchet.store.reasons import DropReason
from ratchet.store.records import Policy
from ratchet.store.states import CallState, GroupState, PolicyState, RoundState, TrajectoryState
from ratchet.store.tuning import erase_content

if TYPE_CHECKING:
    from ratchet.store.policies.policies import Policies


# Policy versions that were trained in certain rounds, or on trajectories that were deleted since.
#
# A version is affected if such a round trained it, if it was trained or forked from an affected version, or if it
# shares its adapter with one. A deletion stores the versions of its rounds; later versions that descend from them are
# found here.

_REASON = "it was trained on trajectories that were deleted"

Version = tuple[str, int]  # alias, number


def versions_trained_by(connection: sa.Connection, rounds: Collection[str]) -> tuple[AffectedVersion, ...]:
    """Return the versions that these rounds affect, in order."""
    if not rounds:
        return ()
    table = schema.rounds
    made = sa.select(table.c.alias, table.c.to_version).where(matches(table, id=rounds, state=RoundState.COMMITTED))
    return _inheritors(connection, {(row.alias, row.to_version) for row in connection.execute(made)})


def versions_with_deleted_data(connection: sa.Connection) -> tuple[AffectedVersion, ...]:
    """Return the versions that were trained on trajectories deleted since, in order."""
    noted = [policy for policies in connection.scalars(sa.select(schema.deletions.c.policies)) for policy in policies]
    return _inheritors(connection, {(one["alias"], one["version"]) for one in noted if one["trained_directly"]})


def reject_affected(policies: Policies, held: Sequence[AffectedVersion], *, by: str) -> dict[str, list[Policy]]:
    """Reject affected versions; return those that were not rejected before, by alias.

    If the live version is affected, the newest unaffected version that can serve becomes live. Raises InvalidTransition
    if there is none.
    """
    done: dict[str, list[Policy]] = {}
    for alias in sorted({one.alias for one in held}):
        own = {one.version for one in held if one.alias == alias}
        live = policies.live().get(alias)
        rejected: list[Policy] = []
        if live is not None and live.version in own:
            target = _newest_before(policies.all(alias), live.version, own)
            rejected += policies.roll_back(alias, target, {}, by=by, reason=_REASON)
        for policy in policies.all(alias):
            if policy.version in own and policy.state is not PolicyState.REJECTED:
                rejected.append(policies.reject(alias, policy.version, {}, by=by, reason=_REASON))
        if rejected:
            done[alias] = rejected
    return done


def _newest_before(known: Sequence[Policy], live: int, held: Collection[int]) -> int:
    older = [one for one in known if one.version < live and one.version not in held and one.pruned_at is None]
    usable = [policy.version for policy in older if policy.state is not PolicyState.REJECTED]
    if not usable:
        raise InvalidTransition(f"no version of {known[0].alias} before {live} can serve: promote one by hand")
    return max(usable)


def _inheritors(connection: sa.Connection, own: Collection[Version]) -> tuple[AffectedVersion, ...]:
    """Return the versions of `own` and their descendants."""
    if not own:
        return ()
    rounds, policies = schema.rounds, schema.policies
    committed = sa.select(rounds.c.alias, rounds.c.from_version, rounds.c.to_version)
    steps = connection.execute(committed.where(rounds.c.state == RoundState.COMMITTED)).all()
    origins = {(row.alias, row.to_version): (row.alias, row.from_version) for row in steps}
    origins |= forks(connection)
    known = connection.execute(sa.select(policies).order_by(policies.c.alias, policies.c.version)).all()
    held: set[Version] = set()
    adapters: set[tuple[str, str]] = set()
    while True:  # until nothing is added: a version may be forked into an agent of any name
        before = len(held)
        for row in known:
            name = (row.alias, row.version)
            if name in own or origins.get(name) in held or (row.alias, row.adapter) in adapters:
                held.add(name)
                adapters |= {(row.alias, row.adapter)} if row.adapter else set()
        if len(held) == before:
            break
    return tuple(
        AffectedVersion(row.alias, row.version, row.state, row.adapter, (row.alias, row.version) in own)
        for row in known
        if (row.alias, row.version) in held
    )


# Deletes trajectories with their calls, tokens, verdicts and messages, and names the versions trained on them.
#
# Guarantees: no content of a deleted trajectory stays in the tables. Deleted are its calls, blocks, tags and tool
# calls; its verdicts; the judge requests of its group (they quote every member) and the explanations of their verdicts;
# feedback on it, attached or not; the response and failure of its rollout; and each message and tool list that no other
# call names. An untrained group that loses a member is dropped, so that no round trains deleted data. Each batch is one
# transaction, and a deletion that was interrupted is continued by the next one.
#
# Messages are deleted in a second step, the sweep, because a running proxy does not ship messages that it knows to be
# stored. A proxy notices a deletion within about a second and then ships them again; the sweep waits until the proxy
# has shipped its earlier records.
#
# Not deleted: adapters and checkpoints (`policies` names them), prompts, rows of task sets, backups, and journals that
# are not shipped yet.

_BATCH = 100  # trajectories in one transaction
_PAGE = 500  # messages
_NOTICED_AFTER = 3.0  # seconds until every running proxy has noticed a deletion
_PROXY_TIMEOUT = 10.0  # seconds without a heartbeat after which a proxy counts as stopped


class Deletions(Verbs):
    def count(self, selection: TrajectoryFilter) -> int:
        """Return the number of trajectories that `delete` would delete."""
        return int(self._value(sa.select(sa.func.count()).select_from(_selected(selection))))

    def calls_in_flight(self, selection: TrajectoryFilter, since: float) -> int:
        """Return the number of calls that started after `since` and have no end, whose ends would be stored again."""
        calls = schema.calls
        query = sa.select(sa.func.count()).where(
            calls.c.trajectory_id.in_(sa.select(_selected(selection).c.id)),
            calls.c.state == CallState.STARTED,
            calls.c.started_at > since,
        )
        return int(self._value(query))

    def versions_trained_on(self, selection: TrajectoryFilter) -> tuple[AffectedVersion, ...]:
        """Return the versions that were trained on selected trajectories, in order."""
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
        """Return the versions that were trained on trajectories deleted since, in order."""
        with read(self._engine) as connection:
            return versions_with_deleted_data(connection)

    def delete(
        self,
        selection: TrajectoryFilter,
        reason: str,
        on_batch: Callable[[int], None] = lambda count: None,
        timeout_seconds: float = 30.0,
    ) -> Deletion:
        """Delete the selected trajectories with their content; `on_batch` receives the size of each batch.

        Waits at most `timeout_seconds` for running proxies; the next deletion sweeps what then remains.
        """
        deletion = Deletion(new_id("del"), reason, started_at=time.time(), updated_at=time.time())
        rounds: set[str] = set()
        for names in self._batches(selection):
            with write(self._engine) as connection:
                deletion = _delete_batch(connection, names, deletion, rounds)
            on_batch(len(names))
        with write(self._engine) as connection:
            pending = delete_pending_feedback(connection, selection)
        deletion = msgspec.structs.replace(deletion, feedback=deletion.feedback + pending)
        swept = self.sweep(timeout_seconds)
        return msgspec.structs.replace(deletion, messages=swept, unswept_messages=self._orphan_candidate_count())

    def latest(self) -> float:
        """Return the time of the latest deletion (Unix seconds), or 0. Every deletion changes it."""
        return float(self._value(sa.select(sa.func.max(schema.deletions.c.updated_at))) or 0.0)

    def all(self, limit: int = 100) -> list[Deletion]:
        """Return the latest deletions, newest first."""
        table = schema.deletions
        rows = self._rows(sa.select(table).order_by(table.c.id.desc()).limit(limit))
        return [msgspec.convert({str(k): v for k, v in row._mapping.items()}, Deletion) for row in rows]

    def sweep(self, timeout_seconds: float) -> int:
        """Delete messages without a reference; return their number. Waits for proxies as `delete` does."""
        since = self.latest() + _NOTICED_AFTER
        if not self._orphan_candidate_count() or not self._proxies_know(since, time.monotonic() + timeout_seconds):
            return 0
        gone, checked = 0, 1
        while checked:
            with write(self._engine) as connection:
                checked, deleted = _sweep_page(connection)
            gone += deleted
        if (
            self._engine.dialect.name == "sqlite"
        ):  # its write-ahead log holds old pages; it stays while a reader uses it
            with self._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return gone

    def _batches(self, selection: TrajectoryFilter) -> Iterator[list[str]]:
        """Yield the selected trajectories in batches, with their successors."""
        trajectories, last = schema.trajectories, ""
        while True:
            page = sa.select(trajectories.c.id).where(selection.where(), trajectories.c.id > last)
            page = page.order_by(trajectories.c.id).limit(_BATCH)
            with read(self._engine) as connection:
                names = list(connection.scalars(page))
                whole = sorted(connection.scalars(ids_with_successors(trajectories.c.id.in_(names)))) if names else []
            if not names:
                return
            last = names[-1]
            yield whole

    def _orphan_candidate_count(self) -> int:
        return int(self._value(sa.select(sa.func.count()).select_from(schema.orphan_candidates)))

    def _proxies_know(self, since: float, until: float) -> bool:
        """Wait until every running proxy has shipped what it recorded before `since`; return whether all have."""
        instances = schema.proxy_instances
        query = sa.select(sa.func.min(instances.c.shipped_until))
        while True:
            oldest = self._value(query.where(instances.c.heartbeat_at > time.time() - _PROXY_TIMEOUT))
            if oldest is None or oldest >= since:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)


def _selected(selection: TrajectoryFilter) -> sa.Subquery:
    return ids_with_successors(selection.where()).subquery()


def _delete_batch(connection: sa.Connection, names: Sequence[str], deletion: Deletion, rounds: set[str]) -> Deletion:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")  # freed pages are overwritten
    trajectories, calls = schema.trajectories, schema.calls
    chosen = sa.select(trajectories.c.group_id, trajectories.c.round_id).where(trajectories.c.id.in_(names))
    found = connection.execute(chosen.order_by(trajectories.c.id).with_for_update()).all()
    groups = sorted({row.group_id for row in found if row.group_id})
    imitated = schema.sft_trajectories.c
    demonstrated = sa.select(imitated.round_id).where(imitated.trajectory_id.in_(names))
    new = ({row.round_id for row in found if row.round_id} | set(connection.scalars(demonstrated))) - rounds
    rounds |= new
    dropped = _drop_groups(connection, groups, names)
    _add_orphan_candidates(connection, names)
    _delete_verdicts(connection, names, groups)
    erase_content(connection, names)
    pending = delete_pending_feedback_of(connection, names)
    count = connection.execute(sa.delete(calls).where(calls.c.trajectory_id.in_(names))).rowcount
    gone = connection.execute(sa.delete(trajectories).where(trajectories.c.id.in_(names))).rowcount
    _delete_empty(connection, groups)
    deletion = msgspec.structs.replace(
        deletion,
        updated_at=max(time.time(), deletion.updated_at + 1e-6),
        trajectory_count=deletion.trajectory_count + gone,
        call_count=deletion.call_count + count,
        groups_dropped=deletion.groups_dropped + dropped,
        feedback=deletion.feedback + pending,
        policies=versions_trained_by(connection, rounds) if new else deletion.policies,
    )
    _save_progress(connection, deletion)
    return deletion


def _save_progress(connection: sa.Connection, deletion: Deletion) -> None:
    """Store the progress of a deletion."""
    table = schema.deletions
    row = {column.name: getattr(deletion, column.name) for column in table.c}
    row["policies"] = [msgspec.structs.asdict(policy) for policy in deletion.policies]
    insert_or_ignore(connection, table, [row])
    connection.execute(sa.update(table).where(table.c.id == deletion.id).values(**row))


def _drop_groups(connection: sa.Connection, groups: Sequence[str], leaving: Sequence[str]) -> int:
    """Drop untrained groups with their remaining members; return the number of groups."""
    table, trajectories = schema.groups, schema.trajectories
    waiting = (GroupState.READY, GroupState.JUDGED)
    drop = sa.update(table).where(matches(table, id=groups, state=waiting)).returning(table.c.id)
    dropped = list(connection.scalars(drop.values(state=GroupState.DROPPED, drop_reason=DropReason.MEMBER_DELETED)))
    members = matches(trajectories, group_id=dropped, state=TrajectoryState.GROUPED)
    left = sa.update(trajectories).where(members, trajectories.c.id.not_in(leaving))
    connection.execute(left.values(state=TrajectoryState.DROPPED, drop_reason=DropReason.MEMBER_DELETED))
    return len(dropped)


def _add_orphan_candidates(connection: sa.Connection, names: Sequence[str]) -> None:
    """Add the messages and tool lists that the calls of trajectories name."""
    calls, choices = schema.calls, schema.choices
    own = calls.c.trajectory_id.in_(names)
    prompts = connection.execute(sa.select(calls.c.prompt_node, calls.c.tools_hash).where(own))
    hashes = {name for row in prompts for name in row}
    replies = sa.select(choices.c.reply_node).join(calls, calls.c.id == choices.c.call_id).where(own)
    hashes |= set(connection.scalars(replies))
    insert_or_ignore(connection, schema.orphan_candidates, [{"hash": name} for name in sorted(hashes - {""})])


def _delete_verdicts(connection: sa.Connection, names: Sequence[str], groups: Sequence[str]) -> None:
    """Delete the verdicts on trajectories, the judge requests of their groups, and explanations that may quote them."""
    verdicts, judge_requests = schema.verdicts, schema.judge_requests
    own = verdicts.c.trajectory_id.in_(names)
    behind = sa.select(verdicts.c.judge_request_id).where(own, verdicts.c.judge_request_id.is_not(None))
    of_groups = sa.or_(judge_requests.c.group_id.in_(groups), judge_requests.c.id.in_(behind))
    connection.execute(sa.delete(judge_requests).where(of_groups))
    connection.execute(sa.delete(verdicts).where(own))
    others = sa.update(verdicts).where(verdicts.c.group_id.in_(groups))
    connection.execute(others.values(explanation="", judge_request_id=None))


def _delete_empty(connection: sa.Connection, groups: Sequence[str]) -> None:
    """Delete groups without members."""
    table, trajectories, verdicts = schema.groups, schema.trajectories, schema.verdicts
    connection.execute(
        sa.delete(table).where(
            table.c.id.in_(groups),
            ~sa.exists().where(trajectories.c.group_id == table.c.id),
            ~sa.exists().where(verdicts.c.group_id == table.c.id),
        )
    )


def _sweep_page(connection: sa.Connection) -> tuple[int, int]:
    """Check a page of orphan candidates; return the number checked and the number deleted."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    else:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MESSAGES_LOCK})")
    orphan_candidates = schema.orphan_candidates
    page = list(connection.scalars(sa.select(orphan_candidates.c.hash).order_by(orphan_candidates.c.hash).limit(_PAGE)))
    if not page:
        return 0, 0
    connection.execute(sa.delete(orphan_candidates).where(orphan_candidates.c.hash.in_(page)))
    parents = unnamed_messages(connection, page)
    connection.execute(sa.delete(schema.messages).where(schema.messages.c.hash.in_(parents)))
    # The parent of a deleted message may be an orphan now.
    insert_or_ignore(connection, orphan_candidates, [{"hash": name} for name in sorted(set(parents.values()) - {""})])
    return len(page), len(parents) + _delete_toolsets(connection, page)


def _delete_toolsets(connection: sa.Connection, page: Sequence[str]) -> int:
    table, trajectories, calls = schema.toolsets, schema.trajectories, schema.calls
    unused: Any = sa.delete(table).where(
        table.c.hash.in_(page),
        ~sa.exists().where(trajectories.c.tools_hash == table.c.hash),
        ~sa.exists().where(calls.c.tools_hash == table.c.hash),
    )
    return int(connection.execute(unused).rowcount)
