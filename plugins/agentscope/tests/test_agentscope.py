"""`ratchet.agentscope`: the types of AgentScope's tuner as forms of Ratchet's, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import ratchet
from ratchet.agentscope import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    PromptTuneConfig,
    TunerModelConfig,
    WorkflowOutput,
    select_model,
    tune_prompt,
)
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec

TASK = {"question": "Capital of Norway?", "answer": "Oslo"}
NOWHERE = "http://127.0.0.1:9/v1"  # no server listens here


async def workflow(task: dict[str, Any]) -> WorkflowOutput:
    return WorkflowOutput(response=task["answer"])


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    right = float(task["answer"] in response.get_text_content())
    return JudgeOutput(reward=right, metrics={"right": right})


async def asks_a_model(task: dict[str, Any], model: ChatModelBase) -> WorkflowOutput:  # type: ignore[name-defined]  # noqa: F821
    return WorkflowOutput(response=await model([]))


async def judges_with_models(response: Any, auxiliary_models: dict[str, Any]) -> JudgeOutput:
    return JudgeOutput(reward=len(auxiliary_models))


async def judges_with_models_if_any(response: Any, auxiliary_models: Any = None, logger: Any = None) -> float:
    logger.debug("judged")
    return float(auxiliary_models is None and bool(response))


def waits_for_nothing(task: dict[str, Any], auxiliary_models: dict[str, Any]) -> str:
    return str(auxiliary_models) + str(task)


def test_it_is_imported_when_it_is_used_and_imports_no_agentscope() -> None:
    program = "import sys, ratchet; print('ratchet.agentscope' in sys.modules); import ratchet.agentscope; "
    program += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    bare, used = done.stdout.splitlines()
    assert bare == "False"
    assert not {"agentscope", "torch", "transformers", "datasets", "click"} & set(used.split())


def test_a_data_set_prints_and_returns_its_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{number} + 0?", "answer": str(number)} for number in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert DatasetConfig(path=str(tmp_path), split="train").preview(n=2) == rows[:2]
    assert json.loads(capsys.readouterr().out) == rows[:2]
    assert len(DatasetConfig(path=str(tmp_path)).preview()) == 5
    with pytest.raises(ratchet.TaskSetError, match="no split 'test'; it has train"):
        DatasetConfig(path=str(tmp_path), split="test").preview()
    assert DatasetConfig(path="openai/gsm8k", name="main").source == "openai/gsm8k:main"


def test_workflow_and_judge_return_what_ratchets_own_return() -> None:
    tried = ratchet.try_out(workflow, judge, TASK, base_url=NOWHERE)
    assert tried.judgement == ratchet.Judgement(1.0, {"right": 1.0})
    output = JudgeOutput(reward=0.5)
    assert isinstance(output, ratchet.Judgement)
    assert (output.reward, output.score, output.metrics) == (0.5, 0.5, {})
    named = ratchet.try_judge(lambda response: {"reward": 1, "metrics": {"length": len(response)}}, TASK, "Oslo")
    assert named.components == {"length": 4.0}
    assert ratchet.try_judge(lambda response: {"score": 1, "metrics": response}, TASK, "Oslo").components == {}


def test_the_models_settings_are_those_of_the_project() -> None:
    model = TunerModelConfig(model_path="Qwen/Qwen3-0.6B", max_model_len=4096, enable_thinking=False, max_tokens=64)
    vllm = {
        "max_model_len": 4096, "tensor_parallel_size": 1, "tool_call_parser": "auto", "reasoning_parser": "none",
    }  # fmt: skip
    assert model.settings == {"base_model": "Qwen/Qwen3-0.6B", "vllm": vllm}
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    assert model.sampling == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "extra_body": template}
    algorithm = AlgorithmConfig(algorithm_type="multi_step_grpo", learning_rate=1e-5, group_size=4, batch_size=16)
    trainer = {"advantage_estimator": "grpo", "num_generations": 4, "groups_per_round": 16}
    assert algorithm.settings == {"trainer": trainer, "learner": {"learning_rate": 1e-5}}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (DatasetConfig, {"path": ".", "name": "main"}, "name is 'main', and . is no hub name"),
        (DatasetConfig, {"path": ".", "split": ""}, "split is empty: name one"),
        (DatasetConfig, {"path": ".", "total_steps": 0}, "total_steps is 0: give a number from 1"),
        (TunerModelConfig, {"inference_engine_num": 2}, "inference_engine_num is 2: one vLLM is started"),
        (TunerModelConfig, {"tinker_config": {}}, "tinker_config is set: .*leave it out"),
        (TunerModelConfig, {"max_tokens": 0}, "max_tokens is 0"),
        (AlgorithmConfig, {"algorithm_type": "sft"}, "algorithm_type is 'sft': give one of multi_step_grpo, grpo"),
        (AlgorithmConfig, {"save_interval_steps": 100}, "save_interval_steps is set: every round is saved here"),
        (AlgorithmConfig, {"group_size": 0}, "group_size is 0"),
        (PromptTuneConfig, {"base_url": "http://127.0.0.1:1"}, "base_url is set without lm_model_name"),
        (PromptTuneConfig, {"optimization_level": "total"}, "optimization_level is 'total': give one of light, medium"),
    ],
)
def test_what_means_nothing_here_is_refused_with_the_remedy(
    kind: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    needed = {"model_path": "m", "max_model_len": 1024} if kind is TunerModelConfig else {}
    with pytest.raises(ratchet.RatchetError, match=rf"{kind.__name__}\.{message}"):
        kind(**needed, **given)


def test_a_function_that_cannot_get_its_models_is_refused_with_the_remedy() -> None:
    with pytest.raises(ratchet.WorkflowError, match=r"agentscope cannot be imported.*install it"):
        ratchet.try_out(asks_a_model, judge, TASK, base_url=NOWHERE, model="m")
    with pytest.raises(ratchet.WorkflowError, match="declare it with `async def`"):
        ratchet.try_out(waits_for_nothing, judge, TASK, base_url=NOWHERE, model="m")
    with pytest.raises(ratchet.JudgeError, match=r"takes `auxiliary_models`, and no server .*give base_url"):
        ratchet.try_judge(judges_with_models, TASK, "Oslo")
    with pytest.raises(ratchet.JudgeError, match=r"auxiliary_models: .*/v1/models names no model .*correct base_url"):
        ratchet.try_judge(judges_with_models, TASK, "Oslo", base_url=NOWHERE)
    assert ratchet.try_judge(judges_with_models_if_any, TASK, "Oslo").score == 1.0


def test_a_judges_settings_name_the_server_of_its_models() -> None:
    spec = {"kind": "function", "function": f"{__name__}:judges_with_models"}
    with pytest.raises(ratchet.JudgeError, match="give base_url"):
        make_judge(read_spec(spec), {})
    made = make_judge(read_spec({**spec, "base_url": "http://127.0.0.1:9"}), {})
    assert made.name == spec["function"]
    assert isinstance(made, FunctionJudge)
    assert not made.names_calls
    with pytest.raises(ratchet.JudgeError, match=r"http://127.0.0.1:9/v1/models names no model"):
        ratchet.try_judge({**spec, "base_url": "http://127.0.0.1:9"}, TASK, "Oslo")


async def test_the_methods_refuse_what_has_no_counterpart_before_anything_runs() -> None:
    sums, other = DatasetConfig(path="sums"), DatasetConfig(path="other", split="test")
    functions: Any = {"judge_func": judge, "train_dataset": sums}
    with pytest.raises(ratchet.RatchetError, match=r"candidate_models holds 3: give AgentScope's models, or names"):
        await select_model(workflow_func=workflow, candidate_models=["a", 3], **functions)
    with pytest.raises(ratchet.RatchetError, match="eval_dataset is the split test of other: put the tasks"):
        tune_prompt(workflow=workflow, init_system_prompt="Be brief.", eval_dataset=other, **functions)
    with pytest.raises(ratchet.WorkflowError, match="declare it with `async def`"):
        tune_prompt(workflow=cast("Any", waits_for_nothing), init_system_prompt="Be brief.", **functions)
