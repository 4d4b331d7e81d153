"""Which versions of an alias serve: reads, registration, shares of new trajectories, and the decisions on them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.errors import InvalidRecord, InvalidTransition, RecordNotFound
from ratchet.store.policies.base_models import base_model_id_of
from ratchet.store.records import BASE_VERSION, Decision, Policy, row_to
from ratchet.store.states import POLICY_TRANSITIONS, SERVING, PolicyAction, PolicyState, check_transition

# The versions of an alias that serve new trajectories, and their shares.

HOLDBACK_SHARE = 0.1  # of the anchor, unless a decision says otherwise


class ServingVersions(NamedTuple):
    """The versions of an alias that serve new trajectories."""

    holdback: Policy | None
    live: Policy | None
    ramp: Policy | None

    @property
    def anchor(self) -> Policy | None:
        """The version that newer ones are compared with."""
        return self.holdback or self.live


def shares_in_force(serving: Iterable[Policy]) -> dict[int, float]:
    """Return the share of each serving version of one alias, by version; the live version has what the others leave."""
    serving = sorted(serving, key=lambda policy: policy.version)
    shares = {policy.version: policy.share or 0.0 for policy in serving}
    rest = round(1.0 - sum(shares.values()), 12)
    return shares | {policy.version: rest for policy in serving if policy.state is PolicyState.LIVE}


def check_shares(connection: sa.Connection, alias: str) -> None:
    """Raise InvalidTransition unless each share is between 0 and 1 and the live version has some of them."""
    shares = shares_in_force(filter(None, locked(connection, alias)))
    if wrong := [f"{alias}@{version}: {share:g}" for version, share in shares.items() if not 0.0 < share <= 1.0]:
        raise InvalidTransition(f"shares lie between 0 and 1 and leave some for the live version: {', '.join(wrong)}")


def locked(connection: sa.Connection, alias: str) -> ServingVersions:
    """Return the versions that serve, locked until the transaction ends."""
    table = schema.policies
    query = sa.select(table).where(matches(table, alias=alias, state=SERVING)).order_by(table.c.version)
    query = query.with_for_update()
    found = {row.state: row_to(Policy, row) for row in connection.execute(query)}
    return ServingVersions(*(found.get(state) for state in SERVING))


# Decisions about policy versions, with their author and evidence. Only added.
#
# The transaction that carries out a decision also records it (policies.py), so that every change of a version has one.


class Decisions(Verbs):
    def decisions_of(self, alias: str, version: int | None = None, limit: int = 100) -> list[Decision]:
        """Return the decisions about an alias, or about one version of it, newest first."""
        table = schema.decisions
        query = sa.select(table).where(matches(table, alias=alias, version=version)).order_by(table.c.id.desc())
        return self._records(Decision, query.limit(limit))

    def decisions_after(self, alias: str, decision_id: int, limit: int = 1000) -> list[Decision]:
        """Return the decisions about an alias after an id, oldest first; 0: from the first one."""
        table = schema.decisions
        query = sa.select(table).where(table.c.alias == alias, table.c.id > decision_id).order_by(table.c.id)
        return self._records(Decision, query.limit(limit))

    def counts(self, alias: str) -> dict[PolicyAction, int]:
        """Return the number of decisions about an alias by action."""
        table = schema.decisions
        query = sa.select(table.c.action, sa.func.count()).where(table.c.alias == alias).group_by(table.c.action)
        return {PolicyAction(action): int(count) for action, count in self._rows(query)}

    def latest(self, alias: str | None = None) -> dict[tuple[str, int], Decision]:
        """Return the newest decision about each (alias, version)."""
        table = schema.decisions
        newest = sa.select(sa.func.max(table.c.id)).group_by(table.c.alias, table.c.version)
        query = sa.select(table).where(table.c.id.in_(newest), matches(table, alias=alias or None))
        return {(one.alias, one.version): one for one in self._records(Decision, query)}


def record_decision(
    connection: sa.Connection,
    alias: str,
    version: int,
    action: PolicyAction,
    by: str,
    reason: str,
    evidence: Mapping[str, Any],
) -> None:
    """Add a decision in the caller's transaction."""
    row = {"alias": alias, "version": version, "action": action, "decided_by": by, "reason": reason}
    row |= {"evidence": dict(evidence), "decided_at": time.time()}
    connection.execute(sa.insert(schema.decisions).values(**row))


