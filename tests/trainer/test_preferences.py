"""Preference rows are what TRL's own trainers take, and no word of a tool or a user is ever a completion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Feedback, Transcript
from ratchet.store.store import Store
from ratchet.trainer.rows.preference_rows import Preferences, Row, demonstrations, pairs, unpaired
from tests.harness.records import QUESTION, answered_trajectory, call_start, ended, judged_group, tool_call


def give_feedback(store: Store, target: str, number: int, **changes: Any) -> None:
    kind = "call" if target.startswith("call_") else "trajectory"
    values: dict[str, Any] = {"kind": kind, "target": target, "source": "user:ann", "given_at": float(number)}
    store.feedback.add([Feedback(id=f"fb_{target}_{number}", trusted=True, **(values | changes))])


def read(store: Store, *names: str) -> list[Transcript]:
    return [store.trajectories.read(name) for name in names]


def two_turns(store: Store, run: str) -> None:
    """An agent that calls a tool and then answers."""
    first = call_start(f"call_{run}1", run)
    call = tool_call()
    history: list[Any] = [*QUESTION, call, {"role": "tool", "tool_call_id": "c1", "content": "in Oslo"}]
    second = call_start(f"call_{run}2", run, history, at=2.0, parent_call=first.call_id)
    answer = {"role": "assistant", "content": "Oslo"}
    store.calls.ship([ended(first, call), ended(second, answer, messages=history, context="fork")])


def test_a_thumb_labels_the_very_answer_that_it_was_given_for(store: Store) -> None:
    two_turns(store, "t")
    give_feedback(store, "call_t1", 1, value=0.0)
    give_feedback(store, "t", 2, value=1.0)
    give_feedback(store, "t", 3, value=0.4, source="user:bob")
    found = unpaired(read(store, "t"), store.trajectories.messages_to)
    whole, first = found.rows
    assert (whole["label"], whole["completion"]) == (True, [{"role": "assistant", "content": "Oslo"}])
    assert [message["role"] for message in whole["prompt"]] == ["system", "user", "assistant", "tool"]
    assert (first["label"], first["prompt"]) == (False, QUESTION)
    assert first["completion"][0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert '"search"' in first["tools"]


def test_no_completion_holds_a_tools_or_a_users_word(store: Store) -> None:
    two_turns(store, "t")
    for number, target in enumerate(("call_t1", "call_t2", "t")):
        give_feedback(store, target, number, value=1.0, demonstration="Bergen")
    made = (
        unpaired(read(store, "t"), store.trajectories.messages_to),
        demonstrations(read(store, "t"), store.trajectories.messages_to),
    )
    assert all(len(found.rows) == 3 for found in made)
    for row in (row for found in made for row in found.rows):
        assert [message["role"] for message in row["completion"]] == ["assistant"]


def test_a_group_gives_its_best_and_its_worst(store: Store) -> None:
    group = judged_group(store, ["a", "b", "c"], [0.5, 0.0, 1.0])
    members = read(store, *group.members)
    for member, text in zip(members, ("so", "bad", "good"), strict=True):
        member.messages[-1]["content"] = text  # type: ignore[index]
    (row,) = pairs([list(zip(members, [0.5, 0.0, 1.0], strict=True))]).rows
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("good", "bad")
    assert row["prompt"] == QUESTION


def test_what_cannot_be_a_row_is_counted_with_its_reason(store: Store) -> None:
    two_turns(store, "t")
    judged_group(store, ["a", "b"], [1.0, 0.0])
    one, other, longer = read(store, "a", "b", "t")
    given = [[(one, 1.0)], [(one, 1.0), (other, 1.0)], [(one, 1.0), (other, 0.0)], [(one, 1.0), (longer, 0.0)]]
    assert pairs(given).skipped == {"no best and worst": 2, "equal answers": 1, "different histories": 1}
    give_feedback(store, "a", 1, value=0.5)
    store.calls.ship([call_start("call_i", "i", [{"role": "user", "content": [{"type": "image_url"}]}])])
    give_feedback(store, "i", 1, value=1.0)
    give_feedback(store, "call_i", 2, value=1.0)
    picture = call_start("call_p", "p", [{"role": "user", "content": [{"type": "image_url"}]}])
    store.calls.ship([ended(picture, {"role": "assistant", "content": "a cat"})])
    give_feedback(store, "p", 1, value=1.0)
    found = unpaired(read(store, "a", "i", "p"), store.trajectories.messages_to)
    assert found == Preferences([], found.skipped)
    assert found.skipped == {"undecided": 1, "no answer": 2, "not text alone": 1}


def test_text_in_parts_becomes_one_text(store: Store) -> None:
    parts = [{"type": "text", "text": "Where "}, {"type": "text", "text": "is it?"}]
    start = call_start("call_t", "t", [{"role": "user", "content": parts}])
    store.calls.ship([ended(start, {"role": "assistant", "content": "Oslo"})])
    give_feedback(store, "t", 1, demonstration="first")
    give_feedback(store, "t", 2, demonstration="Bergen")
    (row,) = demonstrations(read(store, "t"), store.trajectories.messages_to).rows
    assert row["prompt"] == [{"role": "user", "content": "Where is it?"}]
    assert row["completion"] == [{"role": "assistant", "content": "Bergen"}]


# --- TRL takes them -------------------------------------------------------------------------------------------


@pytest.fixture
def rows(store: Store) -> dict[str, list[Row]]:
    for number in range(4):
        name = f"t{number}"
        answered_trajectory(store, name, f"answer {number}", tools=b"", tools_hash="")
        give_feedback(store, name, 1, value=float(number % 2), demonstration="the quick brown fox")
    members = read(store, *(f"t{number}" for number in range(4)))
    path = store.trajectories.messages_to
    groups = [[(members[0], 0.0), (members[1], 1.0)], [(members[2], 0.0), (members[3], 1.0)]]
    return {"kto": unpaired(members, path).rows, "dpo": pairs(groups).rows, "sft": demonstrations(members, path).rows}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kto", "dpo", "sft"])
def test_trls_own_trainers_learn_from_them(
    kind: str, rows: dict[str, list[Row]], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # TRL would import it
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    common: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"), "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    made: dict[str, Any] = {
        "kto": (KTOTrainer, KTOConfig(loss_type="apo_zero_unpaired", **common)),
        "dpo": (DPOTrainer, DPOConfig(**common)),
        "sft": (SFTTrainer, SFTConfig(**common)),
    }
    trainer_class, config = made[kind]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows[kind]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert not before.equal(trainer.model.get_input_embeddings().weight.detach().cpu())
