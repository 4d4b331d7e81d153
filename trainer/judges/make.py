"""From what a judge is told to the judge. Secrets come from the environment that is given."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.trainer.judges import Judge
from ratchet.trainer.judges.answer import AnswerJudge
from ratchet.trainer.judges.composite import CompositeJudge, Part
from ratchet.trainer.judges.conduct import ConductJudge
from ratchet.trainer.judges.feedback import FeedbackJudge
from ratchet.trainer.judges.function import FunctionJudge
from ratchet.trainer.judges.grader import GraderJudge
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.judges.next_state import NextStateJudge
from ratchet.trainer.judges.openjudge import OpenJudgeJudge
from ratchet.trainer.judges.reward import RewardJudge
from ratchet.trainer.judges.ruler import RulerJudge
from ratchet.trainer.judges.settings import (
    AnswerSpec,
    CompositeSpec,
    ConductSpec,
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
        return FunctionJudge(spec.function, at_once=spec.at_once)
    if isinstance(spec, AnswerSpec):
        return AnswerJudge(spec)
    if isinstance(spec, ConductSpec):
        return ConductJudge(spec)
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
