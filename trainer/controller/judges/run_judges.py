"""RunJudges: an agent's judge, and in its place a run's own judge for the rollouts of that run.

A run of the tuner may bring a judge (`run_judge` of its request), such as a function of a notebook. One that names code
to import is refused: with it, write access to the store would be enough to run code in the trainer. While the calling
process is away, the run's rollouts wait, and the reason says how to go on; once the run is done, they fail.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic import ValidationError

from ratchet.store.operation_records import Tuning
from ratchet.store.records import Transcript, Verdict
from ratchet.store.states import TuningState
from ratchet.trainer.controller.judges import GroupJudgement, Judge
from ratchet.trainer.controller.judges.kinds.caller import AWAY
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.controller.judges.opinion import DraftVerdict
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.settings.judge_specs import (
    ByFamilySpec,
    CompositeSpec,
    FunctionSpec,
    JudgeSpec,
    PluginSpec,
    read_spec,
)

RUN_JUDGE = "run_judge"  # key of a run's request
_OTHER_RUN = "another run sampled it, which has a judge of its own: scores of different judges are not compared"


class RunJudges:
    """The judge of an agent and those of the runs that bring their own. `run_of` returns a run by its id."""

    def __init__(self, judge: Judge, run_of: Callable[[str], Tuning], clock: Callable[[], float] = time.time) -> None:
        self._judge = judge
        self._run_of = run_of
        self._clock = clock
        self._lock = threading.Lock()
        self._own: dict[str, Judge] = {}  # by run
        self.name, self.version, self.concurrency = judge.name, judge.version, judge.concurrency

    def close(self) -> None:
        """Close every judge."""
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
            verdicts.setdefault(member.trajectory.id, self._failed(_OTHER_RUN, group_id, member))
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
        return GroupJudgement(tuple(self._failed(reason, group_id, member) for member in members))

    def _failed(self, reason: str, group_id: str | None, member: Transcript) -> Verdict:
        failed = DraftVerdict.failed(reason)
        return failed.verdict(member, group_id, judge=self.name, version=self.version, judged_at=self._clock())


def _run_id(member: Transcript) -> str | None:
    return None if member.returned is None else member.returned.tuning_id


def _loads_code(judge: JudgeSpec) -> bool:
    """Return whether a judge imports code that its specification names."""
    if isinstance(judge, CompositeSpec):
        return any(_loads_code(part.judge) for part in judge.parts)
    if isinstance(judge, ByFamilySpec):
        return any(map(_loads_code, judge.all))
    return isinstance(judge, (FunctionSpec, PluginSpec))
