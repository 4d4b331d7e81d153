"""Training rounds, and what is recorded with them: answers, teacher scores, and the lineage of versions."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
from ratchet.store.errors import InvalidTransition
from ratchet.store.ids import new_id
from ratchet.store.policies.base_models import base_model_id_of
from ratchet.store.policies.policies import FORKED_FROM, forks
from ratchet.store.records import (
    BASE_VERSION,
    AnswerLogprobs,
    AnswerTraining,
    Policy,
    Record,
    Round,
    TeacherScore,
    family_of,
    row_to,
)
from ratchet.store.states import (
    ROUND_TRANSITIONS,
    GroupState,
    PolicyState,
    RoundState,
    TrajectoryState,
    check_transition,
)

# What rounds did with sampled answers: advantages, trainer-engine mismatch, reasons for no loss. For display only.
#
# Guarantee: a record is deleted with its call.


class AnswerTrainings(Verbs):
    """Operations on records of trained answers."""

    def record(self, round_id: str, answers: Sequence[AnswerTraining]) -> None:
        """Write a round's records, except those of calls that were deleted meanwhile; repeated ones change nothing."""
        rows = [msgspec.structs.asdict(msgspec.structs.replace(one, round_id=round_id)) for one in answers]
        with write(self._engine) as connection:
            for part in chunks(rows):
                calls = schema.calls.c.id
                there = set(connection.scalars(sa.select(calls).where(calls.in_([row["call_id"] for row in part]))))
                if known := [row for row in part if row["call_id"] in there]:
                    insert_or_ignore(connection, schema.answer_training, known)

    def of_calls(self, call_ids: Sequence[str]) -> list[AnswerTraining]:
        """Return the records of calls, in their order within a call."""
        table = schema.answer_training
        ordered = sa.select(table).order_by(table.c.call_id, table.c.choice)
        parts = [self._records(AnswerTraining, ordered.where(table.c.call_id.in_(some))) for some in chunks(call_ids)]
        return [answer for part in parts for answer in part]


# Teacher scores: the logprobs that a teacher gives the sampled tokens of a trajectory, compressed.

_ANSWERS = msgspec.msgpack.Decoder(tuple[AnswerLogprobs, ...])


def replace_teacher_scores(connection: sa.Connection, scores: Sequence[TeacherScore]) -> None:
    """Store scores in place of earlier ones of the same trajectories."""
    if not scores:
        return
    table = schema.teacher_scores
    names = [one.trajectory_id for one in scores]
    connection.execute(sa.delete(table).where(table.c.trajectory_id.in_(names)))
    rows = [
        msgspec.structs.asdict(one) | {"answers": zlib.compress(msgspec.msgpack.encode(one.answers))} for one in scores
    ]
    connection.execute(sa.insert(table), rows)


def read_teacher_scores(connection: sa.Connection, trajectory_ids: Sequence[str]) -> dict[str, TeacherScore]:
    table = schema.teacher_scores
    rows = connection.execute(sa.select(table).where(table.c.trajectory_id.in_(list(trajectory_ids))))
    return {
        row.trajectory_id: row_to(TeacherScore, row, answers=_ANSWERS.decode(zlib.decompress(row.answers)))
        for row in rows
    }


# Lineage: the policy versions that were trained on a trajectory. Reads only.
#
# A trajectory is trained in one round, and may be a demonstration in others. The versions of these rounds and all their
# descendants, forks included, contain it, even if a version in between was rejected, because training continues from
# the newest committed round.

Name = TypeVar("Name")  # of a version


class TrainingData(Record, frozen=True):
    """The training data of a version that is still in the store.

    `rounds`: behind its weights, oldest first; `families` and `judges`: counts of their trajectories.
    """

    rounds: tuple[Round, ...]
    families: Mapping[str, int]
    judges: Mapping[tuple[str, str], int]


