"""The types of AgentScope's tuner, as forms of Ratchet's own; `settings` says what they set. Pure but for `preview`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.api.arguments import Tasks
from ratchet.trainer.errors import SettingError
from ratchet.trainer.user_code import Judgement
from ratchet.tuner.rollouts.workflow import WorkflowOutput
from ratchet.tuner.settings import SEARCH_ROLLOUTS

WorkflowType = Callable[..., Awaitable[WorkflowOutput]]
JudgeType = Callable[..., Awaitable["JudgeOutput"]]

_EFFORT = {"light": None, "medium": 2 * SEARCH_ROLLOUTS, "heavy": 4 * SEARCH_ROLLOUTS}
_ADVANTAGES = {"multi_step_grpo": "grpo", "grpo": "grpo", "rloo": "rloo", "reinforceplusplus": "reinforce++"}


class JudgeOutput(Judgement):
    """A Judgement whose score is `reward` and whose components are `metrics`."""

    __slots__ = ()

    def __init__(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(reward, metrics or {})

    @property
    def reward(self) -> float:
        """The score."""
        return self.score

    @property
    def metrics(self) -> Mapping[str, float]:
        """The components."""
        return self.components


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """A split of a task set. Raises SettingError.

    path          a folder, a file or a name of the Hugging Face hub
    name          configuration of a hub name
    split         the split to read
    total_epochs  how often training passes over the split
    total_steps   rounds of training, in place of total_epochs
    """

    path: str
    name: str | None = None
    split: str = "train"
    total_epochs: int = 1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None and Path(self.path).expanduser().exists():
            raise SettingError(f"DatasetConfig.name is {self.name!r}, and {self.path} is no hub name: leave it out")
        if not self.split:
            raise SettingError("DatasetConfig.split is empty: name one split, such as train")
        _positive("DatasetConfig", total_epochs=self.total_epochs, total_steps=self.total_steps)

    @property
    def source(self) -> str:
        """The task set, as Ratchet names it."""
        return self.path if self.name is None else f"{self.path}:{self.name}"

    def preview(self, n: int = 5) -> list[Mapping[str, Any]]:
        """Print the first rows as JSON, and return them. Raises TaskSetError."""
        rows = Tasks(self.source, split=self.split).preview(n)
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerModelConfig:
    """The model to tune, and how it is served and sampled. Raises SettingError.

    model_path            folder or hub name of the base model
    max_model_len         longest context, tokens
    temperature, top_p, max_tokens  sampling of the tuned model's requests
    enable_thinking       of chat templates that can turn thinking off; None: the template's default
    tensor_parallel_size  GPUs over which vLLM splits the model
    inference_engine_num  1: `ratchet up` starts one vLLM
    tool_call_parser      vLLM's; auto: the one for the model's chat template
    reasoning_parser      vLLM's; None: none
    tinker_config         None: the learner of this project trains
    """

    model_path: str
    max_model_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = 1
    inference_engine_num: int = 1
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    tinker_config: None = None

    def __post_init__(self) -> None:
        _positive(
            "TunerModelConfig", max_model_len=self.max_model_len, max_tokens=self.max_tokens,
            tensor_parallel_size=self.tensor_parallel_size,
        )  # fmt: skip
        if self.inference_engine_num != 1:
            raise SettingError(
                f"TunerModelConfig.inference_engine_num is {self.inference_engine_num}: one vLLM is started here; "
                "start others yourself as replicas (docs/production.md), or leave it out"
            )
        if self.tinker_config is not None:
            raise SettingError(
                "TunerModelConfig.tinker_config is set: Tinker is a service of others, and this project's learner "
                "trains; leave it out"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The project's settings, as ratchet.yaml has them."""
        vllm = {
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel_size,
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser or "none",
        }
        return {"base_model": self.model_path, "vllm": vllm}

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters of the tuned model's requests."""
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }
        if self.enable_thinking is not None:
            sampling["extra_body"] = {"chat_template_kwargs": {"enable_thinking": self.enable_thinking}}
        return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How the weights are trained. Raises SettingError.

    algorithm_type       multi_step_grpo, grpo, rloo or reinforceplusplus
    learning_rate        None: chosen by the learner, which trains a LoRA adapter (AgentScope's 1e-6 is for all weights)
    group_size           attempts at one task
    batch_size           tasks of a round
    save_interval_steps  None: every round is saved
    eval_interval_steps  rounds between two validations; None: the tuner's default
    """

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float | None = None
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: None = None
    eval_interval_steps: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm_type not in _ADVANTAGES:
            raise SettingError(
                f"AlgorithmConfig.algorithm_type is {self.algorithm_type!r}: give one of {', '.join(_ADVANTAGES)}; "
                "other losses are set by learner.loss_type (docs/training.md)"
            )
        if self.save_interval_steps is not None:
            raise SettingError(
                "AlgorithmConfig.save_interval_steps is set: every round is saved here, and trainer.keep_checkpoints "
                "says how many are kept; leave it out"
            )
        _positive(
            "AlgorithmConfig", group_size=self.group_size, batch_size=self.batch_size,
            eval_interval_steps=self.eval_interval_steps,
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """The project's settings, as ratchet.yaml has them."""
        trainer = {
            "advantage_estimator": _ADVANTAGES[self.algorithm_type],
            "num_generations": self.group_size,
            "groups_per_round": self.batch_size,
        }
        rate = {} if self.learning_rate is None else {"learner": {"learning_rate": self.learning_rate}}
        return {"trainer": trainer, **rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTuneConfig:
    """How a prompt is searched for. Raises SettingError.

    lm_model_name       the model that proposes prompts; None: `tuner.reflection` of ratchet.yaml
    base_url            its OpenAI-compatible server; None: that of its entry in `model_list`
    optimization_level  light: the tuner's default of rollouts; medium: twice as many; heavy: four times
    eval_num_threads    concurrent rollouts
    """

    lm_model_name: str | None = None
    base_url: str | None = None
    optimization_level: str = "light"
    eval_num_threads: int = 16

    def __post_init__(self) -> None:
        if self.lm_model_name is None and self.base_url is not None:
            raise SettingError(
                "PromptTuneConfig.base_url is set without lm_model_name: name the model, or leave both out and set "
                "tuner.reflection in ratchet.yaml"
            )
        if self.optimization_level not in _EFFORT:
            raise SettingError(
                f"PromptTuneConfig.optimization_level is {self.optimization_level!r}: give one of {', '.join(_EFFORT)}"
            )
        _positive("PromptTuneConfig", eval_num_threads=self.eval_num_threads)

    @property
    def max_rollouts(self) -> int | None:
        """The limit of all rollouts; None: the tuner's default."""
        return _EFFORT[self.optimization_level]


def _positive(kind: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise SettingError(f"{kind}.{name} is {value}: give a number from 1")
