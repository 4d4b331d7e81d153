"""From what a judge is told to the judge. Secrets come from the environment that is given."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.kinds.answer import AnswerJudge
from ratchet.trainer.controller.judges.kinds.behavior_rules import BehaviorJudge
from ratchet.trainer.controller.judges.kinds.composite import CompositeJudge, Part
from ratchet.trainer.controller.judges.kinds.feedback import FeedbackJudge
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.kinds.http_grader import GraderJudge
from ratchet.trainer.controller.judges.kinds.next_state import NextStateJudge
from ratchet.trainer.controller.judges.kinds.openjudge import OpenJudgeJudge
from ratchet.trainer.controller.judges.kinds.ruler import RulerJudge
from ratchet.trainer.controller.judges.kinds.workflow_reward import RewardJudge
from ratchet.trainer.controller.judges.language_model import LanguageModel
from ratchet.trainer.settings.judge_specs import (
    AnswerSpec,
    BehaviorSpec,
    CompositeSpec,
    FeedbackSpec,
    FunctionSpec,
    GraderSpec,
    JudgeSpec,
    NextStateSpec,
    OpenJudgeSpec,
    RewardSpec,
)


def make_judge(spec: JudgeSpec, environ: Mapping[str, str]) -> Judge:
    """Return the judge. Raises JudgeError where it cannot be made."""
    if isinstance(spec, FunctionSpec):
        return FunctionJudge(spec.function, concurrency=spec.concurrency)
    if isinstance(spec, AnswerSpec):
        return AnswerJudge(spec)
    if isinstance(spec, BehaviorSpec):
        return BehaviorJudge(spec)
    if isinstance(spec, FeedbackSpec):
        return FeedbackJudge(spec)
    if isinstance(spec, GraderSpec):
        return GraderJudge(spec, environ.get(spec.secret_env))
    if isinstance(spec, OpenJudgeSpec):
        return OpenJudgeJudge(spec, environ)
    if isinstance(spec, RewardSpec):
        return RewardJudge(spec)
    if isinstance(spec, CompositeSpec):
        return CompositeJudge(
            [
                Part(part.name, make_judge(part.judge, environ), part.weight or 0.0, part.penalty or 0.0)
                for part in spec.parts
            ]
        )
    model = LanguageModel(spec, environ.get(spec.api_key_env))
    return NextStateJudge(spec, model) if isinstance(spec, NextStateSpec) else RulerJudge(spec, model)
