"""Makes the judge of a specification: a built-in one, or a plug-in of the group `ratchet.judges`.

Secrets come from the environment that is passed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.kinds.answer import AnswerJudge
from ratchet.trainer.controller.judges.kinds.by_family import ByFamilyJudge
from ratchet.trainer.controller.judges.kinds.caller import CallerJudge
from ratchet.trainer.controller.judges.kinds.composite import CompositeJudge, Part
from ratchet.trainer.controller.judges.kinds.feedback import FeedbackJudge
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.kinds.http_grader import GraderJudge
from ratchet.trainer.controller.judges.kinds.ruler import RulerJudge
from ratchet.trainer.controller.judges.kinds.teacher import TeacherJudge
from ratchet.trainer.controller.judges.kinds.workflow_reward import RewardJudge
from ratchet.trainer.controller.judges.language_model import LanguageModel, key_of_model
from ratchet.trainer.errors import JudgeError, PluginError
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
)
from ratchet.trainer.user_code.entry_points import ModelServer
from ratchet.trainer.user_code.plugins import JUDGES, load_plugin


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
