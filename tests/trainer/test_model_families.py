"""Claims about families of models: which layers get an adapter, what is refused, and what the saved file holds.

Tiny random models of each family, made in code. PEFT reads the saved file without the learner's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from ratchet.trainer.errors import ModelError
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner.initial_adapter import join_experts, split_experts
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_rows, build_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def text_model(kind: str, folder: Path, **fields: Any) -> Path:
    """A tiny random model of a text family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | {"pad_token_id": 0} | EXPERTS.get(kind, {}) | fields))
    return saved(AutoModelForCausalLM.from_config(config), folder)


def gemma3(folder: Path) -> Path:
    from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=SIZES, vision_config=tower, mm_tokens_per_image=4)
    return saved(Gemma3ForConditionalGeneration(config), folder)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def trained(base: Path, **settings: Any) -> Learner:
    """A learner after a round that moved every layer of its adapter."""
    learner = Learner(str(base), LearnerSettings(threads=1, learning_rate=1e-2, **settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in learner.host.trainer.lora_parameters().values():
            parameter.data.normal_(std=0.1)
    learner.train_round(build_rows(4))
    return learner


def adapted(learner: Learner) -> set[str]:
    """Return the names of adapted layers, without their numbers."""
    names = learner.host.trainer.lora_parameters()
    return {name.split(".lora_")[0].replace(".base_layer", "").rsplit(".", 1)[1] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_and_attention_get_an_adapter_and_a_router_none(kind: str, tmp_path: Path) -> None:
    learner = trained(text_model(kind, tmp_path / "base"))
    assert adapted(learner) == ATTENTION | {"experts"}
    assert all(
        parameter.shape[0] and parameter.grad is None for parameter in learner.host.trainer.lora_parameters().values()
    )
    assert not any(".gate." in name or ".router." in name for name in learner.host.trainer.lora_parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # PEFT's own pattern
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_file_holds_the_adapter_of_each_expert_as_peft_and_vllm_read_it(kind: str, tmp_path: Path) -> None:
    import safetensors.torch
    from transformers import AutoModelForCausalLM

    base = text_model(kind, tmp_path / "base")
    learner = trained(base)
    learner.save(tmp_path / "version")
    weights = safetensors.torch.load((tmp_path / "version" / "adapter_model.safetensors").read_bytes())
    layers = ("w1", "w2", "w3") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    module = next(name for name in weights if ".experts.3." in name).split(".experts.")[0]
    for layer in layers:
        assert weights[f"{module}.experts.3.{layer}.lora_A.weight"].shape[0] == 8
    assert not any("base_layer" in name for name in weights)
    rows = [row.ids for row in build_rows(3)]
    ours = learner.score(rows)
    served: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "version"))
    for row, expected in zip(rows, ours, strict=True):
        with torch.no_grad():
            logprobs = served(input_ids=torch.tensor([row])).logits.log_softmax(-1)[0, :-1]
        theirs = logprobs.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        assert theirs == pytest.approx(expected[1:], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(ours[0], learner.score(rows, adapter=False)[0], strict=True)) > 0.01
    assert learner.score(rows, adapter=tmp_path / "version") == ours
    resumed = Learner(
        str(base),
        LearnerSettings(threads=1, learning_rate=1e-2),
        resume_from=tmp_path / "version",
    )
    assert resumed.score(rows) == ours


def test_splitting_experts_and_joining_them_again_changes_nothing() -> None:
    weights = {
        "m.experts.base_layer.lora_A.weight": torch.randn(4 * 2, 6),
        "m.experts.base_layer.lora_B.weight": torch.randn(10, 2 * 4),
        "m.experts.lora_A.weight": torch.randn(4 * 2, 5),
        "m.experts.lora_B.weight": torch.randn(6, 2 * 4),
        "m.q_proj.lora_A.weight": torch.randn(2, 6),
    }
    split = split_experts(weights, "qwen3_moe", rank=2)
    assert split["m.experts.1.up_proj.lora_B.weight"].shape == (5, 2)
    joined = join_experts(split, "qwen3_moe")
    assert joined.keys() == weights.keys()
    assert all(torch.equal(joined[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_the_vision_tower_of_a_multimodal_model_gets_no_adapter(tmp_path: Path) -> None:
    learner = trained(gemma3(tmp_path / "base"))
    assert adapted(learner) == ATTENTION | {"gate_proj", "up_proj", "down_proj"}
    assert all(".language_model." in name for name in learner.host.trainer.lora_parameters())


@pytest.mark.slow
def test_excluded_layers_get_no_adapter(tiny_model: Path) -> None:
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert adapted(trained(tiny_model, exclude_modules=mlp)) == ATTENTION
    named = trained(tiny_model, target_modules=("q_proj", "v_proj"), exclude_modules=("layers.0.self_attn.v_proj",))
    names = {name.split(".layers.")[1].split(".lora_")[0] for name in named.host.trainer.lora_parameters()}
    assert names == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"}


@pytest.mark.slow
def test_layers_of_experts_by_name_are_the_stacked_experts(tmp_path: Path) -> None:
    base = text_model("qwen3_moe", tmp_path / "base")
    assert adapted(trained(base, target_modules=("q_proj", "gate_proj"))) == {"q_proj", "experts"}
    assert adapted(trained(base, target_modules=("q_proj",))) == {"q_proj"}


def test_a_family_without_a_causal_language_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    Qwen2_5_VLConfig(text_config=SIZES, vision_config=tower).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is a Qwen2_5_VL model, of which .* use a text model \(docs/training.md"):
        Learner(str(tmp_path), LearnerSettings())
