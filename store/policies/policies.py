"""Prompts, and the versions of each alias: changes of state, and forks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.errors import InvalidRecord, InvalidTransition, RecordNotFound
from ratchet.store.policies.serving import (
    HOLDBACK_SHARE,
    ServingDecisions,
    change_state,
    record_decision,
    record_serving,
)
from ratchet.store.records import BASE_VERSION, Policy, Prompt
from ratchet.store.states import POLICY_TRANSITIONS, PolicyAction, PolicyState, PromptMode, RoundState, check_transition

# Prompts: system prompts that the proxy applies, identified by their content and immutable.
#
# A policy version or a rollout that names a prompt is served with it.

MAX_CHARS = 200_000  # of all texts of a prompt


class Prompts(Verbs):
    def register(
        self, text: str, mode: str = "replace", origin: str = "", families: Mapping[str, str] | None = None
    ) -> Prompt:
        """Store a prompt unless it exists; return it. Raises InvalidRecord.

        `families`: texts by task family; calls with an empty text are unchanged.
        """
        _check(text, mode, families or {})
        texts = dict(families or {})
        prompt = Prompt(
            id=prompt_id(mode, text, texts),
            mode=PromptMode(mode),
            text=text,
            families=texts,
            origin=origin.replace("\0", "\ufffd"),
            created_at=time.time(),
        )
        with write(self._engine) as connection:
            insert_or_ignore(connection, schema.prompts, [msgspec.structs.asdict(prompt)])
        return self.get(prompt.id)

    def get(self, prompt_id: str) -> Prompt:
        """Return a prompt. Raises RecordNotFound."""
        query = sa.select(schema.prompts).where(schema.prompts.c.id == prompt_id)
        return self._one(Prompt, query, f"no prompt {prompt_id}")


def prompt_id(mode: str, text: str, families: Mapping[str, str]) -> str:
    """Return the id of a prompt: `prm_` and the first 8 bytes of a BLAKE2b hash as hex."""
    content = msgspec.json.encode([mode, text, sorted(families.items())])
    return f"prm_{blake2b(content, digest_size=8).hexdigest()}"


def _check(text: str, mode: str, families: Mapping[str, str]) -> None:
    if mode not in list(PromptMode):
        raise InvalidRecord(f"prompt mode {mode!r}: use {' or '.join(PromptMode)}")
    texts = [text, *families.values()]
    if not any(one.strip() for one in texts):
        raise InvalidRecord("the prompt's text is empty: give a text")
    if (size := sum(map(len, texts))) > MAX_CHARS:
        raise InvalidRecord(f"the prompt's text has {size} characters, at most {MAX_CHARS} are allowed: shorten it")
    for one in (*texts, *families):
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(f"the prompt's text is not valid Unicode: {error.reason}") from error
        if "\0" in one:
            raise InvalidRecord("the prompt's text holds a NUL character: remove it")


# Policy versions of each alias: changes of state, and forks.

# Forks: which version of which agent a version is a copy of. A fork is recorded by the round that committed it.

FORKED_FROM = "forked_from"  # in the metrics of the round

Version = tuple[str, int]  # alias, number


def forks(connection: sa.Connection) -> dict[Version, Version]:
    """Return the version that each forked version is a copy of."""
    rounds = schema.rounds
    adopted = sa.select(rounds.c.alias, rounds.c.to_version, rounds.c.metrics).where(
        rounds.c.state == RoundState.COMMITTED, rounds.c.reason.is_not(None)
    )
    origins = ((row, row.metrics.get(FORKED_FROM)) for row in connection.execute(adopted))
    return {(row.alias, row.to_version): (one["alias"], one["version"]) for row, one in origins if one}


# Policies: the versions of an alias, and the decisions that change them.
#
# `serving.py` decides which versions serve; here are the decisions about the others, those of people, and pruning. Each
# decision is recorded with its evidence in the same transaction.


class Policies(ServingDecisions):
    """Operations on policy versions."""

    def require_approval(self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str, reason: str) -> None:
        """Record that only a person may promote this version; its state stays. Raises RecordNotFound."""
        self.get(alias, version)
        with write(self._engine) as connection:
            record_decision(connection, alias, version, PolicyAction.HOLD, by, reason, evidence)

    def skip(self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str, reason: str) -> Policy:
        """Retire a candidate that a newer version replaces: it serves nobody, and training continues from it or later.

        Raises InvalidTransition, RecordNotFound.
        """
        policy = self.get(alias, version)
        if policy.state is not PolicyState.CANDIDATE:
            raise InvalidTransition(f"policy {alias}@{version} is {policy.state}, and only a candidate can be skipped")
        with write(self._engine) as connection:
            change_state(connection, policy, PolicyState.RETIRED, evidence)
            record_decision(connection, alias, version, PolicyAction.SKIP, by, reason, evidence)
        return self.get(alias, version)

    def mark_unproven(self, alias: str, version: int, evidence: Mapping[str, Any], *, reason: str) -> Policy:
        """Mark a candidate whose proof could not decide: it serves nobody, and training continues from it.

        Raises InvalidTransition, RecordNotFound.
        """
        policy = self.get(alias, version)
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.UNPROVEN, f"policy {alias}@{version}")
        with write(self._engine) as connection:
            change_state(connection, policy, PolicyState.UNPROVEN, evidence)
            record_decision(connection, alias, version, PolicyAction.UNPROVEN, "proof", reason, evidence)
        return self.get(alias, version)

    def reject(
        self, alias: str, version: int, evidence: Mapping[str, Any], *, by: str = "proof", reason: str = "rejected"
    ) -> Policy:
        """Reject a version. Raises InvalidTransition, RecordNotFound."""
        policy = self.get(alias, version)
        if policy.state is PolicyState.LIVE:
            raise InvalidTransition(f"{alias}@{version} is live: roll back to an earlier version, which rejects it")
        check_transition(POLICY_TRANSITIONS, policy.state, PolicyState.REJECTED, f"policy {alias}@{version}")
        with write(self._engine) as connection:
            change_state(connection, policy, PolicyState.REJECTED, evidence)
            record_serving(connection, policy, PolicyAction.REJECT, by, reason, evidence)
        return self.get(alias, version)

    def promote_manually(
        self, alias: str, version: int | None, *, by: str, reason: str, rejected: bool = False,
        verify: Callable[[str], object] = lambda adapter: None,
    ) -> Policy:  # fmt: skip
        """Promote the named version, else the one in its ramp, else the version that awaits approval.

        The anchor keeps its share, or gets one if it loses its place to the version in its ramp. A rejected version is
        promoted only with `rejected`. `verify` raises if the files of an adapter, by its reference, are damaged.
        Raises InvalidTransition, RecordNotFound, and what `verify` raises.
        """
        if version is None:
            chosen = self.serving_of(alias).ramp or self.awaiting_approval(alias)
            if chosen is None:
                raise InvalidTransition(f"{alias} has no version in its ramp that could be promoted: name the version")
            version = chosen.version
        if not rejected and self.get(alias, version).state is PolicyState.REJECTED:
            raise InvalidTransition(
                f"{alias}@{version} was rejected{self._why_rejected(alias, version)}: promote it nevertheless "
                "with --rejected (in the API: `rejected: true`)"
            )
        if (adapter := self.get(alias, version).adapter) is not None:
            verify(adapter)
        holdback, _, ramp = self.serving_of(alias)
        kept = HOLDBACK_SHARE if ramp is not None and ramp.version == version else 0.0
        if holdback is not None:
            kept = holdback.share or 0.0
        return self.promote(alias, version, self._known(alias, version), by=by, reason=reason, holdback=kept)

    def roll_back_manually(
        self, alias: str, version: int | None, *, by: str, reason: str, now: bool = False
    ) -> list[Policy]:
        """Roll back to the named version; else reject the one in its ramp or awaiting approval; else go back one.

        `now`: see `roll_back`. Raises InvalidTransition, RecordNotFound.
        """
        target = self._before(alias) if version is None else version
        _, live, ramp = self.serving_of(alias)
        newest = ramp or live
        evidence = self._known(alias, newest.version) if newest is not None and newest.version > target else {}
        if now:
            evidence["now"] = True
        return self.roll_back(alias, target, evidence, by=by, reason=reason, now=now)

    def hold_manually(self, alias: str, version: int | None, *, by: str, reason: str) -> Policy:
        """Hold the named version, else the one in its ramp, else the newest candidate: only a person promotes it.

        Raises InvalidTransition, RecordNotFound.
        """
        if version is None:
            waiting = [p for p in self.all(alias) if p.state in (PolicyState.RAMP, PolicyState.CANDIDATE)]
            if not waiting:
                raise InvalidTransition(f"{alias} has no version in its ramp and no candidate that could be held")
            version = (self.serving_of(alias).ramp or waiting[-1]).version
        policy = self.get(alias, version)
        if policy.state not in (PolicyState.RAMP, PolicyState.CANDIDATE):
            raise InvalidTransition(
                f"{alias}@{version} is {policy.state}, and only a candidate or a version in its ramp can be held"
            )
        self.require_approval(alias, version, self._known(alias, version), by=by, reason=reason)
        return policy

    def pin_manually(self, alias: str, version: int | None, *, by: str, reason: str) -> Policy:
        """Pin the named version, else the live one. Raises InvalidTransition, RecordNotFound."""
        if version is None:
            live = self.serving_of(alias).live
            if live is None:
                raise RecordNotFound(f"{alias} has no live version")
            version = live.version
        return self.pin(alias, version, by=by, reason=reason)

    def _known(self, alias: str, version: int) -> dict[str, Any]:
        """Return the newest evidence about a version, to be kept with a person's decision; empty without any."""
        table = schema.releases
        found = self._value(sa.select(table.c.evidence).where(matches(table, alias=alias, version=version)))
        return {"known": found} if found else {}

    def _before(self, alias: str) -> int:
        serving = self.serving_of(alias)
        if serving.live is None:
            raise RecordNotFound(f"{alias} has no live version")
        live = serving.live.version
        if serving.ramp is not None or self.awaiting_approval(alias):
            return live
        decisions = schema.decisions
        promoted = sa.select(decisions.c.version).where(
            decisions.c.alias == alias, decisions.c.action == PolicyAction.PROMOTE, decisions.c.version < live
        )
        was_live = {BASE_VERSION, *self._values(promoted)}
        states = (PolicyState.RETIRED, PolicyState.HOLDBACK)
        older = [p.version for p in self.all(alias) if p.state in states and p.version < live and p.version in was_live]
        if not older:
            raise InvalidTransition(f"{alias}@{live} is live and has no predecessor")
        return older[-1]

    def prune(self, alias: str, version: int, now: float) -> Policy:
        """Record that a version's folder is about to be deleted, for all versions that share it.

        Raises InvalidTransition if one of them is in use.
        """
        table, other = schema.policies, schema.policies.alias("other")
        named = sa.select(table.c.adapter).where(matches(table, alias=alias, version=version)).scalar_subquery()
        in_use = sa.exists().where(
            other.c.alias == alias,
            other.c.adapter == named,
            other.c.state.not_in((PolicyState.RETIRED, PolicyState.REJECTED, PolicyState.UNPROVEN)),
        )
        sharing = sa.and_(table.c.alias == alias, table.c.adapter == named, ~in_use)
        if not self._change(sa.update(table).where(sharing).values(pruned_at=now)):
            raise InvalidTransition(f"{alias}@{version} is in use and cannot be pruned")
        return self.get(alias, version)