# Policy versions: what is served, what waits for a person, one version or all; their registration, and where they are
# served.

# Built once: every proxy asks for it five times a second.
_SERVING = (
    sa.select(schema.policies)
    .where(sa.or_(*(schema.policies.c.state == state for state in SERVING)))
    .order_by(schema.policies.c.alias, schema.policies.c.version)
)


class PolicyVersions(Verbs):
    """The versions of an alias: queries, and operations that add versions."""

    def serving(self) -> list[Policy]:
        """Return the versions of every alias that serve new trajectories."""
        return self._records(Policy, _SERVING)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of versions by alias and state."""
        table = schema.policies
        query = sa.select(table.c.alias, table.c.state, sa.func.count()).group_by(table.c.alias, table.c.state)
        found: dict[str, dict[str, int]] = {}
        for alias, state, count in self._rows(query):
            found.setdefault(alias, {})[state] = int(count)
        return found

    def live(self) -> dict[str, Policy]:
        """Return the live version of every alias."""
        return {policy.alias: policy for policy in self._select(schema.policies.c.state == PolicyState.LIVE)}

    def awaiting_approval(self, alias: str) -> Policy | None:
        """Return the candidate or version in its ramp whose newest decision is a hold: only a person may promote it."""
        table, decisions = schema.policies, schema.decisions
        newest = sa.select(sa.func.max(decisions.c.id)).where(decisions.c.alias == alias).group_by(decisions.c.version)
        held = sa.exists().where(
            table.c.version == decisions.c.version, decisions.c.id.in_(newest), decisions.c.action == PolicyAction.HOLD
        )
        undecided = matches(table, alias=alias, state=(PolicyState.CANDIDATE, PolicyState.RAMP))
        found = self._select(sa.and_(undecided, held))
        return found[-1] if found else None

    def list_unproven(self, alias: str) -> list[Policy]:
        """Return the unproven versions that are newer than the live one."""
        table = schema.policies
        live = sa.select(table.c.version).where(matches(table, alias=alias, state=PolicyState.LIVE))
        newer = table.c.version > sa.func.coalesce(live.scalar_subquery(), BASE_VERSION)
        return self._select(sa.and_(matches(table, alias=alias, state=PolicyState.UNPROVEN), newer))

    def get(self, alias: str, version: int) -> Policy:
        """Return a version. Raises RecordNotFound."""
        query = sa.select(schema.policies).where(matches(schema.policies, alias=alias, version=version))
        return self._one(Policy, query, f"no policy {alias}@{version}")

    def all(self, alias: str | None = None) -> list[Policy]:
        """Return all versions, of one alias or of all, oldest first."""
        return self._select(matches(schema.policies, alias=alias or None))

    def _usable(self, alias: str, version: int) -> Policy:
        policy = self.get(alias, version)
        if policy.pruned_at is not None:
            raise InvalidTransition(f"{alias}@{version} cannot serve again: its folder was pruned")
        return policy

    def _why_rejected(self, alias: str, version: int) -> str:
        table = schema.decisions
        mine = matches(table, alias=alias, version=version, action=(PolicyAction.REJECT, PolicyAction.ROLLBACK))
        query = sa.select(table.c.decided_by, table.c.reason).where(mine).order_by(table.c.id.desc()).limit(1)
        return "".join(f" by {person} ({reason})" for person, reason in self._rows(query))

    def _select(self, where: sa.ColumnElement[bool]) -> list[Policy]:
        table = schema.policies
        return self._records(Policy, sa.select(table).where(where).order_by(table.c.alias, table.c.version))

    def register_base(self, alias: str, served_name: str) -> Policy:
        """Register version 0 of an alias: the base model that vLLM serves as `served_name`.

        It is live until another version is. Registering again updates the served name only. Raises InvalidRecord if
        the store has versions of an agent whose name differs by case only.
        """
        table = schema.policies
        base = sa.and_(table.c.alias == alias, table.c.adapter.is_(None))  # version 0 and its prompt versions
        with write(self._engine) as connection:
            _check_case(connection, alias)
            row = {"alias": alias, "version": BASE_VERSION, "state": PolicyState.LIVE, "served_name": served_name}
            insert_or_ignore(connection, table, [{**row, "created_at": time.time(), "evidence": {}}])
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

        With a `share`, its ramp begins at once. Raises RecordNotFound, and InvalidTransition if the live version has
        this prompt or is pinned, no version is live, or another one is in its ramp.
        """
        table = schema.policies
        with write(self._engine) as connection:
            live = _lock_live(connection, alias)
            if share is not None and live.pinned_at is not None:
                raise InvalidTransition(f"{alias}@{live.version} is pinned: `ratchet policies unpin {alias}` first")
            _check_prompt(connection, alias, live, prompt_id)
            row = {
                "alias": alias,
                "state": PolicyState.CANDIDATE if share is None else PolicyState.RAMP,
                "share": share,
                "served_name": live.served_name,
                "adapter": live.adapter,
                "replicas": list(live.replicas),
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
                    f"{alias}@{version} was made by another process, or another version is in its ramp"
                ) from taken
            if share is not None:
                check_shares(connection, alias)
                recorded = {**evidence, "share": share}
                record_decision(connection, alias, version, PolicyAction.RAMP, by, reason, recorded)
        return self.get(alias, version)

    def adopt_prompt(self, alias: str, version: int) -> Policy:
        """Give a candidate the prompt of the live version.

        Raises InvalidTransition if it is no longer a candidate, or no version is live.
        """
        table = schema.policies
        mine = matches(table, alias=alias, version=version, state=PolicyState.CANDIDATE)
        with write(self._engine) as connection:
            change = sa.update(table).where(mine).values(prompt_id=_lock_live(connection, alias).prompt_id)
            if not connection.execute(change).rowcount:
                raise InvalidTransition(f"{alias}@{version} is no longer a candidate")
        return self.get(alias, version)

    def record_replicas(self, alias: str, served_name: str, replicas: Sequence[str]) -> None:
        """Record the URLs of the replicas that serve the versions with this served name as they were trained."""
        mine = matches(schema.policies, alias=alias, served_name=served_name)
        self._change(sa.update(schema.policies).where(mine).values(replicas=list(replicas)))


