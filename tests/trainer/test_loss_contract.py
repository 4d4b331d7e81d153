"""Claims about the loss: it equals a naive reference in float64, written from the papers' formulas, one row at a time.

TRL's losses of the same names are a second reference: if a new version fails here, its loss changed. Every case starts
from an adapter that is not zero, ragged groups, several turns a row, mixed temperatures and a sampler that is off, and
moves the adapter between the recomputation of the round's first policy and the loss, so that ratios are clipped.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.store.records import unpack_halves
from ratchet.trainer.advantages import group_advantages
from ratchet.trainer.learner import lora, loss
from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import OBJECTIVES, Objective
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_rows, build_tokenizer

GROUP_SIZES = (4, 3, 2)
WORST_RELATIVE_ERROR = 2e-5
PLAIN: dict[str, Any] = {"vllm_importance_sampling_clip_max": None, "sequence_mask_threshold": None}

CASES = [
    *({"loss_type": name} for name in OBJECTIVES if OBJECTIVES[name].ratio != "none"),
    *({"loss_type": name, "beta": 0.05} for name in OBJECTIVES if OBJECTIVES[name].ratio != "none"),
    *({"loss_type": name, "sequence_mask_threshold": 1.1} for name in OBJECTIVES if OBJECTIVES[name].ratio != "none"),
    {"loss_type": "dapo", "sequence_mask_threshold": 1.1, "beta": 0.05, "entropy_coef": 0.01},
    {"loss_type": "dr_grpo", "dr_grpo_length": 7},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05, "entropy_coef": 0.01},
    {"loss_type": "grpo", "entropy_coef": 0.01},
    {"loss_type": "dapo", "top_entropy_quantile": 0.2},
    {"loss_type": "grpo", "top_entropy_quantile": 0.2, "beta": 0.05, "sequence_mask_threshold": 1.1},
    {"loss_type": "sft"},
    {"loss_type": "sft", "beta": 0.05},
    {"loss_type": "dapo", **PLAIN},
    {"loss_type": "dapo", "gradient_checkpointing": True},
]


@dataclass(frozen=True, slots=True)
class Computed:
    """A loss, and its gradient for every LoRA parameter."""

    loss: float
    gradient: dict[str, torch.Tensor]

    def relative_error(self, other: Computed) -> float:
        """The larger of the relative errors of gradient and loss."""
        gap = math.sqrt(sum(float((self.gradient[n] - g).pow(2).sum()) for n, g in other.gradient.items()))
        size = math.sqrt(sum(float(g.pow(2).sum()) for g in other.gradient.values()))
        return max(gap / size, abs(self.loss - other.loss) / max(abs(other.loss), 1e-3))


@dataclass(frozen=True, slots=True)
class AtStart:
    """Logprobs and entropies of a row's tokens under the policy at the round's start, (T - 1,) each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


