"""Makes the judge of a specification: a built-in one, or a plug-in of the group `ratchet.judges`.

Secrets come from the environment that is passed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError

from ratchet.store.operation_records import Tuning
from ratchet.store.records import Transcript
from ratchet.store.states import TuningState
from ratchet.trainer.errors import JudgeError, PluginError
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement, Judge, NamedJudge
from ratchet.trainer.judges.kinds.answer import AnswerJudge
from ratchet.trainer.judges.kinds.combined import ByFamilyJudge, CompositeJudge, Part
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.kinds.given_scores import FeedbackJudge, RewardJudge
from ratchet.trainer.judges.kinds.http_grader import AWAY, CallerJudge, GraderJudge
from ratchet.trainer.judges.kinds.ruler import RulerJudge
from ratchet.trainer.judges.kinds.teacher import TeacherJudge
from ratchet.trainer.judges.language_model import LanguageModel, key_of_model
from ratchet.trainer.settings.judge_specs import (
    AnswerSpec,
    ByFamilySpec,
    CallerSpec,
    CompositeSpec,
    FeedbackSpec,
    FunctionSpec,
    GraderSpec,
    JudgeSpec,
    PluginSpec,
    RewardSpec,
    TeacherSpec,
    read_spec,
)
from ratchet.trainer.user_code import JUDGES, ModelServer, load_plugin


def make_judge(spec: JudgeSpec, environ: Mapping[str, str]) -> Judge:
    """Return the judge. Raises JudgeError if it cannot be made."""
    if isinstance(spec, FunctionSpec):
        key = environ.get(spec.api_key_env)
        models = None if spec.base_url is None else ModelServer(spec.base_url, key)
        return FunctionJudge(spec.function, concurrency=spec.concurrency, models=models)
    if isinstance(spec, AnswerSpec):
        return AnswerJudge(spec)
    if isinstance(spec, FeedbackSpec):
        return FeedbackJudge(spec)
    if isinstance(spec, GraderSpec):
        return GraderJudge(spec, environ.get(spec.secret_env))
    if isinstance(spec, CallerSpec):
        return CallerJudge(spec)
    if isinstance(spec, PluginSpec):
        return _plugin(spec, environ)
    if isinstance(spec, RewardSpec):
        return RewardJudge(spec)
    if isinstance(spec, TeacherSpec):
        return TeacherJudge(spec, environ)
    if isinstance(spec, CompositeSpec):
        return CompositeJudge(
            [
                Part(part.name, make_judge(part.judge, environ), part.weight or 0.0, part.penalty or 0.0)
                for part in spec.parts
            ]
        )
    if isinstance(spec, ByFamilySpec):
        other = None if spec.other is None else make_judge(spec.other, environ)
        return ByFamilyJudge({name: make_judge(judge, environ) for name, judge in spec.judges.items()}, other)
    return RulerJudge(spec, LanguageModel(spec, key_of_model(spec, environ)))


def _plugin(spec: PluginSpec, environ: Mapping[str, str]) -> Judge:
    try:
        judge: Judge = load_plugin(JUDGES, spec.name)(spec.settings, environ)
    except JudgeError:
        raise
    except PluginError as error:
        raise JudgeError(f"judge {spec.name}: {error}") from error
    except Exception as error:  # a plug-in's factory may fail in any way
        raise JudgeError(f"judge {spec.name}: the plug-in cannot be made: {type(error).__name__}: {error}") from error
    return judge


# RunJudges: an agent's judge, and in its place a run's own judge for the rollouts of that run.
#
# A run of the tuner may bring a judge (`run_judge` of its request), such as a function of a notebook. One that names
# code to import is refused: with it, write access to the store would be enough to run code in the trainer. While the
# calling process is away, the run's rollouts wait, and the reason says how to go on; once the run is done, they fail.

RUN_JUDGE = "run_judge"  # key of a run's request
_OTHER_RUN = "another run sampled it, which has a judge of its own: scores of different judges are not compared"


class RunJudges(NamedJudge):
    """The judge of an agent and those of the runs that bring their own. `run_of` returns a run by its id."""

    def __init__(self, judge: Judge, run_of: Callable[[str], Tuning], clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._judge = judge
        self._run_of = run_of
        self._lock = threading.Lock()
        self._own: dict[str, Judge] = {}  # by run
        self.name, self.version, self.concurrency = judge.name, judge.version, judge.concurrency

    def close(self) -> None:
        for judge in (self._judge, *self._own.values()):
            judge.close()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order; the judge of the first member judges."""
        runs = self._runs_with_judge(members)
        first = runs.get(_run_id(members[0]))
        chosen = [member for member in members if runs.get(_run_id(member)) == first]
        judgement = self._judge.judge(group_id, chosen) if first is None else self._ask(first, group_id, chosen)
        verdicts = {one.trajectory_id: one for one in judgement.verdicts}
        for member in members:
            verdicts.setdefault(member.trajectory.id, self.record(DraftVerdict.failed(_OTHER_RUN), group_id, member))
        return replace(judgement, verdicts=tuple(verdicts[member.trajectory.id] for member in members))

    def _runs_with_judge(self, members: Sequence[Transcript]) -> dict[str | None, Tuning]:
        names = {name for name in map(_run_id, members) if name is not None}
        return {name: run for name in names if (run := self._run_of(name)).config.get(RUN_JUDGE)}

    def _ask(self, run: Tuning, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        if run.state is TuningState.DONE:
            return self._all_failed(f"run {run.id} is done, and its judge with it", group_id, members)
        try:
            judgement = self._judge_of(run).judge(group_id, members)
        except (JudgeError, ValidationError) as error:
            return self._all_failed(f"the judge of run {run.id} cannot be made: {error}", group_id, members)
        if judgement.unavailable is None or AWAY not in judgement.unavailable:
            return judgement
        remedy = f"run {run.id} waits for it: run the cell again with resume={run.id!r}"
        return replace(judgement, unavailable=f"{judgement.unavailable}; {remedy}")

    def _judge_of(self, run: Tuning) -> Judge:
        with self._lock:
            if run.id not in self._own:
                spec = read_spec(run.config[RUN_JUDGE])
                if _loads_code(spec):
                    raise JudgeError("it names code to import; set it as trainer.judge instead")
                self._own[run.id] = make_judge(spec, os.environ)
            return self._own[run.id]

    def _all_failed(self, reason: str, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        failed = DraftVerdict.failed(reason)
        return GroupJudgement(tuple(self.record(failed, group_id, member) for member in members))


def _run_id(member: Transcript) -> str | None:
    return None if member.returned is None else member.returned.tuning_id


def _loads_code(judge: JudgeSpec) -> bool:
    """Return whether a judge imports code that its specification names."""
    if isinstance(judge, CompositeSpec):
        return any(_loads_code(part.judge) for part in judge.parts)
    if isinstance(judge, ByFamilySpec):
        return any(map(_loads_code, judge.all))
    return isinstance(judge, (FunctionSpec, PluginSpec))
