"""A version that is exported: the merged model is the adapter's, and the card says what the store knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from store import Store
from store.records import Policy
from tests.records import judged_group
from tests.trainer.tiny import build_rows
from trainer.errors import CheckpointDamaged, CheckpointExists
from trainer.learning.learner import Learner
from trainer.learning.learner_settings import LearnerSettings
from trainer.publishing.evidence import gather
from trainer.publishing.exported import export_adapter, export_merged
from trainer.publishing.model_card import model_card


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a learner that has learnt something."""
    folder = tmp_path_factory.mktemp("checkpoints")
    learner = Learner(str(tiny_model), LearnerSettings(learning_rate=1e-2, threads=1), workdir=folder / "work")
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


def test_an_export_is_whole_or_not_there(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    (damaged / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="cannot be exported"):
        export_merged(str(tiny_model), damaged, tmp_path / "merged", "card")
    assert not (tmp_path / "merged").exists()
    export_adapter(adapter, tmp_path / "alone", "card")
    assert (tmp_path / "alone" / "README.md").read_text() == "card"
    with pytest.raises(CheckpointExists):
        export_adapter(adapter, tmp_path / "alone", "card")


def trained_version(store: Store, number: int, scores: tuple[float, float], metrics: dict[str, object]) -> Policy:
    group = judged_group(
        store, [f"a{number}", f"b{number}"], scores, task=f"mail/{number}", versions=(number - 1, number - 1)
    )
    held = store.rounds.start("agent", number - 1)
    told = {"trajectories": 2, "groups": 1, "tokens_trained": 4, "reward": 0.5, "loss": -0.25} | metrics
    store.rounds.commit(held.id, version=number, checkpoint="/c", groups=[group.id], metrics=told)
    evidence = {"gate": {"difference": {"value": 0.125, "low": 0.0625}}}
    return store.policies.promote("agent", number, evidence, by="gate", reason="+0.125 | better\n# x")


def test_the_card_says_what_the_store_knows_and_what_nobody_knows(store: Store, tiny_model: Path) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    newest = trained_version(store, 2, (0.0, 1.0), {"untrained_tokens": {"greedy": 7}, "entropy": 1.5})
    card = model_card(gather(store, newest, str(tiny_model), {"torch": "2.13.0"}), merged=True)
    assert card.startswith('---\nlicense: "unknown"\n')
    assert "# agent@2" in card
    assert "4 trajectories in 2 groups, 8 trained tokens" in card
    assert "| task:mail | 4 |" in card
    assert "| 7 | greedy: sampled at temperature 0" in card
    assert "| rule | `1` | 4 |" in card
    assert "promote by gate: +0.125 / better # x" in card
    assert "gate.difference.low: 0.0625" in card
    assert "Not known: each side needs 30 scores; there are 4 in all." in card
    assert "| 2 | " in card
    assert "Training data: not known" in card
    assert "Made with: torch 2.13.0." in card
    assert str(tiny_model) not in card


def test_a_rejected_round_is_not_in_the_lineage_of_what_came_after(store: Store) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    group = judged_group(store, ["x", "y"], [0.0, 1.0], task="other/1")
    held = store.rounds.start("agent", 1)
    store.rounds.commit(held.id, version=2, checkpoint="/c", groups=[group.id], metrics={})
    store.policies.reject("agent", 2, {})
    again = judged_group(store, ["v", "w"], [0.0, 1.0], task="third/1")
    held = store.rounds.start("agent", 1)
    store.rounds.commit(held.id, version=3, checkpoint="/c", groups=[again.id], metrics={})
    behind = store.lineage.behind("agent", 3)
    assert [one.to_version for one in behind.rounds] == [1, 3]
    assert behind.families == {"task:mail": 2, "task:third": 2}


def test_the_gain_is_told_with_its_interval_and_the_base_models_licence(store: Store, tmp_path: Path) -> None:
    for version, scores in ((0, [0.0, 0.25]), (1, [0.75, 1.0])):
        names = [f"v{version}-{number}" for number in range(40)]
        judged_group(store, names, scores * 20, task=f"mail/{version}", versions=[version] * 40)
    held = store.rounds.start("agent", 0)
    store.rounds.commit(held.id, version=1, checkpoint="/c", groups=[], metrics={})
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    card = model_card(gather(store, store.policies.get("agent", 1), str(tmp_path), {}), merged=False)
    assert "0.125 (@0 to @0, 40 scores) to 0.875 (@1 to @1, 40 scores): +0.750 (95% +0.6" in card
    assert "Base model: apache-2.0, as its own card says" in card
    assert "library_name: peft" in card
