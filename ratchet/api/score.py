"""`ratchet.score`: judge groups of trajectories. Nothing is started, recorded, stored or trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ratchet.api.arguments import AnyJudge, read_arguments
from ratchet.api.event_loop import run_to_end
from ratchet.api.try_out import refuse_judge_of_calls, transcript_of
from ratchet.errors import InvalidArgument
from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.errors import TuningError
from ratchet.trainer.observability.progress import Phase, Progress, watch_for_command
from ratchet.tuner.rollouts.scoring import SCORES
from ratchet.tuner.rollouts.trajectory_groups import ScoredTrajectory, TrajectoryGroup, check_groups
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput, plain
from ratchet.tuner.selection.choice import commonest
from ratchet.tuning.context import judge_of, model_server_of


def score(
    groups: Sequence[TrajectoryGroup],
    judge: AnyJudge | None = None,
    *,
    agent: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> list[TrajectoryGroup]:
    """Return the groups with a judge's scores as rewards. Also in a notebook.

    For groups that were gathered without a judge, that another judge is to score, or that were imported: each
    trajectory has its `messages`, or a `response`. The members of a group are judged together.

    groups   what `gather` returned, or your own
    judge    as of `gather`; None: the project's
    agent    the project's agent, if it has several
    project  the project's name
    config   the project's settings file; None: ratchet.yaml of the current folder, if there is one

    A failed rollout is not judged; a trajectory that the judge failed on has the reward None, and its `failure` says
    why. Raises JudgeError: the judge cannot be loaded; InvalidArgument: there is none; TuningError if it could score
    nothing.
    """
    return run_to_end(score_async(**locals()))


async def score_async(
    groups: Sequence[TrajectoryGroup],
    judge: AnyJudge | None = None,
    *,
    agent: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> list[TrajectoryGroup]:
    """Do what `score` does, beside the running event loop."""
    check_groups(groups)
    judged = [one for group in groups for one in group.trajectories if _is_judged(one)]
    unused = dict.fromkeys(("workflow", "tasks", "attempts", "concurrency", "seed", "test_size", "base_model"))
    given = read_arguments(unused | {"judge": judge, "agent": agent, "project": project, "config": config})
    with judge_of(given.settings, given.judge, model_server_of(given.settings)) as made:
        if made is None:
            raise InvalidArgument("no judge is set: give judge=, or set trainer.judge in ratchet.yaml")
        if not all(one.messages for one in judged):
            refuse_judge_of_calls(made)
        work = Progress(watch_for_command()).begin(SCORES, len(judged))
        places = asyncio.Semaphore(made.concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(_scored(made, places, group, work)) for group in groups]
        finally:
            work.end()
    found = [task.result() for task in running]
    if all(one.reward is None for group in found for one in group.trajectories):
        failures = (one.failure for group in found for one in group.trajectories)
        raise TuningError(f"no trajectory could be scored: {commonest(failures) or 'none has messages or a response'}")
    return found


def _is_judged(one: ScoredTrajectory) -> bool:
    """Return whether there is something to judge; a rollout that failed has no response."""
    return one.response is not None or (bool(one.messages) and one.failure is None)


async def _scored(judge: Judge, places: asyncio.Semaphore, group: TrajectoryGroup, work: Phase) -> TrajectoryGroup:
    members = [_transcript(group, one, place) for place, one in enumerate(group.trajectories) if _is_judged(one)]
    if not members:
        return group
    async with places:
        verdicts = (await asyncio.to_thread(judge.judge, None, members)).verdicts
    work.add(len(verdicts))
    rest = iter(verdicts)
    return replace(
        group, trajectories=tuple(_with(one, next(rest)) if _is_judged(one) else one for one in group.trajectories)
    )  # fmt: skip


def _transcript(group: TrajectoryGroup, one: ScoredTrajectory, place: int) -> Transcript:
    output = WorkflowOutput(plain(one.response), reward=one.reward)
    return transcript_of(group.scenario or None, output, one.messages, name=one.id or f"imported_{place}")


def _with(one: ScoredTrajectory, verdict: Verdict) -> ScoredTrajectory:
    """Return a trajectory with a verdict; the judge's components are metrics."""
    metrics = {**one.metrics, **verdict.components}
    return replace(
        one, reward=verdict.score, explanation=verdict.explanation, failure=verdict.failure, metrics=metrics
    )  # fmt: skip
