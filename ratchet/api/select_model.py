"""`ratchet.select_model`: models or versions on the same tasks, and the one to use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, read_arguments, split_of
from ratchet.api.event_loop import run_to_end
from ratchet.api.runs import TuningRun, start
from ratchet.tuning.compare_models import ComparisonOptions, compare


def select_model(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    models: Sequence[str] = (),
    policy: Literal["best", "cheapest"] = "best",
    within: float | None = None,
    split: str | None = None,
    limit: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    score_range: tuple[float, float] | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Start a comparison of models on the same tasks; the run's `best` is the one to use. Also in a notebook.

    models  at least two: of the project's `model_list`, or versions such as `policy@4`; the first is the baseline
    policy  the best, or the cheapest whose score is less than `within` below the best
    resume  the id of a run that ended early; with the same workflow and judge

    The other arguments are those of `evaluate`. Returns once the run has its id. Raises what `evaluate` does.
    """
    return run_to_end(select_model_async(**locals()))


async def select_model_async(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    models: Sequence[str] = (),
    policy: Literal["best", "cheapest"] = "best",
    within: float | None = None,
    split: str | None = None,
    limit: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    score_range: tuple[float, float] | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Do what `select_model` does, beside the running event loop: `await (await select_model_async(...))`."""
    given = read_arguments(locals())
    wanted = ComparisonOptions(
        "select-model", tuple(models), split_of(tasks, split), limit, score_range, resume, policy, within
    )
    wanted.check()
    return await start(given, "select-model", resume, partial(compare, given.settings, wanted))
