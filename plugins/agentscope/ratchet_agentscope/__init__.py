"""AgentScope's tuner on Ratchet, for code that is written for it (docs/python.md).

`from ratchet.agentscope import tune_prompt, DatasetConfig` stands for the same import from `agentscope.tuner`; that is
this package under another name. AgentScope itself is imported when a model is made, and what runs the methods when one
of them is used.
"""

from typing import TYPE_CHECKING, Any

from ratchet.tuner.rollouts.workflow import WorkflowOutput
from ratchet_agentscope.types import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    JudgeType,
    PromptTuneConfig,
    TunerModelConfig,
    WorkflowType,
)

if TYPE_CHECKING:
    from ratchet_agentscope.methods import select_model, tune, tune_prompt

__all__ = [
    "AlgorithmConfig", "DatasetConfig", "JudgeOutput", "JudgeType", "PromptTuneConfig", "TunerModelConfig",
    "WorkflowOutput", "WorkflowType", "select_model", "tune", "tune_prompt",
]  # fmt: skip
_METHODS = ("select_model", "tune", "tune_prompt")


def __getattr__(name: str) -> Any:
    if name not in _METHODS:
        raise AttributeError(f"module 'ratchet.agentscope' has no attribute {name!r}; it has {', '.join(__all__)}")
    from ratchet_agentscope import methods

    return getattr(methods, name)