def _check_case(connection: sa.Connection, alias: str) -> None:
    """Raise InvalidRecord if another agent has versions under this name in another case."""
    table = schema.policies
    others = connection.scalars(sa.select(table.c.alias).where(table.c.version > BASE_VERSION).distinct())
    for other in others:
        if other != alias and other.casefold() == alias.casefold():
            raise InvalidRecord(
                f"agent {alias}: the store has versions of {other}, whose name differs by case only; name it {other} "
                "to go on with them, or choose another name"
            )


def _lock_live(connection: sa.Connection, alias: str) -> Any:
    """Return the row of the live version, locked until the transaction ends. Raises InvalidTransition."""
    table = schema.policies
    live = sa.select(table).where(matches(table, alias=alias, state=PolicyState.LIVE)).with_for_update()
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


# Decisions about which versions serve: ramp, promotion, anchor, shares, rollback and pins.
#
# An alias has one live version, at most one in its ramp, which is newer, and at most one held back, which is older: the
# anchor. Each decision is one transaction that also records it, with the shares in force afterwards. Of two concurrent
# decisions, the later fails with InvalidTransition. While a version is pinned, only `unpin` changes what serves.

Evidence = Mapping[str, Any]


class ServingDecisions(PolicyVersions):
    """Operations that change which versions serve."""

    def serving_of(self, alias: str) -> ServingVersions:
        """Return the versions of an alias that serve new trajectories."""
        table = schema.policies
        found = {policy.state: policy for policy in self._select(matches(table, alias=alias, state=SERVING))}
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
    one = matches(table, alias=policy.alias, version=policy.version, state=policy.state)
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
    one = matches(table, alias=policy.alias, version=policy.version)
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
