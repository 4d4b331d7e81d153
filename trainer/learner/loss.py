"""The loss and the optimizer: TRL's GRPOTrainer on recorded token rows.

TRL supplies clipping, KL, the fused LM head and mixed precision; the training loop is ours. Differences from TRL's
trainer, with the reasons:

- No rollouts and rewards: production traffic supplies them. TRL's dataset, sampler and reward functions stay unused.
- No means per row or batch: they are wrong over ragged micro-batches. Only TRL losses that sum over tokens and divide
  by a number are used; other means are that sum with weighted tokens (trainer/learner/micro_batches.py).
- Own importance sampling, because TRL's needs its own vLLM. Every TRL loss is linear in a factor >= 0 of the
  advantage, so the weight (trainer/learner/importance_sampling.py) multiplies the advantages before TRL sees them.
- No clipping against vLLM's logprobs: the ratio is to the policy at the start of the round, recomputed here. The
  mismatch with vLLM enters by the importance weight alone ("decoupled"); both would correct twice.
- No extra forward pass for that policy if a round is one step: the training pass computes the same logprobs. A row
  that they reject is its own reference, so its KL is 0.
- The KL penalty is the k3 estimator times the ratio (DeepSeek-V3.2, arXiv:2512.02556), without an importance weight.
- Entropy bonus and entropy quantile are computed over the step; TRL computes them per micro-batch.
- Rows without padding only with FlashAttention, which needs no mask for it. Rows with a common prefix are packed and
  share it (trainer/learner/shared_prefixes.py).

TRL's GRPOTrainer changes several times a week, so its version is pinned; tests/trainer/test_loss_contract.py compares
it with a hand-written reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig

from ratchet.trainer.errors import TrainingDiverged
from ratchet.trainer.learner import importance_sampling, process_group, sharding
from ratchet.trainer.learner.activations import ActivationMemory
from ratchet.trainer.learner.forward_pass import ForwardPass, Scored, attention_pairs_per_token
from ratchet.trainer.learner.learning_rate import LearningRateController, sample_stride
from ratchet.trainer.learner.lora_linear import use_fused_lora
from ratchet.trainer.learner.micro_batches import Micro, batched, collate, empty_micro_batch, split, token_weights
from ratchet.trainer.learner.trl_imports import GRPOConfig, GRPOTrainer
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import Objective


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


def loss_of(objective: Objective) -> tuple[str, str]:
    """Return TRL's names for an objective: its `loss_type` and its `importance_sampling_level`."""
    return "dapo" if objective.shape == "clip" else "cispo", "sequence" if objective.ratio == "sequence" else "token"


