"""Families of models, their base files and their number formats."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from ratchet.settings.project_settings import Settings
from ratchet.store.reports.learning_report import movement_of
from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder
from ratchet.trainer.errors import ModelError, SettingError
from ratchet.trainer.learner import lora
from ratchet.trainer.learner.agent_state import local
from ratchet.trainer.learner.initial_adapter import join_experts, split_experts
from ratchet.trainer.learner.training_round import measure_policy_shift
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_rows, build_tiny_model, build_tokenizer

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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    (folder / "model-1.safetensors").write_bytes(os.urandom(5000))
    (folder / "model-2.safetensors").write_bytes(os.urandom(5000))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {part for part in before if before[part] != after[part]}


def test_a_perturbed_copy_of_the_same_shape_is_another_model(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    copy = shutil.copytree(model, tmp_path / "copy")
    assert digests(copy, cache) == digests(model, cache)
    content = bytearray((copy / "model-2.safetensors").read_bytes())
    content[2500] ^= 1  # one bit of one weight
    (copy / "model-2.safetensors").write_bytes(content)
    assert changed(digests(model, cache), digests(copy, cache)) == {"weights"}


def test_each_part_has_its_own_fingerprint_and_irrelevant_files_are_ignored(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    first = digests(model, cache)
    (model / "README.md").write_text("A model.")
    (model / "config.json").write_text(
        json.dumps({"hidden_size": 8, "model_type": "qwen3", "transformers_version": "5", "_name_or_path": "x"})
    )
    assert digests(model, cache) == first
    (model / "tokenizer.json").write_text('{"version": 2}')
    assert changed(first, digests(model, cache)) == {"tokenizer"}
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m }}{% endfor %}")
    assert changed(first, digests(model, cache)) == {"tokenizer", "chat_template"}
    (model / "config.json").write_text('{"hidden_size": 16}')
    assert changed(first, digests(model, cache)) == {"tokenizer", "chat_template", "config"}


def test_a_file_that_has_not_changed_is_not_read_again(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "folder" / "digests.json"
    assert bytes_to_read(model, cache) == 10_000
    first = digests(model, cache)
    assert bytes_to_read(model, cache) == 0
    file = model / "model-1.safetensors"
    before = file.stat()
    file.write_bytes(bytes(5000))  # with its old modification time: the change is not detected
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests(model, cache) == first
    os.utime(file)
    assert bytes_to_read(model, cache) == 5000
    assert changed(first, digests(model, cache)) == {"weights"}


def test_blobs_of_the_hugging_face_cache_are_not_read(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert model_folder("owner/name", environ) is None  # nothing is downloaded yet
    for file in model.iterdir():
        content = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(blob)
    assert model_folder("owner/name", environ) == snapshot
    assert bytes_to_read(snapshot, tmp_path / "digests.json") == 0
    assert digests(snapshot, tmp_path / "digests.json") == digests(model, tmp_path / "other.json")
    assert model_folder(str(model), environ) == model


ROWS = build_rows(4)
# The rows are of no policy's sampling.
UNCORRECTED = {"sequence_mask_threshold": None, "vllm_importance_sampling_clip_max": None}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose layers and logits (up to 20) are as large as those of a pretrained one."""
    folder = build_tiny_model(tmp_path_factory.mktemp("deep"), hidden=128, layers=12)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("model.norm.weight"):
            weight *= 10
        elif weight.dim() > 1 and "embed" not in name and "lm_head" not in name:
            weight *= 3
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def make_learner(model: Path, dtype: str, **settings: float | None) -> Learner:
    return Learner(str(model), LearnerSettings(dtype=dtype, threads=1, **settings))  # type: ignore[arg-type]


def test_a_cpu_learner_computes_and_saves_in_the_format_that_is_set(tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for dtype in ("auto", "float32", "bfloat16"):
        learner = make_learner(tiny_model, dtype, learning_rate=1e-2)
        base = learner.score(ROWS)
        report = learner.train_round(ROWS)
        learner.save(tmp_path / f"saved-{dtype}")
        adapter = load_file(tmp_path / f"saved-{dtype}" / "adapter_model.safetensors")
        found[dtype] = base, report.dtype, {weight.dtype for weight in adapter.values()}
        assert {p.dtype for p in learner.host.trainer.lora_parameters().values()} == {torch.float32}
        assert learner.score(ROWS, adapter=tmp_path / f"saved-{dtype}") == learner.score(ROWS)
    assert found["auto"] == found["float32"]
    assert found["float32"][1:] == ("fp32", {torch.float32})
    assert found["bfloat16"][1:] == ("bf16", {torch.bfloat16})
    gaps = [one - other for fine, coarse in zip(found["float32"][0], found["bfloat16"][0], strict=True)
            for one, other in zip(fine, coarse, strict=True)]  # fmt: skip
    assert 1e-4 < max(map(abs, gaps)) < 0.2


def test_an_unknown_format_and_an_agent_with_another_one_than_its_learner_are_refused(tiny_model: Path) -> None:
    with pytest.raises(SettingError, match=r"dtype is 'half'; it must be one of auto, bfloat16, float32"):
        LearnerSettings(dtype="half")
    learner = make_learner(tiny_model, "float32")
    learner.load(None, LearnerSettings())  # auto: what the learner has
    with pytest.raises(SettingError, match="dtype cannot change"):
        learner.load(None, LearnerSettings(dtype="bfloat16"))


def test_weights_are_read_straight_onto_the_device(tiny_model: Path) -> None:
    """The device `meta` takes no weights: none of them was whole on the CPU first."""
    for device in ("cpu", "meta"):
        model, _ = lora.load(str(tiny_model), dtype=torch.bfloat16, device=torch.device(device))
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {(device, torch.bfloat16)}
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())  # they would copy every input


