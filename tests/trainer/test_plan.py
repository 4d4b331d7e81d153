"""The plan: parameters counted exactly; GPUs and settings that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from ratchet.trainer.errors import ModelDoesNotFit, ModelShapeUnknown
from ratchet.trainer.learner import forward_pass
from ratchet.trainer.planning import memory as plan_memory
from ratchet.trainer.planning.memory import GIB, LearnerOption, kv_cache_bytes, learner_memory, serving_memory
from ratchet.trainer.planning.model_shape import (
    FAMILIES,
    ModelShape,
    adapted_layers,
    count_lora_parameters,
    count_parameters,
    read_shape,
)
from ratchet.trainer.planning.plan import USABLE, Plan, PlanRequest, make_plan, tensor_parallel_sizes
from tests.harness.trainer.model_configs import REAL, TINY, VARIANTS

SHAPES = {name: read_shape(config.to_dict()) for name, config in REAL.items()}
SEVEN_B = SHAPES["Qwen2.5-7B"]
GPUS = [(1, 24, 8192), (1, 48, 8192), (1, 80, 32768), (2, 80, 32768), (8, 80, 32768), (8, 80, 131072), (64, 80, 32768)]


def planned(shape: ModelShape, gpus: int, gib: int, context: int) -> Plan | None:
    try:
        return make_plan(shape, PlanRequest(gpus, gib * GIB, context))
    except ModelDoesNotFit:
        return None


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("gpus", "gib", "context"), GPUS)
def test_what_is_planned_fits(name: str, gpus: int, gib: int, context: int) -> None:
    plan = planned(SHAPES[name], gpus, gib, context)
    if plan is None:
        return
    vllm = plan.gpu_memory_utilization * gib * GIB
    assert plan.serving.least <= vllm
    assert plan.concurrent_sequences >= 1
    learner = plan.learner.memory.total
    if plan.shared:
        assert gpus == 1
        assert vllm + learner <= USABLE * gib * GIB
    else:
        assert plan.vllm_gpus + plan.learner_gpus == gpus
        assert max(vllm, learner) <= gib * GIB
    assert plan.learner.max_row_length >= context
    assert plan.vllm_gpus in tensor_parallel_sizes(SHAPES[name])


def test_the_commonest_machines_have_a_plan() -> None:
    """0.5B on one GPU of 24 GB, 7B on one of 48 and 80 GB, 32B and 70B on eight of 80 GB."""
    small = planned(SHAPES["Qwen2.5-0.5B"], 1, 24, 8192)
    assert small is not None
    assert small.learner.option == LearnerOption()
    for gib in (48, 80):
        seven = planned(SEVEN_B, 1, gib, 8192)
        assert seven is not None
        assert 0.3 < seven.gpu_memory_utilization < 0.7
    for name in ("Qwen3-32B", "Llama-3.3-70B"):
        large = planned(SHAPES[name], 8, 80, 32768)
        assert large is not None
        assert large.learner.option.sharding == "fsdp2"


def test_the_mask_of_trees_is_planned_where_rows_can_share_prefixes() -> None:
    """2 bytes x tokens x the tokens of the longest tree, which the learner limits."""
    assert plan_memory.MAX_TREE_TOKENS == forward_pass.MAX_TREE_TOKENS
    alone = LearnerOption(gradient_checkpointing=True, share_prefixes=False)

    def mask(name: str, tokens: int) -> int:
        with_trees = learner_memory(SHAPES[name], replace(alone, share_prefixes=True), tokens)
        return with_trees.total - learner_memory(SHAPES[name], alone, tokens).total

    assert mask("Qwen2.5-7B", 8192) == 2 * 8192**2
    assert mask("Qwen2.5-7B", 32768) == 2 * 32768 * 8192
    assert mask("gpt-oss-120b", 8192) == 0


def test_the_first_option_that_fits_is_chosen_and_the_others_are_listed() -> None:
    plan = planned(SEVEN_B, 8, 80, 131072)
    assert plan is not None
    before = plan.alternatives[: plan.alternatives.index(plan.learner)]
    assert before
    assert not any(fit.fits for fit in before)
    assert all(fit.max_row_length < 131072 for fit in before)


def test_a_refusal_has_figures_and_a_remedy_that_holds() -> None:
    request = PlanRequest(1, 24 * GIB, 8192)
    with pytest.raises(ModelDoesNotFit, match=r"1 GPU\(s\) of 24 GiB.*weights 14\.2.*; use 2 such GPUs, or take a sm"):
        make_plan(SEVEN_B, request)
    assert make_plan(SEVEN_B, replace(request, gpus=2))
    long = PlanRequest(8, 80 * GIB, 131072)
    with pytest.raises(ModelDoesNotFit, match=r"plan for a context of 32768 tokens, which fits"):
        make_plan(SHAPES["Llama-3.3-70B"], long)
    assert make_plan(SHAPES["Llama-3.3-70B"], replace(long, context=32768))


def test_memory_follows_the_settings() -> None:
    def total(tokens: int = 8192, gpus: int = 1, rank: int = 16, **option: object) -> int:
        return learner_memory(SEVEN_B, LearnerOption(**option), tokens, gpus=gpus, rank=rank).total  # type: ignore[arg-type]

    plain = total()
    assert total(gradient_checkpointing=True) < plain
    assert total(gradient_checkpointing=True, activation_offload=True) < total(gradient_checkpointing=True)
    assert total(quantization="nf4") < plain
    assert total(tokens=16384) > plain
    assert total(rank=32) > plain
    assert total(gpus=8, sharding="fsdp2") < total(gpus=2, sharding="fsdp2") < plain
    adam = learner_memory(SEVEN_B, LearnerOption(), 8192)
    assert adam.optimizer == 2 * adam.adapter == 2 * adam.gradients


def test_nf4_weights_take_four_bits_and_their_scales() -> None:
    """The linear layers of 7B: 6.53 billion weights at 4.127 bits (QLoRA, section 3); the embeddings stay in bf16."""
    memory = learner_memory(SEVEN_B, LearnerOption(quantization="nf4"), 1024)
    linear, embeddings = 6_525_288_448, 2 * 152064 * 3584
    assert memory.weights == pytest.approx(linear * 4.127 / 8 + 2 * embeddings, rel=1e-3)


def test_vllm_splits_weights_and_cache_over_its_gpus() -> None:
    one, four = (serving_memory(SEVEN_B, 32768, tensor_parallel=size) for size in (1, 4))
    assert four.weights * 4 == pytest.approx(one.weights)
    assert four.kv_cache_per_sequence * 4 == one.kv_cache_per_sequence
    more = serving_memory(SEVEN_B, 32768, tensor_parallel=4, max_loras=8)
    assert more.adapters == 2 * four.adapters


def test_published_mxfp4_weights_are_served_as_they_are_and_trained_in_bf16() -> None:
    """gpt-oss-120b's files are 65 GB: https://huggingface.co/openai/gpt-oss-120b."""
    config = REAL["gpt-oss-120b"].to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    shape = read_shape(config)
    assert serving_memory(shape, 8192).weights / 1e9 == pytest.approx(65, rel=0.05)
    assert learner_memory(shape, LearnerOption(), 1024).weights / 1e9 == pytest.approx(2 * 116.8, rel=0.01)


