"""Check of `ratchet doctor`: the configured judge returns scores, distinguishes answers and does not crash.

It judges recorded trajectories, newest groups first, as the trainer does; without any, the answers of
`ratchet judge lint` to a question that the user gives: no question of ours fits every judge. Records nothing. A judge
that calls a language model judges one group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.checks.check_result import CheckResult
from ratchet.settings.project_settings import Settings
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import StoreError, StoreNotFound
from ratchet.store.store import Store, open_store
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.judges.quality import LintOutcome, Place, lint, synthetic
from ratchet.trainer.settings.judge_specs import PluginSpec, plugin_traits
from ratchet.tuner.rollouts.diagnosis import judge_problems

if TYPE_CHECKING:
    from ratchet.store.records import Transcript
    from ratchet.trainer.judges.judgement import Judge

_NAME = "judge"
_GROUPS = 3
_MEMBERS = 8
_LEAST_SPREAD = 1e-9
_FIX_JUDGE = (
    "fix the judge: trajectories that it fails on are dropped; `ratchet judge try TRAJECTORY` shows each failure"
)
_NOT_DISCRIMINATING = (
    "make the judge distinguish good answers from bad ones; `ratchet judge lint --trajectory ID` tests it further"
)
_TRY_LINT = "correct the judge or the example (a judge that reads the task's row needs --question '{...}')"
_NEED_TRAFFIC = ("feedback", "workflow")  # built-in kinds whose input only traffic brings
_QUICK = ("function", "answer", *_NEED_TRAFFIC)


@dataclass(frozen=True, slots=True)
class JudgeExample:
    """A question, or a task's row as a JSON object, and its correct answer."""

    question: str
    answer: str
    is_row: bool = False

    @classmethod
    def of(cls, question: str, answer: str) -> JudgeExample:
        """Return the example. Raises ValueError if the question begins like a row and is not JSON."""
        row = question.lstrip().startswith("{")
        if row:
            json.loads(question)
        return cls(question, answer, is_row=row)


def check_judge_quality(settings: Settings, example: JudgeExample | None = None) -> CheckResult:
    """Return the result for the project's judge; `example` is used if no call is recorded."""
    if not settings.has_judge:
        seen = "no judge is set: calls are recorded and nothing is trained"
        return CheckResult(_NAME, False, seen, "give --judge module:function or a YAML file, or set trainer.judge")
    try:
        spec = settings.trainer.judge
        kind = spec.name if isinstance(spec, PluginSpec) else spec.kind
        judge = make_judge(spec, os.environ)
    except TrainerError as error:
        return CheckResult(_NAME, False, f"it cannot be loaded: {error}", "fix it, or set another one (trainer.judge)")
    try:
        with open_store(settings.store_url, create=False) as store:
            return proof(judge, kind, store, settings.model, example)
    except StoreNotFound:
        return _unrecorded(judge, kind, example)
    except StoreError as error:
        return CheckResult(_NAME, False, f"the store cannot be read: {error}", "see `ratchet store verify`")
    finally:
        judge.close()


def proof(judge: Judge, kind: str, store: Store, alias: str, example: JudgeExample | None = None) -> CheckResult:
    """Check a judge with the recorded trajectories of an alias, else with the example."""
    groups = list(_recorded(store, alias))
    if not groups:
        return _unrecorded(judge, kind, example)
    judged = [judge.judge(None, members).verdicts for members in groups[: _GROUPS if kind in _QUICK else 1]]
    verdicts = [verdict for verdicts in judged for verdict in verdicts]
    failed = [verdict.failure for verdict in verdicts if verdict.failure is not None]
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    seen = f"{judge.name} scored {len(scores)} recorded trajectories"
    if _needs_traffic(kind):  # not the answer, but what followed it decides the score
        return CheckResult(_NAME, True, f"{seen}, {_range(scores)}") if scores else _without_traffic(judge)
    if failed:
        return CheckResult(
            _NAME, False, f"{judge.name} fails on {len(failed)} of {len(verdicts)}: {failed[0]}", _FIX_JUDGE
        )
    if max(scores) - min(scores) <= _LEAST_SPREAD:  # does it ignore the answer?
        for reason in judge_problems(judge, groups[0][0]):
            return CheckResult(_NAME, False, reason.seen, _NOT_DISCRIMINATING)
    return CheckResult(_NAME, True, f"{seen}, {_range(scores)}, and distinguishes answers")


def _range(scores: Sequence[float]) -> str:
    return f"{min(scores):g} to {max(scores):g}"


def _recorded(store: Store, alias: str) -> Iterator[Sequence[Transcript]]:
    """Yield the members of the newest groups; without groups, the newest live trajectories as one group.

    Groups with rewards of a caller (`ratchet.train`) do not count: this judge does not score them.
    """
    newest_groups = store.groups.page(20, alias=alias)
    groups = [group for group in newest_groups if group.members and not group.is_requested]
    for group in groups[:_GROUPS]:
        yield [store.trajectories.read(name) for name in group.members[:_MEMBERS]]
    if not groups:
        newest = store.trajectories.page(100, chosen=TrajectoryFilter(alias=alias))
        live = [run.id for run in newest if run.purpose == "live" and run.drop_reason is None]
        if live:
            yield [store.trajectories.read(name) for name in live[:_MEMBERS]]


def _needs_traffic(kind: str) -> bool:
    return kind in _NEED_TRAFFIC or bool(plugin_traits(kind).waits_for)


def _unrecorded(judge: Judge, kind: str, example: JudgeExample | None) -> CheckResult:
    if _needs_traffic(kind):
        return _without_traffic(judge)
    if example is None:
        seen = "not checked: no recorded call yet; run the agent, or give --question and --answer"
        return CheckResult(_NAME, False, seen, skipped=True)
    row = example.question if example.is_row else None
    report = lint(judge, synthetic(row, example.question, example.answer, Place()), [])
    seen = f"on the given question {report.reason}"
    if report.outcome is LintOutcome.SOUND:
        return CheckResult(_NAME, True, seen)
    remedy = "see `ratchet judge lint`" if report.outcome is LintOutcome.FOOLED else _TRY_LINT
    return CheckResult(_NAME, False, seen, remedy)


def _without_traffic(judge: Judge) -> CheckResult:
    return CheckResult(_NAME, True, f"{judge.name} needs traffic, and no recent trajectory can be judged by it yet")