class _LocalAccelerator:
    """accelerate's Accelerator without collectives: those of TRL's metrics would hang over ragged micro-batches."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


class RecordedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer for our own loop: `prepare` the rows of each step, then call `optimizer_step`.

    With several processes, each calls the same methods with the same rows and computes its share. Rows may differ in
    length and in group size.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        tokenizer: Any,
        peft_config: LoraConfig | None,
        settings: LearnerSettings,
        rate_controller: LearningRateController,
    ) -> None:
        self._settings = settings
        self.rate_controller = rate_controller
        self._objective = settings.objective
        self._micro: Micro | None = None
        self._scored: Scored | None = None
        self.on_rows: Callable[[int], None] = lambda rows: None  # called after each micro-batch
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            peft_config=peft_config,
            # TRL requires a dataset and a reward function; neither is used.
            train_dataset=Dataset.from_dict({"prompt": ["-"] * args.generation_batch_size}),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
        self.beta = settings.beta  # not in TRL's arguments, with which it would copy an adapter that it did not attach
        for parameter in self.lora_parameters().values():  # TRL casts them to bf16 if the model is quantized
            if parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        base = self.model.get_base_model()
        use_fused_lora(self.model)
        memory = ActivationMemory(base, settings.gradient_checkpointing, offload=settings.activation_offload)
        self._pass = ForwardPass(base, memory)
        self._attention_pairs_per_token = attention_pairs_per_token(base) if settings.share_prefixes else None
        # Trainer.train(), which our loop never calls, would do the following.
        self.create_optimizer_and_scheduler(num_training_steps=1)
        # Without DDP, which fails on parameters without a gradient: trainer/learner/sharding.py adds gradients.
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        # The losses of the micro-batches already sum to the loss of the step.
        self.current_gradient_accumulation_steps = self.args.steps_per_generation = 1
        self.model.train()

    def apply_settings(self, settings: LearnerSettings) -> None:
        """Use other settings from now on; those that shape the model and its adapter must be unchanged."""
        self._settings = settings
        self._objective = settings.objective
        self.loss_type, self.importance_sampling_level = loss_of(settings.objective)
        self.epsilon_low, self.epsilon_high = settings.clip
        self.beta = settings.beta

    def _send_telemetry(self) -> None:
        """Send nothing: HF_HUB_DISABLE_TELEMETRY has no effect if huggingface_hub was imported before it was set."""

    def prepare(self, rows: Sequence[TokenRow], *, only_step: bool = False) -> list[Micro]:
        """Return this process's micro-batches of one optimizer step.

        They hold the logprobs of the current policy, which is the one at the start of the round. With `only_step` the
        step is the whole round, and the loss fills them in.
        """
        shares = split(
            rows,
            self._settings.token_budget,
            pairs_per_token=self._attention_pairs_per_token,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
        )
        device = self.accelerator.device
        micros = [self._collate(r) if r else empty_micro_batch(rows[0], self._pad_id, device) for r in shares]
        units = len(rows) if self._objective.mean != "tokens" else sum(row.tokens_trained for row in rows)
        tokens = sum(len(row.ids) for row in rows)
        for micro, packs in zip(micros, shares, strict=True):
            share = sum(len(row.ids) for pack in packs for row in pack) / tokens * self.accelerator.num_processes
            micro["router_share"] = torch.tensor(share, device=device)
            micro["num_items_in_batch"] = torch.tensor(float(units), device=device)
            self._set_token_weights(micro, torch.ones_like(micro["importance"]))  # rows are rejected later
            if self.beta:
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
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return step

    def backward(self, micros: Sequence[Micro]) -> StepMetrics:
        """Put the clipped gradient of the step's loss into the LoRA parameters.

        The mean divides by the number of rows or tokens that were not rejected. It is known after the last micro-batch,
        so the gradient is scaled then.
        """
        sums = torch.zeros(9, dtype=torch.float64)
        for place, micro in enumerate(micros):
            last = place == len(micros) - 1
            with sharding.gradient_sync(self.model, last=last):
                loss = self.compute_loss(self.model_wrapped, micro)  # ()
                loss.backward()
            sums += self._sums(micro, float(loss.detach()))
            self.on_rows(len(micro["prompt_ids"]))
        total = self.accelerator.reduce(sums.to(self.accelerator.device, torch.float32), "sum").tolist()
        loss_sum, units, signal, rejected, *means = total
        scale = float(micros[0]["num_items_in_batch"]) / max(units, 1.0)
        limit = self._settings.max_grad_norm or float("inf")
        grad_norm = sharding.clip_gradients(self.lora_parameters().values(), scale, limit)
        return StepMetrics(
            applied=units > 0 and (signal > 0 or bool(self.beta)),
            loss=loss_sum * scale / self.accelerator.num_processes,
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
        local = importance_sampling.mismatch(micros, self._settings.vllm_importance_sampling_clip_max)
        sums = torch.tensor([astuple(local)], device=self.accelerator.device)
        gathered = self.accelerator.gather(sums)  # (processes, 6)
        total, _, tokens, truncated, fresh_total, fresh_tokens = gathered.sum(0).tolist()
        return importance_sampling.Mismatch(
            total, float(gathered[:, 1].max()), round(tokens), round(truncated), fresh_total, round(fresh_tokens)
        )

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
            group["lr"] = group["initial_lr"] = rate
            group["weight_decay"] = self._settings.weight_decay
        self.lr_scheduler.base_lrs = [rate] * len(self.lr_scheduler.base_lrs)

    def compute_loss(self, model: Any, inputs: Micro, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss of one micro-batch, as its share of the step's loss; shape ()."""
        self._micro = inputs
        accelerator: Any = self.accelerator
        self.accelerator: Any = _LocalAccelerator(accelerator)
        try:
            loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
            if self._settings.entropy_coef:
                assert self._scored is not None
                bonus = (self._scored.entropy * inputs["tool_mask"]).sum() / inputs["num_items_in_batch"]  # ()
                loss = loss - self._settings.entropy_coef * bonus * self.accelerator.num_processes
        finally:
            self._micro = None
            self.accelerator = accelerator
        self._metrics["train"].clear()  # TRL's means are over weighted tokens; `_sums` computes ours
        return loss

    def score(self, rows: Sequence[TokenRow], *, adapter: bool = True) -> list[list[float]]:
        """Return the logprobs of all tokens of each row but the first, (T,) each; all of them must be trained.

        Each process scores its share. One without a share scores another one's: a sharded model needs all of them.
        """
        batches = batched(rows, self._settings.token_budget, self._attention_pairs_per_token)
        ranks, place = self.accelerator.num_processes, self.accelerator.process_index
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

    @property
    def _pad_id(self) -> int:
        pad_id: int | None = self._tokenizer.pad_token_id
        return 0 if pad_id is None else pad_id  # padding is masked out, so any id will do

    def _collate(self, packs: Sequence[Sequence[TokenRow]]) -> Micro:
        return collate(packs, self._pad_id, self.accelerator.device, padding_free=self._pass.padding_free)

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
        if self.beta:
            # In the training pass itself TRL has read the weights by now.
            micro["ref_per_token_logps"] = torch.where(kept, micro["ref_per_token_logps"], logprobs)  # (N, T)
        self._set_token_weights(micro, kept)

    def _set_token_weights(self, micro: Micro, kept: torch.Tensor) -> None:
        micro["tool_mask"], micro["units"] = token_weights(micro, self._objective, self._settings.dr_grpo_length, kept)
        micro["kept"] = kept

    def _keep_high_entropy(self, micros: Sequence[Micro], entropies: Sequence[torch.Tensor]) -> None:
        """Restrict the policy gradient to the tokens of highest entropy (Wang et al. 2025, "Beyond the 80/20 rule")."""
        share = self._settings.top_entropy_quantile
        if share == 1:
            return
        local = [e[m["trained"] & m["kept"]].float().cpu() for e, m in zip(entropies, micros, strict=True)]
        gathered = torch.cat(gather_object(local))  # of all processes
        if not gathered.numel():
            return
        threshold = float(gathered.kthvalue(max(1, round((1 - share) * gathered.numel()))).values)
        for micro, entropy in zip(micros, entropies, strict=True):
            micro["advantages"] = torch.where(entropy > threshold, micro["advantages"], 0.0)  # (N, T)

    def _sums(self, micro: Micro, loss: float) -> torch.Tensor:
        """Return loss, units, tokens with a signal, rejected rows; entropy, clipped, KL and number of the kept tokens;
        tokens forwarded.
        """
        assert self._scored is not None
        logprobs, entropy = self._scored.logprobs.detach(), self._scored.entropy.detach()  # (N, T) each
        on = micro["trained"] & micro["kept"]  # (N, T)
        kl = torch.zeros(())
        if self.beta:
            gap = (micro["ref_per_token_logps"] - logprobs)[on]  # (K,)
            kl = (gap.exp() - gap - 1).sum()
        counts = [
            micro["units"],
            (micro["advantages"][on] != 0).sum(),
            (micro["trained"].any(-1, keepdim=True) & ~micro["kept"]).sum(),
            entropy[on].sum(),
            self._clipped(micro, logprobs)[on].sum(),
            kl,
            on.sum(),
            micro["forwarded_ids"].numel(),
        ]
        return torch.tensor([loss, *map(float, counts)], dtype=torch.float64)

    def _clipped(self, micro: Micro, logprobs: torch.Tensor) -> torch.Tensor:
        """Return which tokens' ratios were clipped, (N, T)."""
        gap = (logprobs - micro["old_per_token_logps"]) * micro["trained"]  # (N, T)
        if self._objective.ratio == "sequence":
            gap = gap.sum(-1, keepdim=True) / micro["trained"].sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
        ratio, advantages = gap.exp(), micro["advantages"]
        low, high = self._settings.clip
        if self._objective.shape == "weight":
            return (ratio > high) & (advantages > 0)
        return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))

    @torch.no_grad()
    def _score(self, micro: Micro, *, adapter: bool = True) -> Scored:
        """Return logprobs and entropies (N, T) of the trained tokens, without a gradient."""
        with contextlib.nullcontext() if adapter else self.model.disable_adapter(), self.accelerator.autocast():
            scored = self._pass(self.model, micro)
        sharding.reshard(self.model)
        return scored

    def _get_per_token_logps_and_entropies(
        self, model: Any, *unused: Any, compute_aux_loss: bool = False, **unused_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Replace TRL's forward pass; TRL reads old logprobs, reference logprobs and advantages only after it."""
        assert self._micro is not None
        router = {"output_router_logits": True} if compute_aux_loss else {}
        with self.accelerator.autocast():
            self._scored = scored = self._pass(model, self._micro, **router)
        if "old_per_token_logps" not in self._micro:
            self._set_old_policy(self._micro, scored.logprobs.detach(), scored.entropy.detach())
        # TRL adds it once per micro-batch. Weighted by tokens, the sum is its mean over the step.
        balance = None if scored.aux_loss is None else scored.aux_loss * self._micro["router_share"]
        return scored.logprobs, scored.entropy, balance
