"""The trainer of one base model: the loss of a step over recorded token rows, its gradient, and the optimizer.

`prepare` makes the micro-batches of a step, `backward` puts the gradient of its loss into the LoRA
parameters, `optimizer_step` applies it. Its promises and choices:

- No rollouts and rewards: production traffic supplies them.
- Means are over the step, whatever its micro-batches and processes: a sum of weighted tokens is divided by the number
  of units that were not rejected, which is known after the last micro-batch.
- The importance weight is a factor of the advantage: every loss is linear in it.
- No extra forward pass for the policy at the start of the round if a round is one step: the training pass computes the
  same logprobs. A row that they reject is its own reference, so its KL is 0.
- Rows without padding only with FlashAttention, which needs no mask for it. Rows with a common prefix are packed and
  share it (forward_pass.py).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from ratchet.trainer.errors import TrainingDiverged
from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.forward_pass import (
    ForwardPass,
    Micro,
    Scored,
    attention_pairs_per_token,
    batched,
    collate,
    empty_micro_batch,
    split,
    token_weights,
)
from ratchet.trainer.learner.gpu_memory import ActivationMemory
from ratchet.trainer.learner.launch import processes, rank
from ratchet.trainer.learner.learning_rate import LearningRateController, sample_stride
from ratchet.trainer.learner.lora_linear import use_fused_lora
from ratchet.trainer.learner.process_group import clip_gradients, gradient_sync, reshard
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import Objective, StepTokens
from ratchet.trainer.statistics import MIN_SCORE_SPREAD

# Off-policy correction of the difference between vLLM's and the trainer's probabilities, in two ways, both with the
# policy at the start of the round:
#
# Truncated importance sampling of tokens: min(pi_trainer / pi_engine, C) multiplies the policy term of a token. Yao et
# al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
#
# Rejection of rows: a row is dropped if another policy sampled it, by log r = log(pi_trainer / pi_engine) of its n
# trained tokens: if |mean of log r| (the geometric level; Liu et al. 2025, "When speed kills stability") or the mean
# of r - 1 - log r (k3, in which differences of both signs do not cancel; Schulman 2020, "Approximating KL divergence")
# is above the limit. Its tokens do not count in the denominator either. The limit widens with the age of a row in
# versions, as the policy moves: log L (1 + age) / 8, and log L from an age of 7 on. Below 64 tokens it grows with
# sqrt(64 / n), as the standard error of a mean does: so one noisy or much-learnt token of a short answer rejects
# nothing. tests/trainer/test_rejection.py has the error rates.
#
# Rows without `importance` (sampled with penalties or a bias) are neither weighted nor rejected: their logprobs belong
# to another distribution. With top_p, top_k or min_p, both policies are normalised over the tokens that these leave.

MAX_DISTILLATION_ADVANTAGE = 10.0  # nats
_FULL_LIMIT_AGE = 8  # versions, including the sampling one, from which the whole limit applies
_FULL_LIMIT_TOKENS = 64  # trained tokens of a row; fewer widen its limit


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The differences between the trainer's and vLLM's logprobs, over the comparable trained tokens.

    fresh_*    over those of them that the version sampled from which the round starts
    """

    total: float
    largest: float
    tokens: int
    truncated: int
    fresh_total: float
    fresh_tokens: int


def log_ratio(micro: Micro) -> torch.Tensor:
    """Return log(pi_trainer / pi_engine) of the trained tokens, (N, T); 0 elsewhere."""
    gap = micro["old_per_token_logps"] - micro["sampling_per_token_logps"]  # (N, T)
    return gap.masked_fill(~micro["trained"], 0.0)


def importance_weight(micro: Micro, cap: float | None) -> torch.Tensor:
    """Return min(pi_trainer / pi_engine, cap) of each token, (N, T); 1 if there is no correction."""
    if cap is None:
        return torch.ones_like(micro["sampling_per_token_logps"])
    return torch.where(micro["importance"], log_ratio(micro).exp().clamp(max=cap), 1.0)