class Lineage(Verbs):
    def versions_of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the versions (`alias@version`) that contain each trajectory; the first was trained on it directly.

        Untrained trajectories are left out.
        """
        rounds, held = schema.rounds, _held_by(trajectory_ids).subquery()
        direct = (
            sa.select(held.c.id, rounds.c.alias, rounds.c.to_version)
            .join(rounds, rounds.c.id == held.c.round_id)
            .order_by(rounds.c.to_version)
        )
        with read(self._engine) as connection:
            found = connection.execute(direct).all()
            aliases = {row.alias for row in found}
            copies = forks(connection) if found else {}
            # A copy may have been forked again: with any fork all agents are read.
            wanted = sa.true() if copies else rounds.c.alias.in_(aliases)
            committed = sa.select(rounds.c.alias, rounds.c.from_version, rounds.c.to_version).where(
                wanted, rounds.c.state == RoundState.COMMITTED
            )
            steps = connection.execute(committed.order_by(rounds.c.id)).all() if aliases else []
        pairs = [
            (copies.get((step.alias, step.to_version), (step.alias, step.from_version)), (step.alias, step.to_version))
            for step in steps
        ]
        versions: dict[str, dict[str, None]] = {}
        for row in found:
            held_in = descendants(pairs, (row.alias, row.to_version))
            names = {f"{alias}@{version}": None for alias, version in held_in}
            versions.setdefault(row.id, {}).update(names)
        return {name: tuple(policies) for name, policies in versions.items()}

    def training_data_of(self, policy: Policy) -> TrainingData:
        """Return the rounds behind a version's weights, back to the base model, and their trajectories.

        Versions that differ only by their prompt share their weights.
        """
        trajectories, verdicts, imitated = schema.trajectories, schema.verdicts, schema.sft_trajectories
        with read(self._engine) as connection:
            chain = _rounds_behind(connection, policy.alias, policy.version, policy.adapter)
            names = [held.id for held in chain]
            trained_on = sa.union(
                sa.select(trajectories.c.id).where(trajectories.c.round_id.in_(names)),
                sa.select(imitated.c.trajectory_id).where(imitated.c.round_id.in_(names)),
            ).subquery()
            latest = (
                sa.select(verdicts.c.trajectory_id, sa.func.max(verdicts.c.id).label("id"))
                .join(trained_on, trained_on.c.id == verdicts.c.trajectory_id)
                .where(verdicts.c.score.is_not(None))
                .group_by(verdicts.c.trajectory_id)
                .subquery()
            )
            judged = (
                sa.select(trajectories.c.task, trajectories.c.tools_hash, verdicts.c.judge, verdicts.c.judge_version)
                .join(latest, latest.c.trajectory_id == trajectories.c.id)
                .join(verdicts, verdicts.c.id == latest.c.id)
            )
            families: Counter[str] = Counter()
            judges: Counter[tuple[str, str]] = Counter()
            for row in connection.execute(judged):
                families[family_of(row.task, row.tools_hash)] += 1
                judges[row.judge, row.judge_version] += 1
        return TrainingData(rounds=tuple(chain), families=dict(families), judges=dict(judges))


def _rounds_behind(connection: sa.Connection, alias: str, version: int, adapter: str | None) -> list[Round]:
    """Return the rounds behind an adapter, oldest first; behind a fork those of the version that it is a copy of."""
    rounds, policies = schema.rounds, schema.policies
    mine = matches(rounds, alias=alias, state=RoundState.COMMITTED)
    found = connection.execute(sa.select(rounds).where(mine, rounds.c.to_version <= version)).all()
    chain = _chain([row_to(Round, row) for row in found], adapter)
    source = chain[0].metrics.get(FORKED_FROM) if chain else None
    if source is None:
        return chain
    copied = matches(policies, alias=source["alias"], version=source["version"])
    origin = connection.scalar(sa.select(policies.c.adapter).where(copied))
    return _rounds_behind(connection, source["alias"], source["version"], origin) + chain


def _chain(rounds: Sequence[Round], adapter: str | None) -> list[Round]:
    """Return the rounds from the base model to the one that made an adapter, oldest first."""
    made = {held.to_version: held for held in rounds}
    last = next((held for held in rounds if held.checkpoint == adapter), None)
    chain: list[Round] = []
    while last is not None:
        chain.append(last)
        last = made.get(last.from_version)
    return chain[::-1]


def descendants(steps: Sequence[tuple[Name, Name]], version: Name) -> list[Name]:
    """Return a version and its descendants; `steps`: (from, to), in the order in which they were made."""
    held = {version: None}
    for origin, made in steps:
        if origin in held:
            held[made] = None
    return list(held)


def _held_by(trajectory_ids: Sequence[str]) -> sa.CompoundSelect[tuple[str, str]]:
    """Return the query for (trajectory id, round id) of the rounds trained on trajectories."""
    trajectories, imitated = schema.trajectories, schema.sft_trajectories
    trained = sa.select(trajectories.c.id, trajectories.c.round_id).where(
        trajectories.c.id.in_(trajectory_ids), trajectories.c.round_id.is_not(None)
    )
    demonstrated = sa.select(imitated.c.trajectory_id.label("id"), imitated.c.round_id)
    return trained.union_all(demonstrated.where(imitated.c.trajectory_id.in_(trajectory_ids)))


# Training rounds: started, then committed or abandoned.
#
# Guarantees: one transaction consumes the trajectories, records the checkpoint and registers the candidate. Every
# committed round continues from the newest earlier one whose version is not rejected; a checkpoint that is adopted from
# elsewhere is recorded as a round of its own, and starts a new line. After any crash, no trajectory is part of two
# committed rounds, and every later version of its line contains it unless the version that trained it was rejected.


class Rounds(Verbs):
    """Operations on training rounds."""

    def start(self, alias: str, from_version: int) -> Round:
        """Start a round; a round that a dead trainer left open is abandoned.

        Raises InvalidTransition if `from_version` is not the newest committed version that is not rejected: another
        trainer's commit would be lost. This holds until the commit, because an alias has one open round at a time: of
        two that start at the same moment one raises it, too.
        """
        started = Round(
            id=new_id("rnd"),
            alias=alias,
            state=RoundState.STARTED,
            from_version=from_version,
            to_version=None,
            started_at=time.time(),
            ended_at=None,
            checkpoint=None,
            metrics={},
            reason=None,
        )
        table = schema.rounds
        with write(self._engine) as connection:
            left = sa.update(table).where(matches(table, alias=alias, state=RoundState.STARTED))
            reason = "the trainer stopped before the commit"
            connection.execute(left.values(state=RoundState.ABANDONED, reason=reason, ended_at=time.time()))
            # The update above waited for a concurrent commit of another trainer, so this query sees it.
            committed = sa.select(sa.func.max(table.c.to_version)).where(_continued(alias))
            newest = connection.scalar(committed)
            if (newest or BASE_VERSION) != from_version:
                raise InvalidTransition(
                    f"{alias}@{newest} is committed: a round continues from it, not from {from_version}"
                )
            if not insert_or_ignore(connection, table, [msgspec.structs.asdict(started)]):
                raise InvalidTransition(f"another trainer of {alias} started a round at the same moment")
        return started

    def next_version(self, alias: str) -> int:
        """Return the number of an alias's next version; numbers are never reused."""
        table = schema.policies
        return int(self._value(sa.select(sa.func.max(table.c.version)).where(table.c.alias == alias)) or 0) + 1

    def commit(
        self,
        round_id: str,
        *,
        version: int,
        checkpoint: str,
        groups: Sequence[str],
        metrics: Mapping[str, Any],
        demonstrations: Sequence[str] = (),
    ) -> Policy:
        """Consume the groups, record the checkpoint folder and register `version` as a candidate, in one transaction.

        The candidate gets the live prompt. `demonstrations`: trajectories of an SFT round, which are not consumed;
        those deleted meanwhile are left out. Raises InvalidTransition if a group does not wait for a round any more,
        the version that the round continues from was rejected, or the number is taken; then nothing is written.
        """
        current = self.get(round_id)
        check_transition(ROUND_TRANSITIONS, current.state, RoundState.COMMITTED, f"round {round_id}")
        with write(self._engine) as connection:
            _check_parent(connection, current)
            _consume(connection, round_id, groups)
            _record_demonstrations(connection, round_id, demonstrations)
            now = time.time()
            started = sa.update(schema.rounds).where(matches(schema.rounds, id=round_id, state=RoundState.STARTED))
            made = {"to_version": version, "ended_at": now, "checkpoint": checkpoint, "metrics": dict(metrics)}
            if not connection.execute(started.values(state=RoundState.COMMITTED, **made)).rowcount:
                raise InvalidTransition(f"round {round_id} was changed by another process")
            return _register_candidate(connection, current.alias, version, checkpoint, round_id, now)

    def adopt(
        self,
        alias: str,
        *,
        version: int,
        checkpoint: str,
        origin: Mapping[str, Any],
        reason: str,
        by_trainer: bool = False,
    ) -> Policy:
        """Register a checkpoint that was not trained here as the candidate `version`, in one transaction.

        Training goes on from it: it is recorded as a committed round without groups that continues from the base model,
        with `origin` among its metrics: `{"forked_from": {"alias", "version"}}`, `{"init_adapter"}` or
        `{"imported_from"}`.
        Raises InvalidTransition if the number is taken, a version is undecided or a round is open. `by_trainer`: the
        alias's own trainer calls, so that an open round is one that a dead trainer left, and prompts may wait.
        """
        now = time.time()
        rounds = schema.rounds
        with write(self._engine) as connection:
            if not by_trainer:
                _check_decided(connection, alias)
            name = new_id("rnd")
            connection.execute(
                sa.insert(rounds).values(
                    id=name,
                    alias=alias,
                    state=RoundState.COMMITTED,
                    from_version=BASE_VERSION,
                    to_version=version,
                    started_at=now,
                    ended_at=now,
                    checkpoint=checkpoint,
                    metrics=dict(origin),
                    reason=reason,
                )
            )
            evidence = {"origin": dict(origin)}
            return _register_candidate(connection, alias, version, checkpoint, name, now, evidence)

    def abandon(self, round_id: str, reason: str) -> None:
        """Abandon a round; its groups wait for another one."""
        check_transition(ROUND_TRANSITIONS, self.get(round_id).state, RoundState.ABANDONED, f"round {round_id}")
        mine = sa.update(schema.rounds).where(schema.rounds.c.id == round_id)
        self._change(mine.values(state=RoundState.ABANDONED, reason=reason, ended_at=time.time()))

    def get(self, round_id: str) -> Round:
        """Return a round. Raises RecordNotFound."""
        return self._one(Round, sa.select(schema.rounds).where(schema.rounds.c.id == round_id), f"no round {round_id}")

    def newest_committed(self, alias: str) -> Round | None:
        """Return the newest committed round whose version is not rejected; training continues from its checkpoint."""
        return next(iter(self._newest(_continued(alias), 1)), None)

    def page(self, alias: str | None = None, limit: int = 100, before: str | None = None) -> list[Round]:
        """Return at most `limit` rounds, newest first, older than the round id `before`."""
        older = schema.rounds.c.id < before if before else sa.true()
        return self._newest(sa.and_(matches(schema.rounds, alias=alias or None), older), min(limit, MAX_PAGE))

    def rounds_after(self, alias: str, round_id: str, limit: int = 1000) -> list[Round]:
        """Return the rounds after a round id, oldest first; `""`: from the first one."""
        table = schema.rounds
        query = sa.select(table).where(table.c.alias == alias, table.c.id > round_id).order_by(table.c.id)
        return self._records(Round, query.limit(limit))

    def _newest(self, where: sa.ColumnElement[bool], limit: int) -> list[Round]:
        return self._records(
            Round, sa.select(schema.rounds).where(where).order_by(schema.rounds.c.id.desc()).limit(limit)
        )


