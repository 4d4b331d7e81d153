"""Results of tuning runs in one form for all methods, and the report that compares them. Pure.

`plain` writes a result for `tunings.result` and `read` reads it. `gain` is measured on held-out tasks only, against the
version served before. The report shows the newest finished run of each method. Runs are compared only with the same
alias, held-out tasks and judge: by default those of the newest run. Every other run is listed with the reason. A
difference is claimed only if its interval excludes zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from ratchet.store.operation_records import Tuning
from ratchet.store.records import Policy
from ratchet.store.states import TuningState
from ratchet.trainer.errors import TuningError
from ratchet.trainer.statistics import Compared, ComparisonVerdict
from ratchet.tuner.rollouts.prices import RolloutCost

Method = Literal["select-model", "prompt", "weights", "eval", "lessons"]


class TaskSetUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of the gain; only runs with the same `fingerprint` are compared."""

    source: str  # as given by the user
    split: str
    tasks: int
    fingerprint: str  # of the task ids, independent of their order


class TuningResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one run of one method."""

    method: Method
    technique: str  # such as "paired comparison of 3 models", "GEPA", "GRPO, 12 rounds"
    alias: str
    task_set: TaskSetUsed
    judge: str  # name and version
    workflow: str
    attempts: int = 1  # at each task
    baseline: str | None = None  # a model, `alias@0` or a prompt id
    best: str | None = None  # None: nothing is shown to be better
    gain: Compared | None = None  # best against baseline on held-out tasks; None: not measured
    spent: RolloutCost = RolloutCost()  # search, training and evaluation
    wall_seconds: float = 0.0  # elapsed time
    promoted: str | None = None  # version released by this run, such as `policy@4`
    notes: tuple[str, ...] = ()  # shown below the report
    details: Mapping[str, Any] = {}


def fingerprint(task_ids: Iterable[str]) -> str:
    """Return a hash of task ids, 16 hex digits, independent of their order and of family prefixes."""
    names = {task_id.rpartition("/")[2] for task_id in task_ids}
    return blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()


def task_set(source: str, split: str, task_ids: Sequence[str]) -> TaskSetUsed:
    return TaskSetUsed(source=source, split=split, tasks=len(set(task_ids)), fingerprint=fingerprint(task_ids))


def plain(result: TuningResult) -> dict[str, Any]:
    """Return a result as JSON values, for `store.tunings.end`."""
    content: dict[str, Any] = msgspec.to_builtins(result)
    return content


def read(content: Mapping[str, Any]) -> TuningResult:
    """Return the result of a run. Raises msgspec.ValidationError."""
    return msgspec.convert(content, TuningResult)


METHODS: Mapping[str, tuple[str, str]] = {  # kind -> label, command
    "select-model": ("Model selection", "ratchet tune select-model"),
    "prompt": ("Prompt tuning", "ratchet tune prompt"),
    "weights": ("Model weights", "ratchet tune weights"),
}


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """A gain on held-out tasks: scores before and after, and the difference with its interval."""

    verdict: ComparisonVerdict
    before: float | None
    after: float | None
    difference: float | None
    low: float
    high: float
    tasks: int
    description: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method; `tuning_id` None: no comparable run, and everything measured is None."""

    method: str
    label: str
    command: str
    tuning_id: str | None = None
    ended_at: float | None = None
    technique: str | None = None
    baseline: str | None = None
    best: str | None = None
    effect: Effect | None = None  # None: nothing was compared on held-out tasks
    spent: RolloutCost | None = None
    wall_seconds: float | None = None
    promoted: str | None = None  # version released by the run
    serves: str | None = None  # the live version if this run produced it
    notes: tuple[str, ...] = ()


