"""Whether the configured judge answers, tells answers apart and does not crash: a proof of `ratchet doctor`.

By recorded trajectories where there are any, the newest groups first, so that it is asked as the trainer asks it; else
by answers to a made-up question, as `ratchet judge lint` asks them. Records nothing; a judge that asks a language model
is asked about one group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.checks.check_result import CheckResult
from ratchet.settings.project_settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ratchet.store.records import Transcript, Verdict
    from ratchet.store.store import Store
    from ratchet.trainer.controller.judges import Judge

_NAME = "judge"
_GROUPS = 3
_MEMBERS = 8
_LEAST_SPREAD = 1e-9
_MEND = "mend it: an attempt that it fails on is dropped, not scored; `ratchet judge try TRAJECTORY` shows each"
_TELL_APART = "have it tell a good attempt from a bad one; `ratchet judge lint --trajectory ID` tries harder"
_ASK = "let the agent work and run this again, or ask it with `ratchet judge lint --task ... --answer ...`"
_WAITS = ("feedback", "next_state", "workflow")  # kinds that score what only traffic brings


def check_judge_quality(settings: Settings) -> CheckResult:
    """Return the finding on the project's judge."""
    import os

    from ratchet.store.errors import StoreError
    from ratchet.store.store import open_store
    from ratchet.trainer.controller.judges.make_judge import make_judge
    from ratchet.trainer.errors import TrainerError

    if not settings.has_judge:
        seen = "no judge is named: calls are recorded and nothing is trained"
        return CheckResult(_NAME, False, seen, "give --judge module:function or a YAML file, or set trainer.judge")
    try:
        spec = settings.trainer_settings(base_model=settings.base_model or "unused").judge
        judge = make_judge(spec, os.environ)
    except TrainerError as error:
        return CheckResult(_NAME, False, f"it cannot be made: {error}", "mend it, or name another one (trainer.judge)")
    try:
        store = open_store(settings.store_url)
        try:
            return proof(judge, spec.kind, store, settings.model)
        finally:
            store.close()
    except StoreError as error:
        return CheckResult(_NAME, False, f"the store cannot be read: {error}", "see `ratchet store verify`")
    finally:
        judge.close()


def proof(judge: Judge, kind: str, store: Store, alias: str) -> CheckResult:
    """Return the finding on a judge of a kind by what a store holds of an alias."""
    groups = list(_recorded(store, alias))
    if not groups:
        return _waits(judge) if kind in _WAITS else _by_lint(judge)
    said = [judge.judge(None, members).verdicts for members in groups[: _GROUPS if _is_quick(kind) else 1]]
    verdicts = [verdict for verdicts in said for verdict in verdicts]
    failed = [verdict.failure for verdict in verdicts if verdict.failure is not None]
    if failed and kind in _WAITS:
        return _waits(judge)
    if failed:
        return CheckResult(_NAME, False, f"{judge.name} fails on {len(failed)} of {len(verdicts)}: {failed[0]}", _MEND)
    if not _differ(verdicts) and (reason := _blind(judge, groups[0][0])):
        return CheckResult(_NAME, False, reason, _TELL_APART)
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    seen = f"{judge.name} scored {len(scores)} recorded trajectories, {min(scores):g} to {max(scores):g}"
    return CheckResult(_NAME, True, f"{seen}, and tells answers apart")


def _recorded(store: Store, alias: str) -> Iterator[Sequence[Transcript]]:
    """Yield the newest groups' members; without a group the newest trajectories of traffic, as one."""
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    groups = [group for group in store.groups.page(20) if group.alias == alias and group.members]
    for group in groups[:_GROUPS]:
        yield [store.trajectories.read(name) for name in group.members[:_MEMBERS]]
    if not groups:
        newest = store.trajectories.page(100, chosen=TrajectoryFilter(alias=alias))
        live = [run.id for run in newest if run.purpose == "live" and run.drop_reason is None]
        if live:
            yield [store.trajectories.read(name) for name in live[:_MEMBERS]]


def _is_quick(kind: str) -> bool:
    return kind in ("function", "answer", "behavior", *_WAITS)


def _differ(verdicts: Sequence[Verdict]) -> bool:
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    return max(scores) - min(scores) > _LEAST_SPREAD


def _blind(judge: Judge, member: Transcript) -> str | None:
    """Return why a judge would teach nothing: it scores a recorded trajectory alike whatever its answer is."""
    from ratchet.tuner.rollouts.diagnosis import judge_problems

    return next((reason.seen for reason in judge_problems(judge, member)), None)


def _waits(judge: Judge) -> CheckResult:
    return CheckResult(
        _NAME, True, f"{judge.name} scores what only traffic brings: there is nothing yet to ask it about"
    )


def _by_lint(judge: Judge) -> CheckResult:
    from ratchet.trainer.controller.judges.audit.lint import LintOutcome, lint
    from ratchet.trainer.controller.judges.audit.lint_transcripts import Place, synthetic

    report = lint(judge, synthetic(None, "What is the capital of Norway?", "Oslo", Place()), ["Rome", "Paris"])
    if report.outcome is LintOutcome.SOUND:
        return CheckResult(_NAME, True, f"nothing is recorded yet; {report.reason}")
    if report.outcome is LintOutcome.FOOLED:
        return CheckResult(_NAME, False, f"nothing is recorded yet; {report.reason}", "see `ratchet judge lint`")
    return CheckResult(_NAME, False, f"not proven: nothing is recorded yet, and {report.reason}", _ASK)