def kept_rows(micro: Micro, limit: float | None) -> torch.Tensor:
    """Return which rows are trained, (N, 1): not those too far from the policy for their age and number of tokens."""
    n_row = micro["trained"].sum(-1, keepdim=True)  # (N, 1)
    if limit is None:
        return n_row > 0
    share = ((1.0 + micro["age"]) / _FULL_LIMIT_AGE).clamp(max=1.0)  # (N, 1)
    n_row = n_row.clamp(min=1)
    largest = share * math.log(limit) * (_FULL_LIMIT_TOKENS / n_row).clamp(min=1.0).sqrt()  # (N, 1)
    log_r = log_ratio(micro)  # (N, T)
    level = log_r.sum(-1, keepdim=True).abs() / n_row  # (N, 1)
    k3 = (log_r.exp() - 1.0 - log_r).sum(-1, keepdim=True) / n_row  # (N, 1)
    near = (level <= largest) & (k3 <= largest)  # False for nan
    return micro["trained"].any(-1, keepdim=True) & (near | ~micro["importance"])


def mismatch(micros: Sequence[Micro], cap: float | None) -> Mismatch:
    """Compare the trainer with vLLM over micro-batches, without rows that lack `importance`."""
    total, largest, truncated, tokens, fresh_total, fresh_tokens = 0.0, 0.0, 0, 0, 0.0, 0
    for micro in micros:
        compared = micro["trained"] & micro["importance"]  # (N, T)
        ratio = log_ratio(micro)  # (N, T)
        gap = ratio[compared]  # (K,)
        if not gap.numel():
            continue
        fresh = ratio[compared & (micro["age"] == 0)]
        fresh_total += float(fresh.abs().sum())
        fresh_tokens += fresh.numel()
        total += float(gap.abs().sum())
        largest = max(largest, float(gap.abs().max()))
        tokens += gap.numel()
        truncated += 0 if cap is None else int((gap.exp() > cap).sum())
    return Mismatch(total, largest, tokens, truncated, fresh_total, fresh_tokens)


def advantages_at_start(micro: Micro, objective: Objective) -> torch.Tensor:
    """Return the advantages (N, T) for the policy at the start of the round, whose logprobs the micro-batch has.

    Distillation: log p_teacher - log p. The rows hold log p_teacher - log p_engine, of the policy that sampled them.
    """
    advantages = micro["advantages"]
    if not objective.distillation:
        return advantages
    gap = advantages - log_ratio(micro)  # (N, T)
    return gap.clamp(-MAX_DISTILLATION_ADVANTAGE, MAX_DISTILLATION_ADVANTAGE)


