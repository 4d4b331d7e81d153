"""Ratchet: reinforcement learning from an agent's production traffic. Importing this package costs next to nothing.

The Python API (docs/python.md) is loaded on first use; `__init__.pyi` has its types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it. A table and not imports, so that importing a component loads no other one.
_MODULES = {
    "Attempt": "ratchet.api.evaluation",
    "Evaluation": "ratchet.api.evaluation",
    "Family": "ratchet.api.families",
    "InvalidArgument": "ratchet.errors",
    "JudgeError": "ratchet.trainer.errors",
    "Judgement": "ratchet.trainer.user_code.judgement",
    "RatchetError": "ratchet.errors",
    "RunCancelled": "ratchet.errors",
    "RunStatus": "ratchet.api.runs",
    "SampledCall": "ratchet.tuner.rollouts.trajectory_groups",
    "ScoredTrajectory": "ratchet.tuner.rollouts.trajectory_groups",
    "TaskSetError": "ratchet.trainer.errors",
    "Tasks": "ratchet.api.tasks",
    "TrainedVersion": "ratchet.api.train",
    "TrajectoryGroup": "ratchet.tuner.rollouts.trajectory_groups",
    "TryOut": "ratchet.api.try_out",
    "TuningError": "ratchet.trainer.errors",
    "TuningRun": "ratchet.api.runs",
    "WorkflowError": "ratchet.trainer.errors",
    "WorkflowOutput": "ratchet.tuner.rollouts.workflow_output",
    "evaluate": "ratchet.api.evaluate",
    "evaluate_async": "ratchet.api.evaluate",
    "gather": "ratchet.api.gather",
    "gather_async": "ratchet.api.gather",
    "score": "ratchet.api.score",
    "score_async": "ratchet.api.score",
    "select_model": "ratchet.api.select_model",
    "select_model_async": "ratchet.api.select_model",
    "services": "ratchet.api.train",
    "train": "ratchet.api.train",
    "train_async": "ratchet.api.train",
    "try_judge": "ratchet.api.try_out",
    "try_judge_async": "ratchet.api.try_out",
    "try_out": "ratchet.api.try_out",
    "try_out_async": "ratchet.api.try_out",
    "tune": "ratchet.api.tune",
    "tune_async": "ratchet.api.tune",
    "tune_prompt": "ratchet.api.tune_prompt",
    "tune_prompt_async": "ratchet.api.tune_prompt",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
