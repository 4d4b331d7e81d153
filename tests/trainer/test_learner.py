"""Claims about the learner."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import amplified
from ratchet.trainer.errors import (
    CheckpointDamaged,
    CheckpointError,
    ModelError,
    NoLearningSignal,
    RowError,
    SettingError,
    TrainerError,
    TrainingDiverged,
)
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow, scored_row
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import OBJECTIVES
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_rows

SETTINGS = LearnerSettings(learning_rate=1e-3, steps_per_round=2, threads=1)

LearnerMaker = Callable[..., Learner]


@pytest.fixture
def make_learner(tiny_model: Path) -> LearnerMaker:
    def make(settings: LearnerSettings = SETTINGS, *, resume_from: Path | None = None) -> Learner:
        return Learner(str(tiny_model), settings, resume_from=resume_from)

    return make


def train(learner: Learner, rounds: range) -> list[RoundReport]:
    return [replace(learner.train_round(build_rows(6, seed=number)), seconds=0.0) for number in rounds]


def adapter_of(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    learner.save(folder)
    weights: dict[str, torch.Tensor] = load_file(folder / "learner" / "lora.safetensors")
    return weights


def assert_bitwise_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_a_resumed_learner_is_bitwise_the_one_that_never_stopped(make_learner: LearnerMaker, tmp_path: Path) -> None:
    steady = make_learner()
    train(steady, range(2))
    steady.save(tmp_path / "0001")
    expected = train(steady, range(2, 4))
    resumed = make_learner(resume_from=tmp_path / "0001")
    assert resumed.step == 4
    assert train(resumed, range(2, 4)) == expected
    assert_bitwise_equal(adapter_of(resumed, tmp_path / "0002"), adapter_of(steady, tmp_path / "0003"))


@pytest.mark.slow
def test_two_runs_with_the_same_seed_are_equal_and_another_seed_is_not(
    make_learner: LearnerMaker, tmp_path: Path
) -> None:
    first, second = make_learner(), make_learner()
    assert train(first, range(2)) == train(second, range(2))
    assert_bitwise_equal(adapter_of(first, tmp_path / "0001"), adapter_of(second, tmp_path / "0002"))
    other = make_learner(replace(SETTINGS, seed=1))
    assert train(other, range(2)) != train(make_learner(), range(2))


def test_a_round_changes_the_weights_and_raises_the_odds_of_what_was_good(make_learner: LearnerMaker) -> None:
    learner = make_learner(replace(SETTINGS, steps_per_round=1))
    rows = [build_row(1, advantage=1.0), build_row(2, advantage=-1.0)]
    before = learner.score(rows)
    base = learner.score(rows, adapter=False)
    for _ in range(5):
        report = learner.train_round(rows)
    after = learner.score(rows)
    assert report.weight_change > 0
    assert trained_sum(rows[0], after[0]) > trained_sum(rows[0], before[0])
    assert trained_sum(rows[1], after[1]) < trained_sum(rows[1], before[1])
    assert learner.score(rows, adapter=False) == base == before


def test_an_amplified_copy_is_scored_as_peft_scales_it_and_leaves_the_adapter_alone(
    make_learner: LearnerMaker, tmp_path: Path
) -> None:
    learner, ids = make_learner(), build_row(3).ids
    train(learner, range(2))
    learner.save(tmp_path / "0001")
    before = learner.score([ids])
    weights = learner.host.trainer.lora_parameters()
    with amplified(str(tmp_path / "0001"), 4.0) as copy:
        found = learner.score([ids], adapter=copy)
    assert learner.score([ids]) == before != found
    with torch.no_grad():
        for name, parameter in weights.items():
            if "lora_B" in name:
                parameter.mul_(4.0)
    assert learner.score([ids])[0] == pytest.approx(found[0], abs=1e-6)


def test_of_a_row_only_the_tokens_of_its_mask_are_scored(make_learner: LearnerMaker) -> None:
    learner, ids = make_learner(), build_row(3).ids
    (whole,), (last,) = learner.score([ids]), learner.score([scored_row(ids)])
    assert last == pytest.approx((*(0.0,) * (len(ids) - 1), whole[-1]), abs=1e-6)


def trained_sum(row: TokenRow, logprobs: Sequence[float]) -> float:
    return sum(logprob for logprob, trained in zip(logprobs, row.mask, strict=True) if trained)


def test_the_reports_numbers_are_those_computed_by_hand(make_learner: LearnerMaker) -> None:
    learner = make_learner(replace(SETTINGS, steps_per_round=1, token_budget=64))
    rows = [replace(row, advantage=float(index + 1)) for index, row in enumerate(build_rows(4))]
    rows[3] = replace(rows[3], importance=False)
    rows[:2] = [replace(rows[0], age=0), replace(rows[1], age=1)]  # the others' is not known
    scored = learner.score(rows)
    # (advantage, trainer logprob - engine logprob, correctable) of every trained token
    tokens = [
        (row.advantage, ours - engine, row.importance)
        for row, scores in zip(rows, scored, strict=True)
        for ours, engine, trained in zip(scores, row.logprobs, row.mask, strict=True)
        if trained
    ]
    gaps = [abs(gap) for _, gap, correctable in tokens if correctable]
    weights = [math.exp(gap) for _, gap, correctable in tokens if correctable]
    losses = [-advantage * (min(math.exp(gap), 2.0) if ok else 1.0) for advantage, gap, ok in tokens]
    report = learner.train_round(rows)
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert (report.rows, report.optimizer_steps, report.step) == (4, 1, 1)
    assert (report.tokens_trained, report.tokens_compared) == (len(tokens), len(gaps))
    assert report.logprob_abs_diff_mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    fresh = gaps[: sum(rows[0].mask)]
    assert report.fresh_tokens_compared == len(fresh)
    assert report.fresh_logprob_abs_diff_mean == pytest.approx(sum(fresh) / len(fresh), rel=1e-4)
    assert report.logprob_abs_diff_max == pytest.approx(max(gaps), rel=1e-4)
    assert report.importance_clipped_ratio == sum(weight > 2.0 for weight in weights) / len(weights)
    assert report.clip_ratio == 0.0  # the first step of a round starts at ratio 1
    assert math.log(VOCABULARY) * 0.9 < report.entropy < math.log(VOCABULARY)
    assert report.grad_norm > 0
    assert 0 < report.seconds < 60


def test_scores_are_the_models_own_log_softmax(make_learner: LearnerMaker, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = build_rows(3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    scored = make_learner().score([rows[0].ids, rows[1].ids, rows[2].ids, (5,)])
    for row, scores in zip(rows, scored, strict=False):
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        assert scores == pytest.approx([0.0, *expected.tolist()], abs=1e-4)
    assert scored[3] == (0.0,)


def test_a_checkpoint_is_an_adapter_that_peft_loads(
    make_learner: LearnerMaker, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = make_learner()
    train(learner, range(1))
    learner.save(tmp_path / "0001")
    assert checkpoint.complete(tmp_path / "0001")
    config = json.loads((tmp_path / "0001" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["inference_mode"]) == ("LORA", 8, 16, True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served = PeftModel.from_pretrained(base, tmp_path / "0001")
    ids = torch.tensor([build_row(3).ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(served(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    assert learner.score([build_row(3).ids])[0][1:] == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_a_new_learning_rate_wins_over_the_checkpoints(make_learner: LearnerMaker, tmp_path: Path) -> None:
    learner = make_learner()
    learner.save(tmp_path / "0001")
    slow = make_learner(replace(SETTINGS, learning_rate=1e-6), resume_from=tmp_path / "0001")
    assert train(slow, range(1))[0].weight_change < 0.01 * train(learner, range(1))[0].weight_change


@pytest.mark.parametrize(
    "other", [{"lora_r": 4}, {"target_modules": ("q_proj",)}, {"exclude_modules": ("layers.0.self_attn.v_proj",)}]
)
def test_a_checkpoint_of_another_adapter_is_refused(
    other: dict[str, Any], make_learner: LearnerMaker, tmp_path: Path
) -> None:
    make_learner().save(tmp_path / "0001")
    (setting,) = other
    with pytest.raises(CheckpointError, match=f"trained with {setting} .* set {setting} back"):
        make_learner(replace(SETTINGS, **other), resume_from=tmp_path / "0001")


def test_a_half_written_checkpoint_is_refused(make_learner: LearnerMaker, tmp_path: Path) -> None:
    make_learner().save(tmp_path / "0001")
    (tmp_path / "0001" / "learner" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointDamaged, match="0001 is not a complete checkpoint"):
        make_learner(resume_from=tmp_path / "0001")


def test_a_round_without_signal_is_refused_and_changes_nothing(make_learner: LearnerMaker, tmp_path: Path) -> None:
    learner = make_learner()
    train(learner, range(1))
    before = adapter_of(learner, tmp_path / "0001")
    with pytest.raises(NoLearningSignal, match="2 rows of the round are 0"):
        learner.train_round([build_row(1, advantage=0.0), build_row(2, advantage=0.0)])
    with pytest.raises(NoLearningSignal, match="no rows"):
        learner.train_round([])
    assert learner.step == 2
    assert_bitwise_equal(adapter_of(learner, tmp_path / "0002"), before)


def test_a_row_that_does_not_fit_the_model_is_refused_by_name(make_learner: LearnerMaker) -> None:
    learner, row = make_learner(), build_row(7, advantage=1.0)
    foreign = replace(row, ids=(VOCABULARY, *row.ids[1:]))
    with pytest.raises(RowError, match=r"trajectory t7: .* 512 ids"):
        learner.train_round([foreign])
    with pytest.raises(RowError, match=r"1025 tokens .* 1024 positions"):
        learner.score([(5,) * 1025])


def test_a_step_that_is_not_finite_is_not_taken(make_learner: LearnerMaker, tmp_path: Path) -> None:
    learner = make_learner()
    before = adapter_of(learner, tmp_path / "0001")
    with pytest.raises(TrainingDiverged, match="the step was not taken"):
        learner.train_round([build_row(1, advantage=3e38), build_row(2, advantage=3e38)])
    assert_bitwise_equal(adapter_of(learner, tmp_path / "0002"), before)
    assert learner.train_round(build_rows(2)).grad_norm < 100


def test_later_steps_of_a_round_are_clipped_against_its_first_policy(make_learner: LearnerMaker) -> None:
    learner = make_learner(replace(SETTINGS, learning_rate=0.1, steps_per_round=4))
    row = build_row(1, advantage=1.0)
    report = learner.train_round([row] * 4)
    assert report.optimizer_steps == 4
    assert 0.1 < report.clip_ratio < 0.75
    assert learner.train_round([row] * 2).optimizer_steps == 2


@pytest.mark.slow
def test_every_loss_raises_the_odds_of_what_was_good(make_learner: LearnerMaker) -> None:
    rows = [build_row(1, advantage=1.0, group="g"), build_row(2, advantage=-1.0, group="g")]
    for name in OBJECTIVES:
        learner = make_learner(replace(SETTINGS, loss_type=name, steps_per_round=1, sequence_mask_threshold=None))
        before = learner.score(rows)[0]
        assert learner.train_round(rows if name != "sft" else rows[:1]).weight_change > 0
        assert trained_sum(rows[0], learner.score(rows)[0]) > trained_sum(rows[0], before)


@pytest.mark.slow
def test_a_round_that_another_policy_sampled_is_refused_and_changes_nothing(
    make_learner: LearnerMaker, tmp_path: Path
) -> None:
    for steps in (1, 2):
        learner = make_learner(replace(SETTINGS, steps_per_round=steps))
        train(learner, range(1))
        before = adapter_of(learner, tmp_path / f"{steps}1")
        foreign = [replace(row, logprobs=tuple(lp / 3 for lp in row.logprobs)) for row in build_rows(3)]
        with pytest.raises(
            NoLearningSignal, match=r"3 of the 3 rows of the round were rejected.* check that vLLM serves base_model"
        ):
            learner.train_round(foreign)
        assert_bitwise_equal(adapter_of(learner, tmp_path / f"{steps}2"), before)
        report = learner.train_round([*foreign, *build_rows(3, seed=9)])
        assert (report.rows, report.rows_rejected) == (6, 3)
        assert report.tokens_trained == sum(row.tokens_trained for row in build_rows(3, seed=9))


@pytest.mark.slow
def test_a_penalty_keeps_the_policy_near_the_base_and_is_reported(make_learner: LearnerMaker) -> None:
    def drift(kl: float) -> float:
        learner = make_learner(replace(SETTINGS, beta=kl, steps_per_round=1, learning_rate=1e-2))
        for _ in range(6):
            report = learner.train_round(build_rows(4, seed=3))
        return report.kl if kl else distance(learner)

    def distance(learner: Learner) -> float:
        rows = build_rows(4, seed=3)
        pairs = zip(rows, learner.score(rows), learner.score(rows, adapter=False), strict=True)
        return sum(abs(trained_sum(row, ours) - trained_sum(row, base)) for row, ours, base in pairs)

    assert 0 < drift(10.0) < 0.05
    assert distance(make_learner()) == 0.0
    assert drift(0.0) > 1.0


def test_adapters_are_trained_in_fp32(make_learner: LearnerMaker, tmp_path: Path) -> None:
    weights = adapter_of(make_learner(), tmp_path / "0001")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_quantization_without_its_library_is_refused_with_the_remedy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    remedy = r"quantization is 'nf4', which needs bitsandbytes: .*pip install .*\bqlora\b.* or set quantization to none"
    with pytest.raises(SettingError, match=remedy):
        Learner(str(tiny_model), replace(SETTINGS, quantization="nf4"))


def test_a_quantised_base_learns_with_adapters_in_fp32(make_learner: LearnerMaker, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")
    learner = make_learner(replace(SETTINGS, quantization="nf4"))
    rows = [build_row(1, advantage=1.0), build_row(2, advantage=-1.0)]
    before = learner.score(rows)[0]
    for _ in range(3):
        learner.train_round(rows)
    assert trained_sum(rows[0], learner.score(rows)[0]) > trained_sum(rows[0], before)
    assert {tensor.dtype for tensor in adapter_of(learner, tmp_path / "0001").values()} == {torch.float32}


def test_layers_that_the_model_does_not_have_are_refused(make_learner: LearnerMaker) -> None:
    for modules in (("no_such_layer",), ("q_proj", "lm_head")):
        with pytest.raises(SettingError, match=r"target_modules is .* does not fit"):
            make_learner(replace(SETTINGS, target_modules=modules))


def test_a_missing_model_and_a_folder_without_one_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent does not exist: give a folder"):
        Learner(str(tmp_path / "absent"), SETTINGS)
    with pytest.raises(ModelError, match=r"is not a model: it has no config\.json"):
        Learner(str(tmp_path), SETTINGS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="causal language model"):
        Learner(str(tmp_path), SETTINGS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_r", 0),
        ("learning_rate", 0.0),
        ("learning_rate", "fast"),
        ("target_kl", 0.0),
        ("loss_type", "ppo"),
        ("epsilon", 1.5),
        ("beta", -0.1),
        ("vllm_importance_sampling_clip_max", 0.5),
        ("sequence_mask_threshold", 1.0),
        ("mean_over", "groups"),
        ("entropy_coef", -1.0),
        ("top_entropy_quantile", 0.0),
        ("dr_grpo_length", 0),
        ("quantization", "int2"),
        ("steps_per_round", 0),
        ("token_budget", 0),
        ("threads", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"learner.{field} is "):
        replace(SETTINGS, **{field: value})  # type: ignore[arg-type]


@pytest.mark.slow
def test_importing_the_learner_does_not_import_torch() -> None:
    modules = "ratchet.trainer.learner.host, ratchet.trainer.adapters.checkpoint, ratchet.trainer.advantages"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_learner_writes_nothing_outside_its_folders(tiny_model: Path, tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    script = (
        "import sys; from pathlib import Path; from tests.harness.trainer.tiny import build_rows\n"
        "from ratchet.trainer.local_learner import Learner, LearnerSettings\n"
        "learner = Learner(sys.argv[1], LearnerSettings(threads=1))\n"
        "learner.train_round(build_rows(2)); learner.save(Path(sys.argv[2]) / '0001')\n"
        "sys.exit('vllm' in sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "error", "-c", script, str(tiny_model), str(tmp_path)]
    run = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [path for path in (*home.rglob("*"), *elsewhere.rglob("*")) if path.is_file()] == []
    assert checkpoint.complete(tmp_path / "0001")


def test_every_refusal_is_one_tree() -> None:
    refusals = (CheckpointDamaged, CheckpointError, NoLearningSignal, ModelError, RowError)
    assert all(issubclass(refusal, TrainerError) for refusal in refusals)