def token_advantages(micro: Micro, objective: Objective, weight: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return the weighted advantages (N, T) as the objective changes them.

    The micro-batch has the old policy's logprobs; `weight` is the importance weight of each token, (N, T).
    """
    advantages = advantages_at_start(micro, objective) * weight  # (N, T)
    if objective.token_advantages is None:
        return advantages
    trained, sampled = micro["trained"], micro["sampling_per_token_logps"]  # (N, T) each
    tokens = StepTokens(advantages * trained, micro["old_per_token_logps"], entropy, sampled, trained)
    changed: torch.Tensor = objective.token_advantages(tokens)
    return changed


# The loss of one micro-batch. Pure.
#
# With A the advantage of a token, w its weight in the step's mean, n the number of the step's units, log p its logprob
# under the policy, p_0 under the policy at the start of the round and p_ref under the base model:
#
#     r       p / p_0 of the token; or of its row, exp of the mean of log p - log p_0 over the row's n_row trained
#             tokens (GSPO, arXiv:2507.18071, equation 7); 1 without a ratio
#     clip    -min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv:1707.06347, equation 7; DAPO, arXiv:2503.14476,
#             equation 8
#     weight  -sg(min(r, high)) A log p: CISPO, arXiv:2506.13585, equation 4. Without a ratio: -A log p (SFT)
#     KL      beta r (p_ref / p - 1 - log(p_ref / p)): k3 of Schulman 2020, "Approximating KL divergence", with the
#             ratio that makes its gradient that of the reverse KL (DeepSeek-V3.2, arXiv:2512.02556, equation 7)
#     H       the entropy of the token's distribution, as a bonus
#
#     loss = sum over tokens of w / n (clip or weight + KL - entropy_coef H)
#
# Left out of the papers: the KL as a part of the reward, and clipping against vLLM's logprobs. The mismatch with vLLM
# enters by the importance weight in A alone, see above; both would correct twice.
# tests/trainer/test_loss_contract.py compares it with the formulas in float64 and with TRL's losses.


def ratio(micro: Micro, logprobs: torch.Tensor, level: str) -> torch.Tensor:
    """Return r, (N, T) by token or (N, 1) by row; `logprobs` (N, T) are the policy's."""
    log_ratio = (logprobs - micro["old_per_token_logps"]) * micro["trained"]  # (N, T)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / micro["trained"].sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    return log_ratio.exp()


def policy_loss(micro: Micro, logprobs: torch.Tensor, entropy: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    """Return the sum over tokens of w times their loss, (); `logprobs` and `entropy` (N, T) are the policy's."""
    objective, (low, high), advantages = settings.objective, settings.clip, micro["advantages"]
    r = ratio(micro, logprobs, objective.ratio)
    if objective.shape == "weight":
        loss = -r.clamp(max=high).detach() * advantages * logprobs  # (N, T)
    else:
        loss = -torch.min(r * advantages, r.clamp(1 - low, 1 + high) * advantages)  # (N, T)
    if settings.beta:
        gap = micro["ref_per_token_logps"] - logprobs  # (N, T)
        loss = loss + settings.beta * r * (gap.exp() - gap - 1)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    return (loss * micro["weights"]).sum()


def clipped(micro: Micro, logprobs: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    """Return which tokens' ratios lost their gradient, or for `weight` a part of their weight, to the clip; (N, T)."""
    r, advantages, (low, high) = ratio(micro, logprobs, settings.objective.ratio), micro["advantages"], settings.clip
    if settings.objective.shape == "weight":
        return (r > high) & (advantages > 0)
    return ((r < 1 - low) & (advantages < 0)) | ((r > 1 + high) & (advantages > 0))


# Whitening: advantages with mean 0 and variance 1 over all trained tokens of a round, for REINFORCE++. Pure.
#
# If all advantages are equal, they become 0, and the learner refuses the round: rounding noise is never scaled up.


def whiten(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows with whitened advantages: every trained token counts once."""
    weighted = [pair for row in rows for pair in _advantages(row)]
    tokens = sum(count for _, count in weighted) or 1
    mean = sum(value * count for value, count in weighted) / tokens
    std = math.sqrt(sum((value - mean) ** 2 * count for value, count in weighted) / tokens)
    scale = 1.0 / std if std > MIN_SCORE_SPREAD else 0.0
    return [_shifted(row, mean, scale) for row in rows]


def _advantages(row: TokenRow) -> list[tuple[float, int]]:
    if row.advantages is None:
        return [(row.advantage, row.tokens_trained)]
    return [(value, 1) for value, trained in zip(row.advantages, row.mask, strict=True) if trained]


def _shifted(row: TokenRow, mean: float, scale: float) -> TokenRow:
    each = tuple((value - mean) * scale for value in row.advantages) if row.advantages is not None else None
    return replace(row, advantage=(row.advantage - mean) * scale, advantages=each)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The figures of one optimizer step over all processes; sums are over its trained tokens.

    `applied` is False if no row had a learning signal; the weights then did not change.
    """

    applied: bool
    loss: float
    grad_norm: float
    entropy_sum: float
    clipped_sum: float
    kl_sum: float
    tokens: int
    rows_rejected: int
    tokens_forwarded: int


class RecordedGRPOTrainer:
    """Trains the LoRA adapter of `model` on recorded rows: `prepare` the rows of each step, then `optimizer_step`.

    With several processes, each calls the same methods with the same rows and computes its share. Rows may differ in
    length and in group size. `dtype` is the number format of the computation; the adapter is fp32.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: LearnerSettings,
        rate_controller: LearningRateController,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.device = device
        self.rate_controller = rate_controller
        self.on_rows: Callable[[int], None] = lambda rows: None  # called after each micro-batch
        self._dtype = dtype
        self._pad_id: int = tokenizer.pad_token_id or 0  # padding is masked out, so any id will do
        self.apply_settings(settings)
        for parameter in self.lora_parameters().values():  # bf16 would lose most updates
            if parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        base = model.get_base_model()
        use_fused_lora(model)
        memory = ActivationMemory(base, settings.gradient_checkpointing, offload=settings.activation_offload)
        self._pass = ForwardPass(base, memory)
        self._attention_pairs_per_token = attention_pairs_per_token(base) if settings.share_prefixes else None
        trained = list(self.lora_parameters().values())
        self.optimizer = torch.optim.AdamW(
            trained, lr=rate_controller.rate, weight_decay=settings.weight_decay, fused=True
        )
        model.train()  # gradient checkpointing needs it; nothing drops out
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    def apply_settings(self, settings: LearnerSettings) -> None:
        """Use other settings from now on; those that shape the model and its adapter must be unchanged."""
        self._settings = settings
        self._objective = settings.objective

    def prepare(self, rows: Sequence[TokenRow], *, only_step: bool = False) -> list[Micro]:
        """Return this process's micro-batches of one optimizer step.

        They hold the logprobs of the current policy, which is the one at the start of the round. With `only_step` the
        step is the whole round, and the loss fills them in.
        """
        shares = split(
            rows,
            self._settings.token_budget,
            pairs_per_token=self._attention_pairs_per_token,
            rank=rank(),
            ranks=processes(),
        )
        micros = [self._collate(r) if r else empty_micro_batch(rows[0], self._pad_id, self.device) for r in shares]
        of_trajectory: Counter[str] = Counter()
        for row in rows:
            of_trajectory[row.trajectory_id] += row.tokens_trained
        units = {"tokens": of_trajectory.total(), "trajectories": len(of_trajectory)}.get(
            self._objective.mean, len(rows)
        )
        tokens = sum(len(row.ids) for row in rows)
        for micro, packs in zip(micros, shares, strict=True):
            share = sum(len(row.ids) for pack in packs for row in pack) / tokens * processes()
            micro["router_share"] = torch.tensor(share, device=self.device)
            of_rows = [[of_trajectory[row.trajectory_id]] for pack in packs for row in pack] or [[1]]
            micro["trajectory_tokens"] = torch.tensor(of_rows, device=self.device)  # (N, 1) in this step
            micro["num_items_in_batch"] = torch.tensor(float(units), device=self.device)
            self._set_token_weights(micro, torch.ones_like(micro["importance"]))  # rows are rejected later
            if self._settings.beta:
                micro["ref_per_token_logps"] = self.token_logprobs(micro, adapter=False)  # (N, T)
        if self._needs_old_logprobs(only_step):
            self._keep_high_entropy(micros, [self._score_old_policy(micro) for micro in micros])
        return micros

    def optimizer_step(self, micros: Sequence[Micro]) -> StepMetrics:
        """Take one step on the summed loss of the micro-batches. Raises TrainingDiverged before a non-finite step."""
        step = self.backward(micros)
        if not step.applied:
            self.optimizer.zero_grad()
            return step
        if not torch.isfinite(torch.tensor(step.grad_norm)):
            self.optimizer.zero_grad()
            raise TrainingDiverged(
                f"the gradient norm is {step.grad_norm}: the step was not taken; resume from the last checkpoint "
                "with a lower learning_rate, or look for rows with extreme logprobs"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return step

    def backward(self, micros: Sequence[Micro]) -> StepMetrics:
        """Put the clipped gradient of the step's loss into the LoRA parameters.

        The mean divides by the number of units that were not rejected. It is known after the last micro-batch, so the
        gradient is scaled then.
        """
        sums = torch.zeros(9, dtype=torch.float64)
        for place, micro in enumerate(micros):
            last = place == len(micros) - 1
            with gradient_sync(self.model, last=last):
                loss, scored = self._loss(micro)
                loss.backward()
            sums += self._sums(micro, scored, float(loss.detach()))
            self.on_rows(len(micro["prompt_ids"]))
        total = [sum(values) for values in zip(*process_group.gather(sums.tolist()), strict=True)]
        loss_sum, units, signal, rejected, *means = total
        scale = float(micros[0]["num_items_in_batch"]) / max(units, 1e-6)
        limit = self._settings.max_grad_norm or float("inf")
        grad_norm = clip_gradients(self.lora_parameters().values(), scale, limit)
        return StepMetrics(
            applied=units > 0 and (signal > 0 or bool(self._settings.beta)),
            loss=loss_sum * scale / processes(),
            grad_norm=grad_norm,
            entropy_sum=means[0],
            clipped_sum=means[1],
            kl_sum=means[2],
            tokens=round(means[3]),
            rows_rejected=round(rejected),
            tokens_forwarded=round(means[4]),
        )

    def mismatch(self, micros: Sequence[Micro]) -> Mismatch:
        """Return the difference between vLLM's logprobs and this policy's, over the micro-batches of all processes."""
        own = mismatch(micros, self._settings.vllm_importance_sampling_clip_max)
        each = list(zip(*map(astuple, process_group.gather(own)), strict=True))
        total, _, tokens, truncated, fresh_total, fresh_tokens = map(sum, each)
        return Mismatch(total, max(each[1]), tokens, truncated, fresh_total, fresh_tokens)

    def shift_sample(self, rows: Sequence[TokenRow]) -> list[Micro]:
        """Return this process's share of a sample of the rows, with the logprobs of the current policy."""
        some = rows[:: sample_stride(sum(row.tokens_trained for row in rows))]
        micros = self.prepare(some, only_step=True)
        for micro in micros:
            micro["old_per_token_logps"] = self.token_logprobs(micro)
            micro["kept"] = micro["trained"].any(-1, keepdim=True)
        return micros

    def set_learning_rate(self, rate: float) -> None:
        """Use this rate and the settings' weight decay, not those the optimizer was created or loaded with."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._settings.weight_decay

    def score(self, rows: Sequence[TokenRow], *, adapter: bool = True) -> list[list[float]]:
        """Return the logprobs of all tokens of each row but the first, (T,) each; all of them must be trained.

        Each process scores its share. One without a share scores another one's: a sharded model needs all of them.
        """
        batches = batched(rows, self._settings.token_budget, self._attention_pairs_per_token)
        ranks, place = processes(), rank()
        own: list[tuple[int, list[float]]] = []
        for start in range(0, len(batches), ranks):
            packs = batches[min(start + place, len(batches) - 1)]
            micro = self._collate([[rows[index] for index in pack] for pack in packs])
            logprobs = self.token_logprobs(micro, adapter=adapter).tolist()  # (N, T)
            own += zip((index for pack in packs for index in pack), logprobs, strict=True)
        scored = dict(pair for pairs in process_group.gather(own) for pair in pairs)
        return [scored[index][: len(row.ids) - 1] for index, row in enumerate(rows)]

    def token_logprobs(self, micro: Micro, *, adapter: bool = True) -> torch.Tensor:
        """Return logprobs (N, T) of the trained tokens at their rows' temperatures, 0 elsewhere."""
        return self._score(micro, adapter=adapter).logprobs

    def lora_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name, in fp32."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _collate(self, packs: Sequence[Sequence[TokenRow]]) -> Micro:
        return collate(packs, self._pad_id, self.device, padding_free=self._pass.padding_free)

    def _needs_old_logprobs(self, only_step: bool) -> bool:
        """Return whether the policy at the start of the round must be computed before the loss."""
        return self._objective.ratio != "none" and (not only_step or self._settings.top_entropy_quantile < 1)

    def _score_old_policy(self, micro: Micro) -> torch.Tensor:
        """Use the current policy as the one at the start of the round; return its entropies, (N, T)."""
        scored = self._score(micro)
        self._set_old_policy(micro, scored.logprobs, scored.entropy)
        return scored.entropy

    def _set_old_policy(self, micro: Micro, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        """Set the logprobs at the start of the round, and the importance weights and rejections that follow."""
        micro["old_per_token_logps"] = logprobs  # (N, T)
        corrected = self._objective.ratio != "none"
        kept = kept_rows(micro, self._settings.sequence_mask_threshold if corrected else None)  # (N, 1)
        weight = importance_weight(micro, self._settings.vllm_importance_sampling_clip_max if corrected else None)
        advantages = token_advantages(micro, self._objective, weight, entropy)
        micro["advantages"] = torch.where(kept, advantages, 0.0)  # (N, T)
        if self._settings.beta:
            micro["ref_per_token_logps"] = torch.where(kept, micro["ref_per_token_logps"], logprobs)  # (N, T)
        self._set_token_weights(micro, kept)

    def _set_token_weights(self, micro: Micro, kept: torch.Tensor) -> None:
        micro["weights"], micro["units"] = token_weights(micro, self._objective, self._settings.dr_grpo_length, kept)
        micro["kept"] = kept

    def _keep_high_entropy(self, micros: Sequence[Micro], entropies: Sequence[torch.Tensor]) -> None:
        """Restrict the policy gradient to the tokens of highest entropy (Wang et al. 2025, "Beyond the 80/20 rule")."""
        share = self._settings.top_entropy_quantile
        if share == 1:
            return
        local = [e[m["trained"] & m["kept"]].float().cpu() for e, m in zip(entropies, micros, strict=True)]
        gathered = torch.cat(process_group.gather(torch.cat(local)))  # of all processes
        if not gathered.numel():
            return
        threshold = float(gathered.kthvalue(max(1, round((1 - share) * gathered.numel()))).values)
        for micro, entropy in zip(micros, entropies, strict=True):
            micro["advantages"] = torch.where(entropy > threshold, micro["advantages"], 0.0)  # (N, T)

    def _loss(self, micro: Micro) -> tuple[torch.Tensor, Scored]:
        """Return the loss of a micro-batch as its share of the step's loss, (), and what the pass computed."""
        balance = self._router_loss_coefficient()
        with self._autocast():
            scored = self._pass(self.model, micro, router=bool(balance))
        if "old_per_token_logps" not in micro:
            self._set_old_policy(micro, scored.logprobs.detach(), scored.entropy.detach())
        loss = policy_loss(micro, scored.logprobs, scored.entropy, self._settings)
        loss = loss * processes() / micro["num_items_in_batch"]  # gradients are averaged over the processes
        if scored.aux_loss is not None:  # weighted by tokens, its sum over the micro-batches is its mean over the step
            loss = loss + balance * scored.aux_loss * micro["router_share"]
        return loss, scored

    def _router_loss_coefficient(self) -> float:
        config = self.model.config.get_text_config()
        return getattr(config, "router_aux_loss_coef", 0.0) if hasattr(config, "output_router_logits") else 0.0

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def _sums(self, micro: Micro, scored: Scored, loss: float) -> torch.Tensor:
        """Return loss, units, tokens with a signal, rejected rows; entropy, clipped, KL and number of the kept tokens;
        tokens forwarded.
        """
        logprobs, entropy = scored.logprobs.detach(), scored.entropy.detach()  # (N, T) each
        on = micro["trained"] & micro["kept"]  # (N, T)
        kl = torch.zeros(())
        if self._settings.beta:
            gap = (micro["ref_per_token_logps"] - logprobs)[on]  # (K,)
            kl = (gap.exp() - gap - 1).sum()
        counts = [
            micro["units"],
            (micro["advantages"][on] != 0).sum(),
            (micro["trained"].any(-1, keepdim=True) & ~micro["kept"]).sum(),
            entropy[on].sum(),
            clipped(micro, logprobs, self._settings)[on].sum(),
            kl,
            on.sum(),
            micro["forwarded_ids"].numel(),
        ]
        return torch.tensor([loss, *map(float, counts)], dtype=torch.float64)

    @torch.no_grad()
    def _score(self, micro: Micro, *, adapter: bool = True) -> Scored:
        """Return logprobs and entropies (N, T) of the trained tokens, without a gradient."""
        with contextlib.nullcontext() if adapter else self.model.disable_adapter(), self._autocast():
            scored = self._pass(self.model, micro)
        reshard(self.model)
        return scored