@pytest.mark.parametrize(
    ("vllm", "learner", "found"),
    [
        ({}, {}, "auto"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "auto"}, "bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, {}, "auto"),  # the learner has no such format
    ],
)
def test_a_learner_sees_what_is_served_unless_its_own_format_is_set(
    vllm: dict[str, str], learner: dict[str, str], found: str
) -> None:
    settings = Settings.of({"vllm": vllm, "learner": learner})
    assert settings.learner.dtype == found


def in_both_formats(model: Path, rate: float, steps: int) -> Iterator[tuple[RoundReport, float, float]]:
    """A bf16 learner's rounds: its report, and the movement of the same adapters in fp32: k3, and the share that bf16
    shows of it.
    """
    seen, truth = (make_learner(model, dtype, learning_rate=rate, **UNCORRECTED) for dtype in ("bfloat16", "float32"))
    rows = build_rows(12)
    for _ in range(steps):
        old = [logprobs(learner, rows) for learner in (seen, truth)]
        report = seen.train_round(rows)
        pairs = zip(truth.host.trainer.lora_parameters().values(), seen.host.trainer.lora_parameters().values(),
                    strict=True)  # fmt: skip
        for ours, theirs in pairs:
            ours.data.copy_(theirs.data)
        shown, true = (logprobs(one, rows) - before for one, before in zip((seen, truth), old, strict=True))
        yield report, float((true.exp() - 1 - true).mean()), float((shown * true).mean() / true.square().mean())


def logprobs(learner: Learner, rows: Sequence[TokenRow]) -> torch.Tensor:
    scored = zip(rows, learner.score(rows), strict=True)
    return torch.tensor([one for row, found in scored for one, on in zip(found, row.mask, strict=True) if on]).double()


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_a_step_that_bf16_does_not_show_reads_as_its_floor_and_is_not_called_healthy(
    rate: float, deep_model: Path
) -> None:
    for report, true, _ in in_both_formats(deep_model, rate, steps=3):
        assert true < report.approx_kl / 10
        assert report.approx_kl < 1.5 * report.approx_kl_floor
        movement = movement_of(report.figures())
        assert movement is not None
        assert movement.size == "lost in rounding"


def test_a_step_above_the_floor_is_read_as_it_is_and_its_share_is_what_bf16_shows(deep_model: Path) -> None:
    shares = []
    for report, true, share in in_both_formats(deep_model, 1e-4, steps=4):
        shares.append((report.logprob_change_share, share))
        above = report.approx_kl - report.approx_kl_floor
        assert above == pytest.approx(share**2 * true, rel=0.4)
    assert all(estimate == pytest.approx(share, rel=0.25, abs=0.05) for estimate, share in shares)
    assert shares[0][1] < 0.6 < 0.75 < shares[-1][1]  # more of each step shows as the adapter grows


def test_the_floor_of_fp32_is_far_below_every_step_and_all_of_it_shows(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, "float32", learning_rate=1e-4)
    for _ in range(2):
        report = learner.train_round(ROWS)
        assert report.approx_kl_floor < report.approx_kl / 1000
        assert report.logprob_change_share == 1.0


def test_measuring_a_round_leaves_its_adapter_bit_for_bit(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, "bfloat16", learning_rate=1e-3)
    learner.train_round(ROWS)
    trainer = learner.host.trainer
    before = {name: local(p.detach()).clone() for name, p in trainer.lora_parameters().items()}
    old = {name: torch.zeros_like(weight) for name, weight in before.items()}
    dice = torch.get_rng_state()
    measure_policy_shift(trainer, trainer.shift_sample(ROWS), old, coarse=True)
    assert all(local(p).equal(before[name]) for name, p in trainer.lora_parameters().items())
    assert torch.get_rng_state().equal(dice)