class ExcludedTuning(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is not compared, and the reason."""

    tuning_id: str
    method: str
    why: str


class TuningReport(msgspec.Struct, frozen=True, kw_only=True):
    """All methods in order of effort; `task_set` None: no run has finished."""

    alias: str | None
    task_set: TaskSetUsed | None
    judge: str | None
    rows: tuple[Row, ...]
    excluded: tuple[ExcludedTuning, ...]


def report(
    tunings: Sequence[Tuning],
    *,
    live: Mapping[str, Policy] | None = None,
    alias: str | None = None,
    tasks: str | None = None,
    judge: str | None = None,
) -> TuningReport:
    """Return the report on these runs, given newest first; `live`: the live versions by alias.

    `alias`, `tasks` (source or fingerprint) and `judge` (name or name:version) select the runs to compare. Raises
    TuningError if no finished run matches them, but others exist.
    """
    finished: list[tuple[Tuning, TuningResult]] = []
    excluded = []
    for tuning in tunings:
        if tuning.kind not in METHODS:
            continue
        found = _finished(tuning)
        if isinstance(found, str):
            excluded.append(ExcludedTuning(tuning_id=tuning.id, method=tuning.kind, why=found))
        else:
            finished.append((tuning, found))
    reference = next((one for _, one in finished if _matches(one, alias, tasks, judge)), None)
    if finished and reference is None:
        raise _no_match([one for _, one in finished], alias, tasks, judge)
    taken: dict[str, tuple[Tuning, TuningResult]] = {}
    for tuning, result in finished:
        assert reference is not None
        why = _why_not(result, reference, tuning.kind in taken)
        if why is None:
            taken[tuning.kind] = (tuning, result)
        else:
            excluded.append(ExcludedTuning(tuning_id=tuning.id, method=tuning.kind, why=why))
    return TuningReport(
        alias=reference.alias if reference else alias,
        task_set=reference.task_set if reference else None,
        judge=reference.judge if reference else None,
        rows=tuple(_row(method, taken.get(method), live or {}, reference) for method in METHODS),
        excluded=tuple(sorted(excluded, key=lambda one: one.tuning_id, reverse=True)),
    )


def _no_match(found: Sequence[TuningResult], alias: str | None, tasks: str | None, judge: str | None) -> TuningError:
    selection = {"model": alias, "tasks": tasks, "judged-by": judge}
    known = {"model": [one.alias for one in found], "tasks": [one.task_set.source for one in found],
             "judged-by": [one.judge for one in found]}  # fmt: skip
    wanted = " ".join(f"--{name} {value}" for name, value in selection.items() if value is not None)
    there = "; ".join(f"--{name} {', '.join(dict.fromkeys(values))}" for name, values in known.items())
    return TuningError(f"no finished run is of {wanted}; there are runs of {there}")


def _finished(tuning: Tuning) -> TuningResult | str:
    """Return the result of a run, or the reason why there is none."""
    if tuning.state is TuningState.RUNNING:
        return "it has not ended"
    if tuning.state is not TuningState.DONE:
        return f"it {tuning.state}" + (f": {tuning.error}" if tuning.error else "")
    try:
        result = read(tuning.result or {})
    except msgspec.ValidationError as error:
        return f"its result cannot be read: {error}"
    return "none of its held-out rollouts was scored" if _scored_nothing(result) else result


def _scored_nothing(result: TuningResult) -> bool:
    """Return whether every attempt of both sides failed or is unjudged."""
    gain, attempts = result.gain, 2 * result.attempts * result.task_set.tasks
    return gain is not None and gain.failed + gain.against_failed + gain.unjudged >= attempts


def _matches(result: TuningResult, alias: str | None, tasks: str | None, judge: str | None) -> bool:
    same_tasks = tasks in (None, result.task_set.source, result.task_set.fingerprint)
    same_judge = judge is None or result.judge in (judge, f"{judge}:{result.judge.rpartition(':')[2]}")
    return same_tasks and same_judge and alias in (None, result.alias)


def _why_not(result: TuningResult, reference: TuningResult, is_older: bool) -> str | None:
    if result.alias != reference.alias:
        return f"it tuned {result.alias}, not {reference.alias}"
    if result.task_set.fingerprint != reference.task_set.fingerprint:
        return f"other held-out tasks: {_named(result.task_set)}, not the {_named(reference.task_set)}"
    if result.judge != reference.judge:
        return f"another judge: {result.judge}"
    return "a newer run of this method is shown" if is_older else None


def _named(used: TaskSetUsed) -> str:
    return f"{used.tasks} of {used.source} ({used.split})"


def _row(
    method: str,
    found: tuple[Tuning, TuningResult] | None,
    live: Mapping[str, Policy],
    reference: TuningResult | None,
) -> Row:
    label, command = METHODS[method]
    if found is None:
        return Row(method=method, label=label, command=command)
    tuning, result = found
    other = reference is not None and result.workflow != reference.workflow
    notes = (*result.notes, f"measured with another workflow, {result.workflow}") if other else result.notes
    return Row(
        method=method, label=label, command=command, tuning_id=tuning.id, ended_at=tuning.ended_at,
        technique=result.technique, baseline=result.baseline, best=result.best,
        effect=effect(result.gain) if result.gain else None, spent=result.spent, wall_seconds=result.wall_seconds,
        promoted=result.promoted, serves=_serves(result, live.get(result.alias)), notes=notes,
    )  # fmt: skip


def _serves(result: TuningResult, live: Policy | None) -> str | None:
    """Return the live version if the run produced it or its prompt."""
    if live is None:
        return None
    name = f"{live.alias}@{live.version}"
    found = {result.best, result.promoted} - {None, result.baseline}
    return name if found & {name, live.prompt_id} else None


def effect(gain: Compared) -> Effect:
    """Return a gain with its description."""
    descriptions = {
        ComparisonVerdict.BETTER: "better",
        ComparisonVerdict.WORSE: "worse",
        ComparisonVerdict.TIED: "no difference shown",
        ComparisonVerdict.INCONCLUSIVE: "inconclusive: attempts that were not judged could change it",
    }
    return Effect(
        verdict=gain.verdict, before=gain.against_mean, after=gain.mean, difference=gain.difference, low=gain.low,
        high=gain.high, tasks=gain.tasks, description=descriptions[gain.verdict],
    )  # fmt: skip