def _check_decided(connection: sa.Connection, alias: str) -> None:
    """Raise InvalidTransition if a version of the alias is not decided, or a round is open."""
    policies, rounds = schema.policies, schema.rounds
    undecided = sa.select(policies.c.version, policies.c.state).where(
        matches(policies, alias=alias, state=(PolicyState.CANDIDATE, PolicyState.RAMP))
    )
    for version, state in connection.execute(undecided):
        raise InvalidTransition(
            f"{alias}@{version} is a {state} that is not decided: wait for it, or decide with `ratchet policies "
            "promote` or `ratchet policies rollback`"
        )
    started = sa.select(rounds.c.id).where(matches(rounds, alias=alias, state=RoundState.STARTED))
    if connection.scalar(started) is not None:
        raise InvalidTransition(f"a round of {alias} is open: try again when it has ended")


def _check_parent(connection: sa.Connection, training: Round) -> None:
    """Raise InvalidTransition if the version that the round continues from was rejected; a rollback waits for us."""
    table = schema.policies
    parent = matches(table, alias=training.alias, version=training.from_version)
    state = connection.scalar(sa.select(table.c.state).where(parent).with_for_update(read=True))
    if state == PolicyState.REJECTED:
        raise InvalidTransition(
            f"{training.alias}@{training.from_version} was rejected while round {training.id} trained from it: its "
            "groups wait for another round"
        )


