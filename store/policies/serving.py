"""Decisions about which versions serve: ramp, promotion, anchor, shares, rollback and pins.

An alias has one live version, at most one in its ramp, which is newer, and at most one held back, which is older: the
anchor. Each decision is one transaction that also records it, with the shares in force afterwards. Of two concurrent
decisions, the later fails with InvalidTransition. While a version is pinned, only `unpin` changes what serves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.db import schema
from ratchet.store.db.engine import write
from ratchet.store.errors import InvalidTransition
from ratchet.store.policies.decisions import record_decision
from ratchet.store.policies.registration import PolicyRegistration
from ratchet.store.policies.shares import ServingVersions, check_shares, locked, shares_in_force
from ratchet.store.records import Policy
from ratchet.store.records.base import row_to
from ratchet.store.states import POLICY_TRANSITIONS, SERVING, PolicyAction, PolicyState, check_transition

Evidence = Mapping[str, Any]


class ServingDecisions(PolicyRegistration):
    """Operations that change which versions serve."""

    def serving_of(self, alias: str) -> ServingVersions:
        """Return the versions of an alias that serve new trajectories."""
        table = schema.policies
        found = {
            policy.state: policy for policy in self._select(sa.and_(table.c.alias == alias, table.c.state.in_(SERVING)))
        }
        return ServingVersions(*(found.get(state) for state in SERVING))

    def start_ramp(
        self, alias: str, version: int, share: float, evidence: Evidence | None = None, *, by: str = "release",
        reason: str = "proven",
    ) -> Policy:  # fmt: skip
        """Let a candidate serve a share of new trajectories (between 0 and 1) beside the live version.

        Raises InvalidTransition if another version is in its ramp or a newer one is live, RecordNotFound.
        """
        policy, serving = self._usable(alias, version), self.serving_of(alias)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.RAMP, f"policy {_name(policy)}")
        _check_share(policy, share)
        _check_newer(policy, serving.live)
        if serving.ramp is not None:
            raise InvalidTransition(
                f"{alias}@{serving.ramp.version} is in its ramp: promote or reject it before {alias}@{version}"
            )
        with self._decide(alias, serving) as connection:
            change_state(connection, policy, PolicyState.RAMP, evidence, share)
            record_serving(connection, policy, PolicyAction.RAMP, by, reason, {**(evidence or {}), "share": share})
        return self.get(alias, version)

    def set_share(
        self, alias: str, version: int, share: float, evidence: Evidence | None = None, *, by: str, reason: str
    ) -> Policy:
        """Change the share of the version in its ramp, or of the one held back. Raises InvalidTransition."""
        policy, serving = self.get(alias, version), self.serving_of(alias)
        if policy not in (serving.ramp, serving.holdback):
            raise InvalidTransition(f"policy {_name(policy)} is {policy.state} and has no share that could be changed")
        _check_share(policy, share)
        with self._decide(alias, serving) as connection:
            change_state(connection, policy, policy.state, None, share)
            record_serving(connection, policy, PolicyAction.SHARE, by, reason, {**(evidence or {}), "share": share})
        return self.get(alias, version)

    def promote(
        self, alias: str, version: int, evidence: Evidence, *, only_from: PolicyState | None = None, by: str = "proof",
        reason: str = "proven", holdback: float = 0.0,
    ) -> Policy:  # fmt: skip
        """Make a version live; with `only_from`, only if it is in that state.

        With a `holdback`, the anchor keeps that share of new trajectories: the version held back, else the live one
        until now. All other versions that served are retired. Raises InvalidTransition, RecordNotFound.
        """
        policy, serving = self._usable(alias, version), self.serving_of(alias)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.LIVE, f"policy {_name(policy)}")
        if only_from is not None and policy.state is not only_from:
            raise InvalidTransition(f"policy {alias}@{version} is {policy.state} by now, not {only_from}")
        _check_newer(policy, serving.live)
        with self._decide(alias, serving) as connection:
            for old in (serving.holdback, serving.live, serving.ramp):
                keeps = old is serving.anchor and holdback > 0
                is_older_ramp = old is serving.ramp and old is not None and old.version > version
                if old is None or old.version == version or is_older_ramp:
                    continue
                change_state(connection, old, PolicyState.HOLDBACK if keeps else PolicyState.RETIRED, None,
                             holdback if keeps else None)  # fmt: skip
            change_state(connection, policy, PolicyState.LIVE, evidence)
            record_serving(connection, policy, PolicyAction.PROMOTE, by, reason, evidence)
        return self.get(alias, version)

    def move_anchor(self, alias: str, evidence: Evidence, *, by: str, reason: str) -> Policy:
        """Make the live version the anchor: nothing is held back any more. Raises InvalidTransition if nothing is."""
        serving = self.serving_of(alias)
        if serving.live is None or serving.holdback is None:
            raise InvalidTransition(f"no version of {alias} is held back: the live version is the anchor already")
        with self._decide(alias, serving) as connection:
            change_state(connection, serving.holdback, PolicyState.RETIRED, None)
            recorded = {**evidence, "before": serving.holdback.version}
            record_serving(connection, serving.live, PolicyAction.ANCHOR, by, reason, recorded)
        return self.get(alias, serving.live.version)

    def roll_back(
        self, alias: str, version: int, evidence: Evidence, *, by: str, reason: str, now: bool = False
    ) -> list[Policy]:
        """Make an earlier version live, if it is not, and reject all later ones; return the rejected ones.

        With `now`, open trajectories of all later versions go on with the live one; else they finish on theirs. Each
        version taken back has a decision, as has each of those that are recalled if all were rejected before. Raises
        InvalidTransition if the live version is older or there is nothing to reject, RecordNotFound.
        """
        target, serving = self._usable(alias, version), self.serving_of(alias)
        if serving.live is not None and serving.live.version < version:
            raise InvalidTransition(
                f"{alias}@{version} is newer than {serving.live.version}, the live one: promote it instead"
            )
        rejected: list[Policy] = []
        with self._decide(alias, serving) as connection:
            # Again until there are none: a round that was about to commit may have added one meanwhile.
            while later := _later(connection, alias, version):
                for policy in later:
                    change_state(connection, policy, PolicyState.REJECTED, evidence)
                rejected += later
            recalled = _recall(connection, alias, version) if now else []
            if not rejected and not recalled:
                raise InvalidTransition(f"{alias}@{version} is the newest version: there is nothing to roll back")
            if target.state is not PolicyState.LIVE:
                change_state(connection, target, PolicyState.LIVE, None)
            for policy in rejected or recalled:
                record_serving(connection, policy, PolicyAction.ROLLBACK, by, reason, evidence)
            if target.state is not PolicyState.LIVE:
                words = f"rolled back to, from {max(policy.version for policy in rejected)}: {reason}"
                record_serving(connection, target, PolicyAction.PROMOTE, by, words, {})
        return [self.get(alias, policy.version) for policy in rejected]

    def pin(self, alias: str, version: int, *, by: str, reason: str) -> Policy:
        """Let the live version serve all new trajectories until `unpin`: nothing is released or rolled back.

        A version in its ramp and one held back are retired. Raises InvalidTransition if the version is not live.
        """
        policy, serving = self.get(alias, version), self.serving_of(alias)
        if policy.state is not PolicyState.LIVE:
            raise InvalidTransition(
                f"{alias}@{version} is {policy.state}, and only the live version can be pinned: promote it, or roll "
                "back to it, and pin it then"
            )
        with self._decide(alias, serving) as connection:
            for other in (serving.holdback, serving.ramp):
                if other is not None:
                    change_state(connection, other, PolicyState.RETIRED, None)
            _set_pinned(connection, policy, time.time())
            record_serving(connection, policy, PolicyAction.PIN, by, reason, {})
        return self.get(alias, version)

    def unpin(self, alias: str, version: int | None = None, *, by: str, reason: str) -> Policy:
        """Let the release go on after `pin`. Raises InvalidTransition if no version, or not this one, is pinned."""
        serving = self.serving_of(alias)
        if serving.live is None or serving.live.pinned_at is None:
            raise InvalidTransition(f"no version of {alias} is pinned")
        if version not in (None, serving.live.version):
            raise InvalidTransition(f"{alias}@{version} is not pinned, but {alias}@{serving.live.version} is")
        with self._decide(alias, serving, unpins=True) as connection:
            _set_pinned(connection, serving.live, None)
            record_serving(connection, serving.live, PolicyAction.UNPIN, by, reason, {})
        return self.get(alias, serving.live.version)

    @contextmanager
    def _decide(self, alias: str, before: ServingVersions, *, unpins: bool = False) -> Iterator[sa.Connection]:
        """Open the transaction of a decision that was made on `before`.

        Raises InvalidTransition if others serve now, or the live version would be left without a share.
        """
        live = before.live
        if live is not None and live.pinned_at is not None and not unpins:
            raise InvalidTransition(f"{alias}@{live.version} is pinned: run `ratchet policies unpin {alias}` first")
        try:
            with write(self._engine) as connection:
                if list(map(_place, locked(connection, alias))) != list(map(_place, before)):
                    raise InvalidTransition(f"the versions of {alias} were changed by another process: look again")
                yield connection
                check_shares(connection, alias)
        except IntegrityError as taken:  # another process let a version serve meanwhile
            raise InvalidTransition(f"the versions of {alias} were changed by another process: look again") from taken


def change_state(
    connection: sa.Connection,
    policy: Policy,
    state: PolicyState,
    evidence: Evidence | None,
    share: float | None = None,
) -> None:
    """Change a version's state and share. Raises InvalidTransition if it is in another state by now."""
    table = schema.policies
    one = sa.and_(table.c.alias == policy.alias, table.c.version == policy.version, table.c.state == policy.state)
    merged = dict(policy.evidence) | dict(evidence or {})
    values = {"state": state, "evidence": merged, "share": share, "recalled_at": None}
    changed = connection.execute(sa.update(table).where(one).values(**values))
    if not changed.rowcount:
        raise InvalidTransition(f"policy {_name(policy)} was changed by another process")