@pytest.mark.parametrize("only_step", [False, True], ids=["any step", "only step"])
@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: "-".join(map(str, chosen.values())))
def test_loss_and_gradient_equal_the_formulas(
    chosen: dict[str, Any], only_step: bool, tiny_model: Path, tmp_path: Path
) -> None:
    settings = LearnerSettings(max_grad_norm=0, **chosen)
    trainer = build_trainer(settings, tiny_model, tmp_path)
    rows = build_groups(trainer)
    first = double(trainer.model)
    old = [scored_at_start(first, row) for row in rows]
    micros = trainer.prepare(rows, only_step=only_step)
    assert len(micros) > 2, "the case must span several micro-batches"
    if not only_step:
        disturb(trainer, scale=0.03, seed=2)
    expected, rejected = reference(double(trainer.model), rows, old, settings)
    ours, numbers = backward(trainer, micros)
    assert (numbers.rows_rejected, numbers.tokens) == (
        sum(rejected),
        sum(row.tokens_trained for row, out in zip(rows, rejected, strict=True) if not out),
    )
    if settings.sequence_mask_threshold == 1.1:
        assert 0 < sum(rejected) < len(rows)
    assert ours.relative_error(expected) < WORST_RELATIVE_ERROR


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_the_loss_is_trls_of_the_same_name(
    name: str, kl: float, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one micro-batch, in which TRL's means are right. TRL's loss runs on transformers' own logits in float64."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # TRL would import it
    settings = LearnerSettings(loss_type=name, beta=kl, max_grad_norm=0, **PLAIN)
    trainer = build_trainer(settings, tiny_model, tmp_path, budget=10_000)
    (micro,) = trainer.prepare(build_groups(trainer))
    by_ids = {row.ids[1:]: row for row in build_groups(trainer)}
    lengths = micro["completion_mask"].sum(1).tolist()
    rows = [by_ids[tuple(ids[:length])] for ids, length in zip(micro["completion_ids"].tolist(), lengths, strict=True)]
    disturb(trainer, scale=0.03, seed=2)
    twin = double(trainer.model)
    ours, _ = backward(trainer, [micro])
    their_loss = trls_loss(twin, rows, micro, settings)
    their_loss.backward()
    assert ours.relative_error(Computed(float(their_loss.detach()), gradients(twin))) < WORST_RELATIVE_ERROR


def trls_loss(twin: Any, rows: Sequence[TokenRow], micro: Micro, settings: LearnerSettings) -> torch.Tensor:
    """The loss of TRL's GRPOTrainer, given what it reads of itself; `twin` computes the logprobs."""
    from trl import GRPOTrainer

    scored = [reference_scores(twin, row) for row in rows]
    logprobs, entropies = (
        torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*scored, strict=True)
    )
    low, high = settings.clip
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropies, None),
        loss_type="grpo" if settings.loss_type == "gspo" else settings.loss_type,
        importance_sampling_level=settings.objective.ratio, epsilon_low=low, epsilon_high=high, beta=settings.beta,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        max_completion_length=settings.dr_grpo_length, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=False, vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, current_gradient_accumulation_steps=1, model=twin,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )  # fmt: skip
    trained = micro["trained"].long()
    inputs = micro | {"prompt_mask": torch.ones_like(micro["prompt_ids"]), "tool_mask": trained}
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, twin, inputs)
    return loss


def test_masked_tokens_get_exactly_zero_gradient_and_trained_ones_do_not(tiny_model: Path, tmp_path: Path) -> None:
    trainer = build_trainer(LearnerSettings(), tiny_model, tmp_path)
    micros = trainer.prepare(build_groups(trainer))
    captured: list[torch.Tensor] = []

    def keep_gradient(module: Any, inputs: Any, output: Any) -> None:
        output.retain_grad()
        captured.append(output)

    handle = trainer.model.get_base_model().base_model.norm.register_forward_hook(keep_gradient)
    backward(trainer, micros)
    handle.remove()
    for hidden, micro in zip(captured, micros, strict=True):
        assert hidden.grad is not None
        predicts = torch.nn.functional.pad(micro["trained"], (0, 1))  # (N, 1 + T): the last token predicts none
        assert not hidden.grad[~predicts].any()
        assert hidden.grad[predicts].any(-1).all()


def test_a_round_of_one_step_looks_at_each_model_once_and_asks_the_lm_head_for_trained_tokens_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(LearnerSettings(beta=0.05), tiny_model, tmp_path)
    rows = build_groups(trainer)
    passes: list[Any] = []
    handle = trainer.model.get_base_model().base_model.register_forward_hook(lambda *given: passes.append(given[0]))
    with Normalised() as head:
        micros = trainer.prepare(rows, only_step=True)
        backward(trainer, micros)
    handle.remove()
    assert len(passes) == 2 * len(micros)  # the policy and the base model
    assert head.tokens == 2 * sum(row.tokens_trained for row in rows)


class Normalised(TorchDispatchMode):
    """Counts the distributions over the vocabulary that were normalised."""

    tokens = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.amax.default and args[0].shape[-1] == VOCABULARY:
            self.tokens += len(args[0])
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("only_step", [False, True], ids=["any step", "only step"])
@pytest.mark.parametrize("limit", [None, 1.1])
@pytest.mark.parametrize("name", ["dapo", "gspo", "dr_grpo"])
def test_a_mean_over_trajectories_counts_each_once_whatever_its_rows(
    name: str, limit: float | None, only_step: bool, tiny_model: Path, tmp_path: Path
) -> None:
    settings = LearnerSettings(
        loss_type=name, mean_over="trajectories", sequence_mask_threshold=limit, max_grad_norm=0, beta=0.05
    )
    trainer = build_trainer(settings, tiny_model, tmp_path)
    names = ("a", "b", "a", "c", "a", "b", "d", "a", "e")
    rows = [replace(row, trajectory_id=one) for row, one in zip(build_groups(trainer), names, strict=True)]
    old = [scored_at_start(double(trainer.model), row) for row in rows]
    micros = trainer.prepare(rows, only_step=only_step)
    if not only_step:
        disturb(trainer, scale=0.03, seed=2)
    expected, rejected = reference(double(trainer.model), rows, old, settings)
    ours, numbers = backward(trainer, micros)
    assert numbers.rows_rejected == sum(rejected)
    assert bool(sum(rejected)) == (limit is not None)
    assert ours.relative_error(expected) < WORST_RELATIVE_ERROR