def test_planning_loads_no_torch() -> None:
    import subprocess
    import sys

    program = "import sys, ratchet.trainer.planning.plan; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Of PEFT, which maps the patterns of experts to names that the model does not have.

ALL = TINY | VARIANTS | REAL
RANK = 8


def built(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def adapter_sizes(config: PretrainedConfig, **lora: Any) -> int:
    """The adapter's parameters by PEFT, without those of routers and of a vision tower."""
    model: Any = built(config)
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(r=RANK, task_type="CAUSAL_LM", **lora))
    left_out = (".gate.", ".router.", "vision_tower", "multi_modal_projector")
    trained = ((name, parameter) for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    return sum(parameter.numel() for name, parameter in trained if not any(part in name for part in left_out))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_exactly(name: str) -> None:
    shape = read_shape(ALL[name].to_dict())
    assert count_parameters(shape).total == built(ALL[name]).num_parameters()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ALL)
def test_a_config_file_may_leave_out_what_is_the_default(name: str) -> None:
    assert read_shape(ALL[name].to_diff_dict()) == read_shape(ALL[name].to_dict())


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("gpt_oss", "qwen3_moe with dense layers")])
def test_lora_parameters_are_counted_exactly(name: str) -> None:
    shape = read_shape(ALL[name].to_dict())
    layers = adapted_layers(shape)
    if name == "gpt-oss-120b":  # PEFT adapts its experts only where they are named
        layers = tuple(layer for layer in layers if not layer.stacked)
    assert count_lora_parameters(layers, RANK) == adapter_sizes(ALL[name], target_modules="all-linear")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_lora_parameters_of_named_layers_and_of_experts() -> None:
    attention = ["q_proj", "v_proj"]
    seven = REAL["Qwen2.5-7B"]
    named = adapted_layers(read_shape(seven.to_dict()), attention)
    assert count_lora_parameters(named, RANK) == adapter_sizes(seven, target_modules=attention)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    gpt = REAL["gpt-oss-120b"]
    everything = adapted_layers(read_shape(gpt.to_dict()))
    by_peft = adapter_sizes(gpt, target_modules="all-linear", target_parameters=experts)
    assert count_lora_parameters(everything, RANK) == by_peft


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_the_cache_of_a_layer_with_a_window_ends_at_the_window() -> None:
    gemma, qwen = read_shape(REAL["gemma-3-4b"].to_dict()), read_shape(REAL["Qwen2.5-7B"].to_dict())
    assert kv_cache_bytes(qwen, 1000) == 1000 * 2 * 28 * 4 * 128 * 2
    assert (gemma.sliding_layers, gemma.window) == (29, 1024)
    assert kv_cache_bytes(gemma, 8192) == 2 * 4 * 256 * 2 * (5 * 8192 + 29 * 1024)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba': there is one for llama"),
        ({}, r"without a model_type"),
        ({"model_type": "llama"}, r"has no 'hidden_size'"),
        (
            TINY["qwen2"].to_dict() | {"quantization_config": {"quant_method": "awq"}},
            r"'awq', .*: name the model in bfloat16",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_what_has_no_formula_is_refused_with_the_reason(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelShapeUnknown, match=says):
        read_shape(config)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_every_family_is_compared() -> None:
    assert {read_shape(config.to_dict()).family for config in ALL.values()} == set(FAMILIES)