def record_serving(
    connection: sa.Connection, policy: Policy, action: PolicyAction, by: str, reason: str, evidence: Evidence
) -> None:
    """Record a decision, with the shares in force after it."""
    shares = shares_in_force(filter(None, locked(connection, policy.alias)))
    record_decision(connection, policy.alias, policy.version, action, by, reason, {**evidence, "shares": shares})


def _place(policy: Policy | None) -> tuple[object, ...] | None:
    return None if policy is None else (policy.version, policy.state, policy.share, policy.pinned_at)


def _later(connection: sa.Connection, alias: str, version: int) -> Sequence[Policy]:
    table = schema.policies
    later = sa.and_(table.c.alias == alias, table.c.version > version, table.c.state != PolicyState.REJECTED)
    query = sa.select(table).where(later).order_by(table.c.version).with_for_update()
    return [row_to(Policy, row) for row in connection.execute(query)]


def _recall(connection: sa.Connection, alias: str, version: int) -> Sequence[Policy]:
    """Move the open trajectories of the later versions, all rejected, to the live one; return the versions."""
    table = schema.policies
    later = sa.and_(table.c.alias == alias, table.c.version > version, table.c.recalled_at.is_(None))
    found = connection.execute(sa.select(table).where(later).order_by(table.c.version).with_for_update()).all()
    connection.execute(sa.update(table).where(later).values(recalled_at=time.time()))
    return [row_to(Policy, row) for row in found]


def _set_pinned(connection: sa.Connection, policy: Policy, at: float | None) -> None:
    table = schema.policies
    one = sa.and_(table.c.alias == policy.alias, table.c.version == policy.version)
    connection.execute(sa.update(table).where(one).values(pinned_at=at))


def _check_share(policy: Policy, share: float) -> None:
    if not 0.0 < share < 1.0:
        raise InvalidTransition(f"policy {_name(policy)}: a share is between 0 and 1, not {share:g}")


def _check_newer(policy: Policy, live: Policy | None) -> None:
    if live is not None and policy.version < live.version:
        raise InvalidTransition(
            f"{policy.alias}@{policy.version} is older than {live.version}, the live version: roll back to it instead, "
            "which also rejects the versions after it"
        )


def _name(policy: Policy) -> str:
    return f"{policy.alias}@{policy.version}"
