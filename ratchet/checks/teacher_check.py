"""Check of `ratchet doctor` for a judge of the kind teacher: it scores token ids and has the policy's tokens.

It sends a few short texts to be tokenized to both servers, and three token ids to be scored to the teacher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from ratchet.checks.check_result import CheckResult, no_project
from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings

_NAME = "teacher"


def has_teacher(settings: Settings) -> bool:
    """Return whether the judge is a teacher."""
    judge = settings.trainer.get("judge")
    return isinstance(judge, Mapping) and judge.get("kind") == "teacher"


def check_teacher(settings: Settings, running: Mapping[str, Any]) -> CheckResult:
    """Return the result for a running project."""
    from ratchet.trainer.adapters.vllm_api import VllmServer
    from ratchet.trainer.controller.judges.kinds.teacher import TeacherJudge
    from ratchet.trainer.errors import EngineUnreachable, TrainerError
    from ratchet.trainer.settings.judge_specs import TeacherSpec

    if "vllm_url" not in running:
        return no_project(_NAME, running)
    try:
        spec = settings.trainer_settings(base_model=settings.base_model or "unused").judge
        assert isinstance(spec, TeacherSpec)
        policy = VllmServer(running["vllm_url"], timeout=30, key=os.environ.get("RATCHET_UPSTREAM_API_KEY"))
        with (
            contextlib.closing(policy),
            contextlib.closing(TeacherJudge(spec, os.environ, policy=lambda: policy)) as one,
        ):
            max_length = one.check()
    except EngineUnreachable as error:
        return CheckResult(_NAME, False, str(error), "start the teacher's vLLM; until it answers, trajectories wait")
    except (TrainerError, CliError) as error:
        return CheckResult(_NAME, False, str(error), "correct trainer.judge, or the entry of model_list")
    limit = f", up to {max_length} tokens" if max_length else ""
    return CheckResult(_NAME, True, f"{spec.model} at {spec.base_url} scores the policy's token ids{limit}")
