"""Claims about counted parameters: exact, for base model and adapter, against the models on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from ratchet.trainer.errors import ModelShapeUnknown
from ratchet.trainer.planning.memory import kv_cache_bytes
from ratchet.trainer.planning.model_shape import (
    FAMILIES,
    adapted_layers,
    count_lora_parameters,
    count_parameters,
    read_shape,
)
from tests.harness.trainer.model_configs import REAL, TINY, VARIANTS

# Of PEFT, which maps the patterns of experts to names that the model does not have.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")

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


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_exactly(name: str) -> None:
    shape = read_shape(ALL[name].to_dict())
    assert count_parameters(shape).total == built(ALL[name]).num_parameters()


@pytest.mark.parametrize("name", ALL)
def test_a_config_file_may_leave_out_what_is_the_default(name: str) -> None:
    assert read_shape(ALL[name].to_diff_dict()) == read_shape(ALL[name].to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("gpt_oss", "qwen3_moe with dense layers")])
def test_lora_parameters_are_counted_exactly(name: str) -> None:
    shape = read_shape(ALL[name].to_dict())
    layers = adapted_layers(shape)
    if name == "gpt-oss-120b":  # PEFT adapts its experts only where they are named
        layers = tuple(layer for layer in layers if not layer.stacked)
    assert count_lora_parameters(layers, RANK) == adapter_sizes(ALL[name], target_modules="all-linear")


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
def test_what_has_no_formula_is_refused_with_the_reason(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelShapeUnknown, match=says):
        read_shape(config)


def test_every_family_is_compared() -> None:
    assert {read_shape(config.to_dict()).family for config in ALL.values()} == set(FAMILIES)
