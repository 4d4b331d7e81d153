"""Policy versions that were trained in certain rounds, or on trajectories that were deleted since.

A version is affected if such a round trained it, if it was trained or forked from an affected version, or if it shares
its adapter with one. A deletion stores the versions of its rounds; later versions that descend from them are found
here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.errors import InvalidTransition
from ratchet.store.policies.forks import forks
from ratchet.store.records import Policy
from ratchet.store.records.base import Record
from ratchet.store.states import PolicyState, RoundState

if TYPE_CHECKING:
    from ratchet.store.policies.policies import Policies

_REASON = "it was trained on trajectories that were deleted"

Version = tuple[str, int]  # alias, number


class AffectedVersion(Record, frozen=True):
    """A version that was trained on deleted trajectories, directly or through the version that it continues."""

    alias: str
    version: int
    state: str
    adapter: str | None
    trained_directly: bool


def versions_trained_by(connection: sa.Connection, rounds: Collection[str]) -> tuple[AffectedVersion, ...]:
    """Return the versions that these rounds affect, in order."""
    if not rounds:
        return ()
    table = schema.rounds
    made = sa.select(table.c.alias, table.c.to_version).where(
        table.c.id.in_(rounds), table.c.state == RoundState.COMMITTED
    )
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
    usable = [
        policy.version
        for policy in known
        if policy.version < live
        and policy.version not in held
        and policy.pruned_at is None
        and policy.state is not PolicyState.REJECTED
    ]
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
