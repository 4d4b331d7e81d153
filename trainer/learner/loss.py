"""The trainer of one base model: the loss of a step over recorded token rows, its gradient, and the optimizer.

`prepare` makes the micro-batches of a step, `backward` puts the gradient of its loss (policy_loss.py) into the LoRA
parameters, `optimizer_step` applies it. Its promises and choices:

- No rollouts and rewards: production traffic supplies them.
- Means are over the step, whatever its micro-batches and processes: a sum of weighted tokens is divided by the number
  of units that were not rejected, which is known after the last micro-batch.
- The importance weight (importance_sampling.py) is a factor of the advantage: every loss is linear in it.
- No extra forward pass for the policy at the start of the round if a round is one step: the training pass computes the
  same logprobs. A row that they reject is its own reference, so its KL is 0.
- Rows without padding only with FlashAttention, which needs no mask for it. Rows with a common prefix are packed and
  share it (shared_prefixes.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from ratchet.trainer.errors import TrainingDiverged
from ratchet.trainer.learner import importance_sampling, process_group, sharding
from ratchet.trainer.learner.activations import ActivationMemory
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
from ratchet.trainer.learner.launch import processes, rank
from ratchet.trainer.learner.learning_rate import LearningRateController, sample_stride
from ratchet.trainer.learner.lora_linear import use_fused_lora
from ratchet.trainer.learner.policy_loss import clipped, policy_loss
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings


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
            with sharding.gradient_sync(self.model, last=last):
                loss, scored = self._loss(micro)
                loss.backward()
            sums += self._sums(micro, scored, float(loss.detach()))
            self.on_rows(len(micro["prompt_ids"]))
        total = [sum(values) for values in zip(*process_group.gather(sums.tolist()), strict=True)]
        loss_sum, units, signal, rejected, *means = total
        scale = float(micros[0]["num_items_in_batch"]) / max(units, 1e-6)
        limit = self._settings.max_grad_norm or float("inf")
        grad_norm = sharding.clip_gradients(self.lora_parameters().values(), scale, limit)
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

    def mismatch(self, micros: Sequence[Micro]) -> importance_sampling.Mismatch:
        """Return the difference between vLLM's logprobs and this policy's, over the micro-batches of all processes."""
        own = importance_sampling.mismatch(micros, self._settings.vllm_importance_sampling_clip_max)
        each = list(zip(*map(astuple, process_group.gather(own)), strict=True))
        total, _, tokens, truncated, fresh_total, fresh_tokens = map(sum, each)
        return importance_sampling.Mismatch(total, max(each[1]), tokens, truncated, fresh_total, fresh_tokens)

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
        kept = importance_sampling.kept(micro, self._settings.sequence_mask_threshold if corrected else None)  # (N, 1)
        weight = importance_sampling.importance_weight(
            micro, self._settings.vllm_importance_sampling_clip_max if corrected else None
        )
        advantages = importance_sampling.token_advantages(micro, self._objective, weight, entropy)
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
        sharding.reshard(self.model)
        return scored
