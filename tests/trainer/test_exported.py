"""A version that is exported: the merged model is the adapter's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.store.store import Store
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError
from ratchet.trainer.learner.merged_model import export_adapter, export_merged
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import commit_round, judged_group
from tests.harness.trainer.tiny import build_rows


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a learner that has learnt something."""
    folder = tmp_path_factory.mktemp("checkpoints")
    learner = Learner(str(tiny_model), LearnerSettings(learning_rate=1e-2, threads=1))
    learner.train_round(build_rows(6))
    learner.save(folder / "0001")
    return folder / "0001"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 200).unsqueeze(0)).logits
    return found


def test_the_merged_models_logits_are_those_of_base_and_adapter(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    export_merged(str(tiny_model), adapter, tmp_path / "merged", "card")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = logits(base)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    adapted = logits(PeftModel.from_pretrained(base, str(adapter)))
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - plain).abs().max() > 1e-1
    assert not list((tmp_path / "merged").glob("adapter*"))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "merged", tiny_model))
    chat = [{"role": "user", "content": "the quick brown fox"}]
    assert (
        ours.apply_chat_template(chat, tokenize=True)["input_ids"]
        == (theirs.apply_chat_template(chat, tokenize=True)["input_ids"])
    )


def test_a_base_model_in_bfloat16_rounds_the_adapter_unless_the_export_is_float32(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = logits(PeftModel.from_pretrained(wide, str(adapter)))
    far: dict[str, float] = {}
    kinds: tuple[Literal["auto", "float32"], ...] = ("auto", "float32")
    for dtype in kinds:
        export_merged(str(tmp_path / "base"), adapter, tmp_path / dtype, "card", dtype)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype=torch.float32)
        far[dtype] = float((logits(merged) - adapted).abs().max())
    assert far["float32"] < 1e-4 < far["auto"]


def test_an_export_is_whole_or_not_there(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    (damaged / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="cannot be exported"):
        export_merged(str(tiny_model), damaged, tmp_path / "merged", "card")
    assert not (tmp_path / "merged").exists()
    export_adapter(adapter, tmp_path / "alone", "card")
    assert (tmp_path / "alone" / "README.md").read_text() == "card"
    with pytest.raises(CheckpointError):
        export_adapter(adapter, tmp_path / "alone", "card")


def test_a_rejected_round_is_not_in_the_lineage_of_what_came_after(store: Store) -> None:
    first = judged_group(store, ["a", "b"], [0.0, 1.0], task="mail/1")
    commit_round(store, "agent", 1, groups=[first.id])
    group = judged_group(store, ["x", "y"], [0.0, 1.0], task="other/1")
    commit_round(store, "agent", 2, groups=[group.id])
    store.policies.reject("agent", 2, {})
    again = judged_group(store, ["v", "w"], [0.0, 1.0], task="third/1")
    commit_round(store, "agent", 3, base=1, groups=[again.id])
    behind = store.lineage.training_data_of(store.policies.get("agent", 3))
    assert [one.to_version for one in behind.rounds] == [1, 3]
    assert behind.families == {"task:mail": 2, "task:third": 2}
