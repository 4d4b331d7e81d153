"""Policies: the versions of an alias, and the decisions that change them.

An alias has at most one live version and one canary. A promotion retires the old version, a rollback rejects all later
ones; both record the decision with its evidence in the same transaction. Of two concurrent decisions, the later fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.policies.base_models import base_model_id_of
from ratchet.store.policies.decisions import record_decision
from ratchet.store.policies.policy_reads import PolicyReads
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import POLICY_TRANSITIONS, PolicyAction, PolicyState, check_transition


class Policies(PolicyReads):
    """Operations on policy versions."""

    def register_base(self, alias: str, served_name: str) -> Policy:
        """Register version 0 of an alias: the base model that vLLM serves as `served_name`.

        It is live until another version is. Registering again updates the served name only.
        """
        table = schema.policies
        base = sa.and_(table.c.alias == alias, table.c.adapter.is_(None))  # version 0 and its prompt versions
        with write(self._engine) as connection:
            insert_or_ignore(
                connection,
                table,
                [
                    {
                        "alias": alias,
                        "version": BASE_VERSION,
                        "state": PolicyState.LIVE,
                        "served_name": served_name,
                        "adapter": None,
                        "created_at": time.time(),
                        "evidence": {},
                    }
                ],
            )
            connection.execute(sa.update(table).where(base).values(served_name=served_name))
        return self.get(alias, BASE_VERSION)

    def register_prompt_version(
        self,
        alias: str,
        prompt_id: str | None,
        evidence: Mapping[str, Any],
        *,
        share: float | None = None,
        by: str = "tuner",
        reason: str = "a prompt on trial",
    ) -> Policy:
        """Register a candidate: the live version with another prompt, or with None.

        With a `share`, it is a canary at once. Raises RecordNotFound, and InvalidTransition if the live version has
        this prompt, no version is live, or there is a canary.
        """
        table = schema.policies
        with write(self._engine) as connection:
            live = _lock_live(connection, alias)
            _check_prompt(connection, alias, live, prompt_id)
            row = {
                "alias": alias,
                "state": PolicyState.CANDIDATE if share is None else PolicyState.CANARY,
                "canary_share": share,
                "served_name": live.served_name,
                "adapter": live.adapter,
                "prompt_id": prompt_id,
                "created_at": time.time(),
                "evidence": dict(evidence),
                "base_model_id": base_model_id_of(alias),
            }
            newest = connection.scalar(sa.select(sa.func.max(table.c.version)).where(table.c.alias == alias))
            version = int(newest or 0) + 1
            try:
                connection.execute(sa.insert(table).values(version=version, **row))
            except IntegrityError as taken:
                raise InvalidTransition(
                    f"{alias}@{version} was made by another process, or there is a canary that is not decided"
                ) from taken
            if share is not None:
                recorded = {**evidence, "share": share}
                record_decision(connection, alias, version, PolicyAction.CANARY, by, reason, recorded)
        return self.get(alias, version)

    def adopt_prompt(self, alias: str, version: int) -> Policy:
        """Give a candidate the prompt of the live version.

        Raises InvalidTransition if it is no longer a candidate, or no version is live.
        """
        table = schema.policies
        mine = sa.and_(table.c.alias == alias, table.c.version == version, table.c.state == PolicyState.CANDIDATE)
        with write(self._engine) as connection:
            change = sa.update(table).where(mine).values(prompt_id=_lock_live(connection, alias).prompt_id)
            if not connection.execute(change).rowcount:
                raise InvalidTransition(f"{alias}@{version} is no longer a candidate")
        return self.get(alias, version)

    def promote(
        self,
        alias: str,
        version: int,
        evidence: Mapping[str, Any],
        *,
        only_from: PolicyState | None = None,
        by: str = "proof",
        reason: str = "proven",
    ) -> Policy:
        """Make a version live and retire the old one; with `only_from`, only if the version is in that state.

        Raises InvalidTransition, RecordNotFound.
        """
        policy = self._usable(alias, version)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.LIVE, f"policy {alias}@{version}")
        if only_from is not None and policy.state is not only_from:
            raise InvalidTransition(f"policy {alias}@{version} is {policy.state} by now, not {only_from}")
        old = self.live().get(alias)
        _check_newer(policy, old)
        with write(self._engine) as connection:
            if old is not None:
                _change_state(connection, old, PolicyState.RETIRED, {})
            _change_state(connection, policy, PolicyState.LIVE, evidence)
            record_decision(connection, alias, version, PolicyAction.PROMOTE, by, reason, evidence)
        return self.get(alias, version)

    def start_canary(
        self,
        alias: str,
        version: int,
        share: float,
        evidence: Mapping[str, Any] | None = None,
        *,
        by: str = "release",
        reason: str = "proven",
    ) -> Policy:
        """Let a candidate serve a share of new trajectories (between 0 and 1), or change a canary's share.

        Raises InvalidTransition if the alias has another canary, or a newer version is live, RecordNotFound.
        """
        if not 0.0 < share < 1.0:
            raise InvalidTransition(f"policy {alias}@{version}: a canary's share is between 0 and 1, not {share:g}")
        policy = self._usable(alias, version)
        if policy.state != PolicyState.CANARY:
            check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.CANARY, f"policy {alias}@{version}")
            _check_newer(policy, self.live().get(alias))
        serving = [found for found in self.serving() if found.alias == alias and found.version != version]
        if other := next((found.version for found in serving if found.state == PolicyState.CANARY), None):
            raise InvalidTransition(
                f"{alias}@{other} is a canary already: promote or reject it before {alias}@{version}"
            )
        with write(self._engine) as connection:
            _change_state(connection, policy, PolicyState.CANARY, evidence or {}, share)
            recorded = {**(evidence or {}), "share": share}
            record_decision(connection, alias, version, PolicyAction.CANARY, by, reason, recorded)
        return self.get(alias, version)

    def require_approval(self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str, reason: str) -> None:
        """Record that only a person may promote this version; its state stays. Raises RecordNotFound."""
        self.get(alias, version)
        with write(self._engine) as connection:
            record_decision(connection, alias, version, PolicyAction.HOLD, by, reason, evidence)

    def mark_unproven(self, alias: str, version: int, evidence: Mapping[str, Any], *, reason: str) -> Policy:
        """Mark a candidate whose proof could not decide: it serves nobody, and training continues from it.

        Raises InvalidTransition, RecordNotFound.
        """
        policy = self.get(alias, version)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.UNPROVEN, f"policy {alias}@{version}")
        with write(self._engine) as connection:
            _change_state(connection, policy, PolicyState.UNPROVEN, evidence)
            record_decision(connection, alias, version, PolicyAction.UNPROVEN, "proof", reason, evidence)
        return self.get(alias, version)

    def reject(
        self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str = "proof", reason: str = "rejected"
    ) -> Policy:
        """Reject a version. Raises InvalidTransition, RecordNotFound."""
        policy = self.get(alias, version)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.REJECTED, f"policy {alias}@{version}")
        with write(self._engine) as connection:
            _change_state(connection, policy, PolicyState.REJECTED, evidence)
            record_decision(connection, alias, version, PolicyAction.REJECT, by, reason, evidence)
        return self.get(alias, version)

    def roll_back(self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str, reason: str) -> list[Policy]:
        """Make an earlier version live, if it is not, and reject all later ones; return the rejected ones.

        Raises InvalidTransition if the live version is older or there is nothing to reject, RecordNotFound.
        """
        target, live = self._usable(alias, version), self.live().get(alias)
        if live is not None and live.version < version:
            raise InvalidTransition(f"{alias}@{version} is newer than {live.version}, the live one: promote it instead")
        later = [p for p in self.all(alias) if p.version > version and p.state is not PolicyState.REJECTED]
        if not later:
            raise InvalidTransition(f"{alias}@{version} is the newest version: there is nothing to roll back")
        with write(self._engine) as connection:
            for policy in later:
                _change_state(connection, policy, PolicyState.REJECTED, evidence)
                record_decision(connection, alias, policy.version, PolicyAction.ROLLBACK, by, reason, evidence)
            if target.state is not PolicyState.LIVE:
                _change_state(connection, target, PolicyState.LIVE, {})
                words = f"rolled back to, from {max(p.version for p in later)}: {reason}"
                record_decision(connection, alias, version, PolicyAction.PROMOTE, by, words, {})
        return [self.get(alias, policy.version) for policy in later]

    def promote_manually(
        self, alias: str, version: int | None, *, by: str, reason: str, rejected: bool = False
    ) -> Policy:
        """Promote the named version, else the canary, else the version that awaits approval.

        A rejected version is promoted only with `rejected`. Raises InvalidTransition, RecordNotFound.
        """
        if version is None:
            canary = next((p for p in self.all(alias) if p.state is PolicyState.CANARY), None)
            chosen = canary or self.awaiting_approval(alias)
            if chosen is None:
                raise InvalidTransition(f"{alias} has no canary that could be promoted: name the version")
            version = chosen.version
        if not rejected and self.get(alias, version).state is PolicyState.REJECTED:
            raise InvalidTransition(
                f"{alias}@{version} was rejected{self._why_rejected(alias, version)}: promote it nevertheless "
                "with --rejected (in the API: `rejected: true`)"
            )
        return self.promote(alias, version, {}, by=by, reason=reason)

    def roll_back_manually(self, alias: str, version: int | None, *, by: str, reason: str) -> list[Policy]:
        """Roll back to the named version; else reject the canary or the version that awaits approval; else go back one.

        Raises InvalidTransition, RecordNotFound.
        """
        return self.roll_back(alias, self._before(alias) if version is None else version, {}, by=by, reason=reason)

    def _before(self, alias: str) -> int:
        known = self.all(alias)
        live = next((policy for policy in known if policy.state is PolicyState.LIVE), None)
        if live is None:
            raise RecordNotFound(f"{alias} has no live version")
        if any(policy.state is PolicyState.CANARY for policy in known) or self.awaiting_approval(alias):
            return live.version
        older = [p.version for p in known if p.state is PolicyState.RETIRED and p.version < live.version]
        if not older:
            raise InvalidTransition(f"{alias}@{live.version} is live and has no predecessor")
        return older[-1]

    def prune(self, alias: str, version: int, now: float) -> Policy:
        """Record that a version's folder is about to be deleted, for all versions that share it.

        Raises InvalidTransition if one of them is in use.
        """
        table, other = schema.policies, schema.policies.alias("other")
        named = sa.select(table.c.adapter).where(table.c.alias == alias, table.c.version == version).scalar_subquery()
        in_use = sa.exists().where(
            other.c.alias == alias,
            other.c.adapter == named,
            other.c.state.not_in((PolicyState.RETIRED, PolicyState.REJECTED, PolicyState.UNPROVEN)),
        )
        sharing = sa.and_(table.c.alias == alias, table.c.adapter == named, ~in_use)
        with write(self._engine) as connection:
            if not connection.execute(sa.update(table).where(sharing).values(pruned_at=now)).rowcount:
                raise InvalidTransition(f"{alias}@{version} is in use and cannot be pruned")
        return self.get(alias, version)


def _lock_live(connection: sa.Connection, alias: str) -> Any:
    """Return the row of the live version, locked until the transaction ends. Raises InvalidTransition."""
    table = schema.policies
    live = sa.select(table).where(table.c.alias == alias, table.c.state == PolicyState.LIVE).with_for_update()
    for _ in range(2):  # PostgreSQL returns no row if it waited for one that was retired meanwhile
        if (row := connection.execute(live).one_or_none()) is not None:
            return row
    raise InvalidTransition(f"alias {alias} has no live version: start `ratchet proxy` first")


def _check_prompt(connection: sa.Connection, alias: str, live: Any, prompt_id: str | None) -> None:
    if live.prompt_id == prompt_id:
        raise InvalidTransition(f"{alias}@{live.version} is live and has prompt {prompt_id or '(none)'} already")
    if prompt_id is None and live.adapter is None:
        raise InvalidTransition(f"{alias} without a prompt is the base model: roll back to {alias}@{BASE_VERSION}")
    known = sa.select(schema.prompts.c.id).where(schema.prompts.c.id == prompt_id)
    if prompt_id is not None and connection.scalar(known) is None:
        raise RecordNotFound(f"no prompt {prompt_id}")


def _check_newer(policy: Policy, live: Policy | None) -> None:
    if live is not None and policy.version < live.version:
        raise InvalidTransition(
            f"{policy.alias}@{policy.version} is older than {live.version}, the live version: roll back to it instead, "
            "which also rejects the versions after it"
        )


def _change_state(
    connection: sa.Connection,
    policy: Policy,
    state: PolicyState,
    evidence: Mapping[str, Any],
    share: float | None = None,
) -> None:
    table = schema.policies
    one = sa.and_(table.c.alias == policy.alias, table.c.version == policy.version, table.c.state == policy.state)
    settled = connection.execute(
        sa.update(table)
        .where(one)
        .values(state=state, evidence=dict(policy.evidence) | dict(evidence), canary_share=share)
    )
    if not settled.rowcount:
        raise InvalidTransition(f"policy {policy.alias}@{policy.version} was changed by another process")