def _live_prompt(connection: sa.Connection, alias: str) -> str | None:
    """Return the live prompt, which the new version keeps."""
    policies = schema.policies
    live = matches(policies, alias=alias, state=PolicyState.LIVE)
    found: str | None = connection.scalar(sa.select(policies.c.prompt_id).where(live))
    return found


def _register_candidate(
    connection: sa.Connection,
    alias: str,
    version: int,
    checkpoint: str,
    round_id: str,
    now: float,
    evidence: Mapping[str, Any] | None = None,
) -> Policy:
    """Store what a round made as a candidate with the live prompt. Raises InvalidTransition if its number is taken."""
    policy = Policy(
        alias=alias,
        version=version,
        state=PolicyState.CANDIDATE,
        served_name=f"{alias}@{version}",
        adapter=checkpoint,
        created_at=now,
        round_id=round_id,
        evidence=evidence or {},
        prompt_id=_live_prompt(connection, alias),
    )
    row = msgspec.structs.asdict(policy)
    try:
        connection.execute(sa.insert(schema.policies).values(**row, base_model_id=base_model_id_of(alias)))
    except IntegrityError as taken:  # a prompt version was registered during the round
        raise InvalidTransition(f"{policy.served_name} was made by another process meanwhile") from taken
    return policy


def _continued(alias: str) -> sa.ColumnElement[bool]:
    """Return the condition of the committed rounds whose version is not rejected: training continues from them."""
    policies, rounds = schema.policies, schema.rounds
    rejected = sa.select(policies.c.version).where(matches(policies, alias=alias, state=PolicyState.REJECTED))
    return sa.and_(matches(rounds, alias=alias, state=RoundState.COMMITTED), rounds.c.to_version.not_in(rejected))


def _consume(connection: sa.Connection, round_id: str, group_ids: Sequence[str]) -> None:
    groups, trajectories = schema.groups, schema.trajectories
    moved = connection.execute(
        sa.update(groups).where(matches(groups, id=group_ids, state=GroupState.JUDGED)).values(state=GroupState.TRAINED)
    )
    if moved.rowcount != len(group_ids):
        raise InvalidTransition(f"{len(group_ids) - moved.rowcount} of {len(group_ids)} groups do not wait for a round")
    connection.execute(
        sa.update(trajectories)
        .where(matches(trajectories, group_id=group_ids, state=TrajectoryState.GROUPED))
        .values(state=TrajectoryState.TRAINED, round_id=round_id)
    )


def _record_demonstrations(connection: sa.Connection, round_id: str, demonstrations: Sequence[str]) -> None:
    trajectories = schema.trajectories
    for names in chunks(demonstrations):
        there = sa.select(trajectories.c.id).where(trajectories.c.id.in_(names))
        rows = [{"round_id": round_id, "trajectory_id": name} for name in connection.scalars(there)]
        if rows:
            connection.execute(sa.insert(schema.sft_trajectories), rows)
