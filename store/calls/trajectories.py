"""Trajectories: sealed when complete, read with their content, dropped with a reason.

groups.py and rounds.py change their state when they are grouped and trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.calls import incomplete, load_calls, load_path, load_tools, system_prompt
from ratchet.store.calls.feedback import UNAPPLIED, feedback_of, unindexed
from ratchet.store.calls.tool_call_outcomes import tool_calls_of
from ratchet.store.calls.trajectory_filter import FEW, TrajectoryFilter, count_without_tag, select_page_ids
from ratchet.store.content.messages import last_answer_node, parents_first
from ratchet.store.db import schema
from ratchet.store.db.column_types import NOT_DECODED
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import MAX_PAGE, CachedCount, Verbs, chunks, matches
from ratchet.store.errors import InvalidTransition, RecordDamaged, RecordNotFound
from ratchet.store.records import GATHERED, Call, Trajectory, Transcript, row_to
from ratchet.store.states import (
    CUT_OFF,
    FINISH,
    IDLE,
    TRAJECTORY_TRANSITIONS,
    CallState,
    RolloutState,
    TrajectoryState,
    states_before,
)
from ratchet.store.tuning import is_rollout_in_progress, row_of, workflow_result_of


class Trajectories(Verbs):
    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        state, reason = schema.trajectories.c.state, schema.trajectories.c.drop_reason
        self._counts = CachedCount(lambda: self._count_by(state, sa.true()))
        self._drop_counts = CachedCount(lambda: self._count_by(reason, reason.is_not(None)))

    def seal_idle_trajectories(
        self, alias: str, now: float, idle_seconds: float, lost_after: float = 3600.0
    ) -> list[str]:
        """Seal an alias's open trajectories without activity for `idle_seconds`; return their ids.

        A call in progress keeps its trajectory open, unless it started more than `lost_after` seconds ago. So does a
        rollout in progress, unless it had no activity for that long.
        """
        trajectories = schema.trajectories
        idle = (
            trajectories.c.last_active_at <= now - idle_seconds,
            ~_has_call_in_progress(now, lost_after),
            sa.or_(~is_rollout_in_progress(trajectories.c.id), trajectories.c.last_active_at <= now - lost_after),
        )
        return self._changed(_sealed(now, IDLE, alias=alias).where(*idle), trajectories.c.id)

    def seal_rollouts(self, alias: str, shipped_until: float, lost_after: float = 3600.0) -> list[str]:
        """Seal an alias's open trajectories whose rollout ended before `shipped_until`; return their ids.

        Every proxy has shipped its records up to that time. Calls in progress count as in `seal_idle_trajectories`.
        The agent of an abandoned rollout may still send calls, so its trajectory is sealed only when idle.
        """
        trajectories = schema.trajectories
        ended = sa.and_(schema.rollouts.c.state != RolloutState.ABANDONED, schema.rollouts.c.ended_at < shipped_until)
        over = sa.exists().where(schema.rollouts.c.id == trajectories.c.id, ended)
        sealed = _sealed(shipped_until, FINISH, alias=alias).where(over)
        return self._changed(sealed.where(~_has_call_in_progress(shipped_until, lost_after)), trajectories.c.id)

    def seal(self, trajectory_id: str, now: float) -> Trajectory:
        """Seal a trajectory; no effect if it is sealed. Raises RecordNotFound."""
        self._change(_sealed(now, FINISH, id=trajectory_id))
        return self.get(trajectory_id)

    def drop(self, trajectory_ids: Iterable[str], reason: str) -> None:
        """Drop trajectories. Raises InvalidTransition if one is open, trained or already dropped."""
        names = list(trajectory_ids)
        with write(self._engine) as connection:
            drop(connection, names, reason)

    def get(self, trajectory_id: str) -> Trajectory:
        """Return a trajectory without its content. Raises RecordNotFound."""
        return _one(self._select(schema.trajectories.c.id == trajectory_id, 1), trajectory_id)

    def sealed(self, alias: str, limit: int = 1000, silent_before: float | None = None) -> list[Trajectory]:
        """Return an alias's sealed trajectories, the one that has waited longest first; no gathered ones.

        With `silent_before`, only those with unapplied feedback values, or without a call since that time.
        """
        trajectories = schema.trajectories
        where = sa.and_(
            matches(trajectories, state=TrajectoryState.SEALED, alias=alias), trajectories.c.purpose != GATHERED
        )
        if silent_before is None:
            return self._select(where, limit, oldest_first=True)
        # Two queries, each along its index: very many may wait for feedback.
        silent = sa.select(trajectories.c.id).where(where, trajectories.c.last_active_at < silent_before)
        silent = silent.order_by(trajectories.c.last_active_at).limit(limit)
        unapplied = sa.select(schema.feedback.c.trajectory_id).where(*UNAPPLIED)
        sealed = sa.and_(
            unindexed(trajectories.c.state) == TrajectoryState.SEALED, unindexed(trajectories.c.alias) == alias,
            trajectories.c.purpose != GATHERED,
        )  # fmt: skip
        with_feedback = sa.select(trajectories.c.id).where(trajectories.c.id.in_(unapplied), sealed).limit(limit)
        names = sorted({*self._values(silent), *self._values(with_feedback)})
        found = self._select(trajectories.c.id.in_(names), len(names), oldest_first=True) if names else []
        return [run for run in found if run.state is TrajectoryState.SEALED][:limit]

    def open_attempts_like(self, alias: str, like: Sequence[Trajectory]) -> list[Trajectory]:
        """Return an alias's open live trajectories with the task of one of `like`; their `calls` are 0."""
        trajectories = schema.trajectories
        tasks = sorted({run.task for run in like if run.task})
        roots = sorted({run.root_node for run in like if not run.task})
        alike: list[sa.ColumnElement[bool]] = [trajectories.c.task.in_(some) for some in chunks(tasks)]
        alike += [sa.and_(trajectories.c.task.is_(None), trajectories.c.root_node.in_(some)) for some in chunks(roots)]
        query = sa.select(trajectories, sa.literal(0).label("calls"))
        query = query.where(matches(trajectories, alias=alias, state=TrajectoryState.OPEN, purpose="live"))
        return [found for attempt in alike for found in self._records(Trajectory, query.where(attempt))]

    def ended_by_failure(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Return the trajectories whose last call was cut off by the engine, its server or the proxy."""
        calls = schema.calls
        last = sa.select(sa.func.max(calls.c.id)).where(calls.c.trajectory_id.in_(trajectory_ids))
        query = sa.select(calls.c.trajectory_id).where(
            calls.c.id.in_(last.group_by(calls.c.trajectory_id)), calls.c.state.in_(CUT_OFF)
        )
        return set(self._values(query))

    def incomplete(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Return the trajectories with missing messages or tools, lost with a proxy's journal."""
        with read(self._engine) as connection:
            return incomplete(connection, trajectory_ids)

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        state: str | None = None,
        chosen: TrajectoryFilter | None = None,
    ) -> list[Trajectory]:
        """Return at most `limit` trajectories that match, older than the trajectory `before`, newest first."""
        trajectories = schema.trajectories
        wanted = chosen or TrajectoryFilter(state=state)
        opened_at = self.get(before).opened_at if before else 0.0
        besides = count_without_tag(wanted)
        with read(self._engine) as connection:
            by_tag = besides is None or (connection.scalar(besides) or 0) > FEW
            ids = select_page_ids(wanted, min(limit, MAX_PAGE), before, opened_at, by_tag=by_tag)
            names = list(connection.scalars(ids))
        found = {run.id: run for run in self._select(trajectories.c.id.in_(names), len(names))} if names else {}
        return [found[name] for name in names if name in found]

    def read(self, trajectory_id: str, *, tokens: bool = True) -> Transcript:
        """Return a trajectory with its calls and the messages up to its last answer.

        With `tokens` False, token ids and logprobs are not read and are empty. Raises RecordNotFound and RecordDamaged.
        """
        with _naming(trajectory_id), read(self._engine) as connection:
            trajectory = _one(_load(connection, schema.trajectories.c.id == trajectory_id, 1), trajectory_id)
            calls = load_calls(connection, schema.calls.c.trajectory_id == trajectory_id, tokens=tokens)
            leaf, own_tools = last_answer_node(calls, lambda node: system_prompt(connection, node))
            messages = load_path(connection, leaf)
            tools = load_tools(connection, own_tools)
            feedback = feedback_of(connection, trajectory_id)
            called = tool_calls_of(connection, trajectory_id)
            task, returned = workflow_result_of(connection, trajectory_id)
            row = row_of(connection, task or trajectory.task)
        return Transcript(
            trajectory=trajectory, calls=tuple(calls), messages=messages, tools=tools, feedback=feedback, row=row,
            returned=returned, tool_calls=called,
        )  # fmt: skip

    def readable(self, trajectory_ids: Iterable[str]) -> Iterator[Transcript]:
        """Read these trajectories one after the other, without those that are damaged or were deleted."""
        for name in trajectory_ids:
            with suppress(RecordNotFound, RecordDamaged):
                yield self.read(name)

    def last_active(self, trajectory_ids: Sequence[str]) -> dict[str, float]:
        """Return the time of each trajectory's last activity (Unix seconds); unknown ones are left out."""
        trajectories = schema.trajectories
        query = sa.select(trajectories.c.id, trajectories.c.last_active_at).where(
            trajectories.c.id.in_(list(trajectory_ids))
        )
        return {row.id: row.last_active_at for row in self._rows(query)}

    def held_out_candidates(self, alias: str, reason: str, limit: int) -> list[str]:
        """Return the first trajectory dropped for this reason of each task, for the first `limit` tasks.

        Only trajectories of one answered chat call, so that their prompt can be sampled again. Later trajectories do
        not change the result once there are `limit` tasks.
        """
        trajectories, calls = schema.trajectories, schema.calls
        whole = sa.and_(calls.c.state == CallState.ANSWERED, calls.c.dialect != "completions")
        # Without a task name, the first prompt and the tools identify the task, as in `cohort_of`.
        named = sa.func.coalesce(trajectories.c.task, "") != ""
        task = (
            sa.case((named, trajectories.c.task)).label("task"),
            sa.case((~named, trajectories.c.root_node)).label("root"),
            sa.case((~named, trajectories.c.tools_hash)).label("tools"),
        )
        single_calls = (
            sa.select(trajectories.c.id, trajectories.c.opened_at, *task)
            .join(calls, calls.c.trajectory_id == trajectories.c.id)
            .where(trajectories.c.alias == alias, trajectories.c.drop_reason == reason)
            .group_by(trajectories.c.id)
            .having(sa.func.count() == 1, sa.func.sum(sa.case((whole, 1), else_=0)) == 1)
        ).subquery()
        same_task = (single_calls.c.task, single_calls.c.root, single_calls.c.tools)
        place = sa.func.row_number().over(
            partition_by=same_task, order_by=(single_calls.c.opened_at, single_calls.c.id)
        )
        first = sa.select(single_calls.c.id, single_calls.c.opened_at, place.label("place")).subquery()
        query = sa.select(first.c.id).where(first.c.place == 1).order_by(first.c.opened_at, first.c.id).limit(limit)
        return self._values(query)

    def messages_to(self, leaf: str) -> tuple[Mapping[str, Any], ...]:
        """Return the messages from the root to `leaf`; none if it is not stored."""
        with read(self._engine) as connection:
            return load_path(connection, leaf)

    def system_prompt(self, leaf: str) -> str:
        """Return the system prompt at the start of the path to a message; an empty text if there is none to read."""
        with suppress(RecordDamaged), read(self._engine) as connection:
            return system_prompt(connection, leaf)
        return ""

    def context_calls(self, transcript: Transcript) -> tuple[Call, ...]:
        """Return the transcript's calls and the calls of earlier trajectories that they continue.

        The oldest come first, but none before its parent. Raises RecordDamaged.
        """
        found = {call.id: call for call in transcript.calls}
        with _naming(transcript.trajectory.id), read(self._engine) as connection:
            while missing := {c.parent_call for c in found.values() if c.parent_call and c.parent_call not in found}:
                loaded = load_calls(connection, schema.calls.c.id.in_(missing))
                if not loaded:
                    break
                found |= {call.id: call for call in loaded}
        return tuple(parents_first(sorted(found.values(), key=lambda call: (call.started_at, call.id))))

    def trained_in_round(self, round_id: str, limit: int = 100) -> list[str]:
        """Return the ids of trajectories that a round trained on."""
        trajectories = schema.trajectories
        query = sa.select(trajectories.c.id).where(trajectories.c.round_id == round_id).order_by(trajectories.c.id)
        return self._values(query.limit(limit))

    def counts(self, alias: str | None = None) -> dict[str, int]:
        """Return the number of trajectories in each state, of one alias or of all; cached if there are many."""
        return {str(state): 0 for state in TrajectoryState} | _summed(self._counts(), alias)

    def drop_counts(self, alias: str | None = None) -> dict[str, int]:
        """Return the number of dropped trajectories by reason, of one alias or of all; cached if there are many."""
        return _summed(self._drop_counts(), alias)

    def _count_by(self, column: sa.Column[Any], where: sa.ColumnElement[bool]) -> dict[tuple[str, str], int]:
        """Return the number of trajectories by alias and the value of a column."""
        alias = schema.trajectories.c.alias
        query = sa.select(alias, column, sa.func.count()).where(where).group_by(alias, column)
        return {(name, str(value)): int(count) for name, value, count in self._rows(query)}

    def _select(self, where: sa.ColumnElement[bool], limit: int, oldest_first: bool = False) -> list[Trajectory]:
        with read(self._engine) as connection:
            return _load(connection, where, limit, oldest_first)