def test_ten_forks_count_as_much_as_their_sibling_only_in_a_mean_over_trajectories(
    tiny_model: Path, tmp_path: Path
) -> None:
    forked, sibling = (build_row(seed, advantage=1.0) for seed in (1, 2))
    choices: dict[Literal["trajectories", "rows", "tokens"], bool] = {
        "trajectories": True,
        "rows": False,
        "tokens": False,
    }
    for mean_over, equal in choices.items():
        settings = LearnerSettings(mean_over=mean_over, max_grad_norm=0, **PLAIN)
        trainer = build_trainer(settings, tiny_model, tmp_path, budget=10_000)
        once = backward(trainer, trainer.prepare([forked, sibling]))[0]
        ten_times = backward(trainer, trainer.prepare([*[forked] * 10, sibling]))[0]
        assert (once.relative_error(ten_times) < WORST_RELATIVE_ERROR) == equal


@pytest.mark.parametrize("shape", ["clip", "weight"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "none"])
@pytest.mark.parametrize("mean", ["tokens", "rows", "trajectories", "length"])
def test_any_combination_of_a_plug_ins_parts_is_the_formula(
    shape: Any, ratio: Any, mean: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 0.001 if ratio == "sequence" else 0.05
    high = width if shape == "clip" else 1 + width
    monkeypatch.setitem(OBJECTIVES, "combined", Objective(shape, ratio, mean, width, high))
    settings = LearnerSettings(loss_type="combined", dr_grpo_length=50, max_grad_norm=0, **PLAIN)
    trainer = build_trainer(settings, tiny_model, tmp_path)
    rows = build_groups(trainer)
    old = [scored_at_start(double(trainer.model), row) for row in rows]
    micros = trainer.prepare(rows)
    disturb(trainer, scale=0.03, seed=2)
    expected, _ = reference(double(trainer.model), rows, old, settings)
    ours, numbers = backward(trainer, micros)
    assert ours.relative_error(expected) < WORST_RELATIVE_ERROR
    assert (numbers.clipped_sum > 0) == (ratio != "none")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_size_of_micro_batches_does_not_change_the_gradient(name: str, tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for budget in (1, 10_000):
        trainer = build_trainer(LearnerSettings(loss_type=name), tiny_model, tmp_path, budget=budget)
        results.append(backward(trainer, trainer.prepare(build_groups(trainer)))[0])
    assert results[0].relative_error(results[1]) < WORST_RELATIVE_ERROR


def test_a_rejected_row_is_as_if_it_had_never_been_there(tiny_model: Path, tmp_path: Path) -> None:
    for name in OBJECTIVES:
        trainer = build_trainer(LearnerSettings(loss_type=name, sequence_mask_threshold=2.0), tiny_model, tmp_path)
        rows = build_groups(trainer)
        sampled = tuple((lp - 3.0) * m for lp, m in zip(rows[2].logprobs, rows[2].mask, strict=True))
        foreign = replace(rows[2], logprobs=sampled)
        without = backward(trainer, trainer.prepare(rows))[0]
        with_it, numbers = backward(trainer, trainer.prepare([*rows, foreign]))
        corrected = OBJECTIVES[name].ratio != "none"
        assert numbers.rows_rejected == corrected
        if corrected:
            assert with_it.relative_error(without) < WORST_RELATIVE_ERROR


def build_trainer(
    settings: LearnerSettings, model: Path, folder: Path, *, budget: int = 160
) -> loss.RecordedGRPOTrainer:
    """A trainer whose LoRA B is not zero: at zero, half of the gradient would vanish and hide errors."""
    trainer = lora.build(str(model), replace(settings, token_budget=budget))
    disturb(trainer, scale=0.05, seed=1)
    return trainer


def disturb(trainer: loss.RecordedGRPOTrainer, *, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.lora_parameters().items():
            if "lora_B" in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def build_groups(trainer: loss.RecordedGRPOTrainer) -> list[TokenRow]:
    """Ragged groups sampled by a policy near the trainer's; some rows uncorrected, some with an advantage a token."""
    dice, rows, sampler = random.Random(0), [], double(trainer.model)
    for group, size in enumerate(GROUP_SIZES):
        for member, advantage in enumerate(group_advantages([dice.random() for _ in range(size)])):
            row = build_row(10 * group + member, advantage=advantage, temperature=dice.choice([1.0, 0.7, 1.3]))
            true = [0.0, *scored_at_start(sampler, row).logprobs.tolist()]
            sampled = [min(lp + dice.gauss(0, 0.5), 0.0) if m else 0.0 for lp, m in zip(true, row.mask, strict=True)]
            rows.append(replace(row, logprobs=tuple(sampled), importance=member != 1))
    rows[0] = replace(rows[0], advantages=tuple(dice.gauss(0, 1) for _ in rows[0].ids))
    return rows


def backward(trainer: loss.RecordedGRPOTrainer, micros: Sequence[Micro]) -> tuple[Computed, loss.StepMetrics]:
    trainer.model.zero_grad()
    numbers = trainer.backward(micros)
    return Computed(numbers.loss, gradients(trainer)), numbers


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = model.model if isinstance(model, loss.RecordedGRPOTrainer) else model
    return {n: p.grad.double().clone() for n, p in found.named_parameters() if p.grad is not None}


def double(model: Any) -> Any:
    """A float64 copy of the model, without what the trainer hung into it."""
    twin = copy.deepcopy(model).double()
    base = twin.get_base_model()
    base.__dict__.pop("forward", None)  # that of ForwardPass
    return twin


def reference_scores(model: Any, row: TokenRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the row's tokens at its temperature, and the entropies there, (T - 1,) each."""
    ids = torch.tensor([row.ids])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / row.temperature, -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def reference_logprobs(model: Any, row: TokenRow) -> torch.Tensor:
    return reference_scores(model, row)[0]


def scored_at_start(model: Any, row: TokenRow) -> AtStart:
    with torch.no_grad():
        return AtStart(*reference_scores(model, row))


def reference(
    model: Any, rows: Sequence[TokenRow], old: Sequence[AtStart], settings: LearnerSettings
) -> tuple[Computed, list[bool]]:
    """The loss as the papers write it, over the rows of one optimiser step, and which rows are rejected."""
    rejected = [is_rejected(row, start.logprobs, settings) for row, start in zip(rows, old, strict=True)]
    kept = [(row, start) for row, start, out in zip(rows, old, rejected, strict=True) if not out]
    least = entropy_threshold(kept, settings.top_entropy_quantile)
    n_tokens = sum(row.tokens_trained for row, _ in kept)
    of_trajectory: Counter[str] = Counter()
    for row in rows:
        of_trajectory[row.trajectory_id] += row.tokens_trained
    n_trajectories = sum(row.tokens_trained / of_trajectory[row.trajectory_id] for row, _ in kept)
    mean = settings.objective.mean
    total = torch.zeros((), dtype=torch.float64)
    for row, start in kept:
        token_losses = reference_row(model, row, start, settings, least)  # (T - 1,)
        if mean == "trajectories":
            total = total + token_losses.sum() / of_trajectory[row.trajectory_id] / n_trajectories
        elif mean == "rows":
            total = total + token_losses.sum() / row.tokens_trained / len(kept)
        elif mean == "length":
            total = total + token_losses.sum() / settings.dr_grpo_length / len(kept)
        else:
            total = total + token_losses.sum() / n_tokens
    total.backward()
    return Computed(float(total.detach()), gradients(model)), rejected


def is_rejected(row: TokenRow, old: torch.Tensor, settings: LearnerSettings) -> bool:
    limit, mask = settings.sequence_mask_threshold, torch.tensor(row.mask[1:]).bool()
    if limit is None or not row.importance or settings.loss_type == "sft":
        return False
    gap = (old - torch.tensor(row.logprobs[1:]))[mask]
    largest = math.log(limit) * math.sqrt(max(1.0, 64 / len(gap)))
    return not max(abs(float(gap.mean())), float((gap.exp() - 1 - gap).mean())) <= largest


def entropy_threshold(rows: Sequence[tuple[TokenRow, AtStart]], share: float) -> float:
    """The entropy that a token must exceed to carry the policy gradient."""
    entropies = sorted(
        float(entropy)
        for row, start in rows
        for entropy, trained in zip(start.entropies, row.mask[1:], strict=True)
        if trained
    )
    return -math.inf if share == 1 else entropies[round((1 - share) * len(entropies)) - 1]


def reference_row(model: Any, row: TokenRow, start: AtStart, settings: LearnerSettings, least: float) -> torch.Tensor:
    mask = torch.tensor(row.mask[1:], dtype=torch.float64)  # (T - 1,)
    new, entropy = reference_scores(model, row)
    objective = settings.objective
    old = new.detach() if objective.ratio == "none" else start.logprobs
    advantage = torch.tensor(row.advantages[1:] if row.advantages else [row.advantage] * len(new), dtype=torch.float64)
    if settings.loss_type == "distillation":  # from log p_teacher - log p_engine
        advantage = (advantage + torch.tensor(row.logprobs[1:]) - old).clamp(-10.0, 10.0)
    weight = torch.ones_like(new)
    if settings.vllm_importance_sampling_clip_max is not None and row.importance and settings.loss_type != "sft":
        weight = (old - torch.tensor(row.logprobs[1:])).exp().clamp(max=settings.vllm_importance_sampling_clip_max)
    low, high = settings.clip
    ratio = (new - old).exp()
    if objective.ratio == "sequence":
        ratio = (((new - old) * mask).sum() / mask.sum()).exp() * torch.ones_like(new)
    if settings.loss_type == "sft":
        token_loss = -advantage * new
    elif objective.shape == "weight":
        token_loss = -ratio.clamp(max=high).detach() * advantage * new
    else:
        token_loss = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    token_loss = token_loss * weight * (start.entropies > least)
    if settings.beta:
        with torch.no_grad(), model.disable_adapter():
            base = reference_logprobs(model, row)
        token_loss = token_loss + settings.beta * ratio * ((base - new).exp() - (base - new) - 1)
    token_loss = token_loss - settings.entropy_coef * entropy
    return token_loss * mask


def build_experts(folder: Path, coefficient: float) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, output_router_logits=True, router_aux_loss_coef=coefficient,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_the_routers_loss_does_not_grow_with_the_number_of_micro_batches(tmp_path: Path) -> None:
    base = build_experts(tmp_path / "experts", coefficient=1.0)
    rows = [build_row(3, advantage=1e-6)] * 8  # equal rows: every micro-batch is as well balanced as all together

    def trained(token_budget: int) -> RoundReport:
        settings = LearnerSettings(
            target_modules=["q_proj", "v_proj", "gate"], token_budget=token_budget, max_grad_norm=0.0, threads=1
        )
        return Learner(str(base), settings).train_round(rows)

    together, apart = trained(8192), trained(1)
    assert together.loss > 0.5  # the router's part is there, and large
    assert apart.loss == pytest.approx(together.loss, rel=1e-4)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_the_mismatch_of_a_row_is_trainer_minus_engine_at_its_trained_tokens(tiny_model: Path, steps: int) -> None:
    settings = LearnerSettings(
        learning_rate=1e-3, steps_per_round=steps, threads=1, token_budget=64, sequence_mask_threshold=1e9
    )
    learner = Learner(str(tiny_model), settings)
    rows = [replace(row, temperature=1.0) for row in build_rows(6, seed=3)]
    rows[2] = replace(rows[2], importance=False)
    scored = learner.score(rows)
    report = learner.train_round(rows)
    assert len(report.mismatch) == len(rows)
    for place, (row, logprobs, packed) in enumerate(zip(rows, scored, report.mismatch, strict=True)):
        known = zip(logprobs, row.logprobs, row.mask, strict=True)
        expected = [ours - theirs for ours, theirs, trained in known if trained]
        assert packed is not None
        assert unpack_halves(packed) == pytest.approx(() if place == 2 else expected, abs=0.01, rel=0.01)
    assert "mismatch" not in report.figures()
