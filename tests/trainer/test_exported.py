"""A version that is exported: the merged model is the adapter's, and the card says what the store knows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.errors import CheckpointDamaged, CheckpointExists
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner.merged_model import export_adapter, export_merged
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.statistics.paired_comparison import compare
from ratchet.tuner.reports.model_card import model_card
from ratchet.tuner.reports.tuning_result import TuningResult, plain, task_set
from ratchet.tuner.reports.version_evidence import gather
from tests.harness.records import judged_group
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
    with pytest.raises(CheckpointExists):
        export_adapter(adapter, tmp_path / "alone", "card")


def trained_version(store: Store, number: int, scores: tuple[float, float], metrics: dict[str, object]) -> Policy:
    group = judged_group(
        store, [f"a{number}", f"b{number}"], scores, task=f"mail/{number}", versions=(number - 1, number - 1)
    )
    held = store.rounds.start("agent", number - 1)
    round_metrics = {"trajectories": 2, "groups": 1, "tokens_trained": 4, "reward": 0.5, "loss": -0.25} | metrics
    store.rounds.commit(held.id, version=number, checkpoint=f"/c/{number}", groups=[group.id], metrics=round_metrics)
    evidence = {"release": {"difference": {"value": 0.125, "low": 0.0625}}}
    return store.policies.promote("agent", number, evidence, by="release", reason="+0.125 | better\n# x")


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
    assert "promote by release: +0.125 / better # x" in card
    assert "release.difference.low: 0.0625" in card
    assert "Not known: each side needs 30 scores; there are 4 in all, " in card
    assert "| 2 | " in card
    assert "Training data: not known" in card
    assert "Made with: torch 2.13.0." in card
    assert str(tiny_model) not in card


def test_a_rejected_round_is_not_in_the_lineage_of_what_came_after(store: Store) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    group = judged_group(store, ["x", "y"], [0.0, 1.0], task="other/1")
    held = store.rounds.start("agent", 1)
    store.rounds.commit(held.id, version=2, checkpoint="/c/2", groups=[group.id], metrics={})
    store.policies.reject("agent", 2, {})
    again = judged_group(store, ["v", "w"], [0.0, 1.0], task="third/1")
    held = store.rounds.start("agent", 1)
    store.rounds.commit(held.id, version=3, checkpoint="/c/3", groups=[again.id], metrics={})
    behind = store.lineage.training_data_of(store.policies.get("agent", 3))
    assert [one.to_version for one in behind.rounds] == [1, 3]
    assert behind.families == {"task:mail": 2, "task:third": 2}


def test_the_model_card_has_the_gain_with_its_interval_and_the_base_models_license(
    store: Store, tmp_path: Path
) -> None:
    for version, scores in ((0, [0.0, 0.25]), (1, [0.75, 1.0])):
        names = [f"v{version}-{number}" for number in range(40)]
        judged_group(store, names, scores * 20, task=f"mail/{version}", versions=[version] * 40)
    held = store.rounds.start("agent", 0)
    store.rounds.commit(held.id, version=1, checkpoint="/c", groups=[], metrics={})
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    card = model_card(gather(store, store.policies.get("agent", 1), str(tmp_path), {}), merged=False)
    assert "0.125 (@0 to @0, 40 scores) to 0.875 (@1 to @1, 40 scores): +0.750 (95% +0.6" in card
    assert "Base model: apache-2.0, as stated by its card" in card
    assert "library_name: peft" in card


def test_a_version_with_a_prompt_says_that_it_is_not_in_the_weights(store: Store) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    prompt = store.prompts.register("Be brief.\n    # not a heading", families={"task:mail": "Read first."})
    tuned = store.policies.register_prompt_version("agent", prompt.id, {})
    card = model_card(gather(store, tuned, "base", {}), merged=True)
    assert "send it if you serve the model elsewhere" in card
    assert "\n    Be brief.\n        # not a heading\n" in card
    assert "For tasks of task:mail:\n    Read first." in card
    assert "2 trajectories in 1 groups" in card  # those of the weights that it shares


def test_the_model_card_has_sft_data_and_evaluations(store: Store) -> None:
    group = judged_group(store, ["a", "b"], (0.0, 1.0), task="mail/1")
    held = store.rounds.start("agent", 0)
    story = {"trajectories": 2, "by_source": {"demonstration": 2}, "general_rows": 5}
    metrics = {"trajectories": 2, "warm_start": story}
    store.rounds.commit(held.id, version=1, checkpoint="/c", groups=[], metrics=metrics, demonstrations=group.members)
    marks = {"bfcl": {str(task): (1.0,) for task in range(20)}, "before": {str(task): (0.0,) for task in range(20)}}
    gain = compare(marks["bfcl"], marks["before"], names=("agent@1", "agent@0"))
    tasks = task_set("bfcl:simple_python", "test", list(marks["bfcl"]))
    result = TuningResult(
        method="eval", technique="BFCL v4", alias="agent", task_set=tasks, judge="bfcl-eval", workflow="w", gain=gain
    )
    tuning = store.tunings.begin("eval", "agent", {})
    store.tunings.end(tuning.id, "done", plain(result))
    lessons = store.tunings.begin("lessons", "agent", {})  # it measures nothing itself: the gate does
    store.tunings.end(lessons.id, "done", {"families": {}})
    doctor = store.tunings.begin("eval", "agent", {"doctor": "w"})  # nor does `ratchet doctor --workflow`
    store.tunings.end(doctor.id, "done", {"reasons": []})
    card = model_card(gather(store, store.policies.get("agent", 1), "base", {}), merged=True)
    assert "2 trajectories (2 demonstration) were used for an SFT warm start, with 5 rows of general chat data." in card
    assert "0 trajectories in 0 groups" in card
    assert "| rule | `1` | 2 |" in card
    assert "BFCL v4 (20 tasks of bfcl:simple_python, judged by bfcl-eval): agent@1 against agent@0: +1.000" in card