def _sealed(at: float, by: str, **chosen: str) -> sa.Update:
    """Return the change that seals the open ones of these trajectories."""
    mine = matches(schema.trajectories, **chosen, state=TrajectoryState.OPEN)
    return sa.update(schema.trajectories).where(mine).values(state=TrajectoryState.SEALED, sealed_at=at, sealed_by=by)


@contextmanager
def _naming(trajectory_id: str) -> Iterator[None]:
    """Name the trajectory in errors about damaged rows: its own, or of what it continues."""
    try:
        yield
    except (RecordDamaged, *NOT_DECODED) as error:
        problem = error.problem if isinstance(error, RecordDamaged) else f"a stored value cannot be decoded ({error})"
        raise RecordDamaged(f"trajectory {trajectory_id} is damaged: {problem}", trajectory_id) from error


def _load(
    connection: sa.Connection, where: sa.ColumnElement[bool], limit: int, oldest_first: bool = False
) -> list[Trajectory]:
    trajectories = schema.trajectories
    order = (
        (trajectories.c.last_active_at, trajectories.c.id)
        if oldest_first
        else (trajectories.c.opened_at.desc(), trajectories.c.id.desc())
    )
    sized = sa.select(sa.func.count()).where(schema.calls.c.trajectory_id == trajectories.c.id).scalar_subquery()
    query = sa.select(trajectories, sized.label("calls")).where(where).order_by(*order).limit(limit)
    return [row_to(Trajectory, row) for row in connection.execute(query)]


def _one(found: Sequence[Trajectory], name: str) -> Trajectory:
    if not found:
        raise RecordNotFound(f"no trajectory {name}")
    return found[0]


def _has_call_in_progress(now: float, lost_after: float) -> sa.ColumnElement[bool]:
    """Return the condition that a trajectory has a call in progress that started less than `lost_after` seconds ago."""
    trajectories, calls = schema.trajectories, schema.calls
    return sa.exists().where(
        calls.c.trajectory_id == trajectories.c.id,
        calls.c.state == CallState.STARTED,
        calls.c.started_at > now - lost_after,
    )


def drop(connection: sa.Connection, names: Sequence[str], reason: str) -> None:
    """Drop trajectories in the caller's transaction, all or none."""
    trajectories = schema.trajectories
    allowed = matches(trajectories, id=names, state=states_before(TRAJECTORY_TRANSITIONS, TrajectoryState.DROPPED))
    dropped = sa.update(trajectories).where(allowed).values(state=TrajectoryState.DROPPED, drop_reason=reason)
    changed = connection.execute(dropped)
    if changed.rowcount != len(names):
        raise InvalidTransition(f"{len(names) - changed.rowcount} of {len(names)} trajectories cannot be dropped now")


def _summed(counts: Mapping[tuple[str, str], int], alias: str | None) -> dict[str, int]:
    """Return the counts of one alias, or the sums over all."""
    totals: Counter[str] = Counter()
    for (name, value), count in counts.items():
        if alias in (None, name):
            totals[value] += count
    return dict(totals)
