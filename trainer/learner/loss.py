"""The loss and the optimiser: TRL's GRPOTrainer, fed with recorded token rows instead of its own rollouts.

TRL supplies what changes often and is easy to get wrong (clipping, KL, fused LM head, mixed precision); the loop is
ours. What is left out of the textbook, and why:

- Rollouts and rewards: they happened in production. TRL's dataset, sampler and reward machinery stay idle.
- TRL's per-row and per-batch means: they are wrong over ragged micro-batches. Only its losses that sum over tokens and
  divide by a number are used; every other mean is that sum with weighted tokens (trainer/learner/micro_batches.py).
- TRL's importance sampling, which needs its own vLLM: every TRL loss is linear in a factor >= 0 of the advantage, so
  the weight (trainer/learning/importance_sampling.py) multiplies the advantages before TRL sees them.
- Clipping against the engine's logprobs: the ratio is to the policy at the round's start, recomputed here, and the
  engine's mismatch enters by that weight alone ("decoupled"); doing both would correct twice.
- A forward pass for that policy where a round is one step: its logprobs are then those of the training pass itself,
  and a row that is rejected for them has itself as its base model, so that its KL is 0.
- The KL penalty is the k3 estimator times the ratio (DeepSeek-V3.2, arXiv:2512.02556), and carries no importance
  weight.
- TRL's entropy bonus and entropy quantile: both are per micro-batch there, here over the step.
- Packing without padding: it wins only with FlashAttention. Rows that begin alike are packed, what they share once
  (trainer/learner/shared_prefixes.py).

TRL's GRPOTrainer changes several times a week: it is pinned exactly, and tests/trainer/test_loss_contract.py compares
it with a hand-written reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig

from ratchet.trainer.errors import TrainingDiverged
from ratchet.trainer.learner import importance_sampling, policy_shift
from ratchet.trainer.learner.forward_pass import ForwardPass, Scored, forward_cost_per_token
from ratchet.trainer.learner.learning_rate import LearningRateController, every
from ratchet.trainer.learner.micro_batches import Micro, batched, blank, collate, split, weigh
from ratchet.trainer.learner.trl_imports import GRPOConfig, GRPOTrainer
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import Objective


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimiser step did, over all processes; sums are over its trained tokens.

    `taken` is False where nothing was left to learn from: then the weights did not move.
    """

    taken: bool
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


class _Alone:
    """accelerate's Accelerator without what TRL's metrics gather: over ragged micro-batches that would hang."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


class RecordedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss is called by our own loop: `prepare` a round, then `optimiser_step` each of its parts.

    Under several processes each calls the same methods with the same rows, and computes its share of them. Rows may be
    ragged in length and in group size.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        tokenizer: Any,
        peft_config: LoraConfig,
        settings: LearnerSettings,
        steering: LearningRateController,
    ) -> None:
        self._settings = settings
        self.steering = steering
        self._objective = settings.objective
        self._micro: Micro | None = None
        self._seen: Scored | None = None
        self.on_rows: Callable[[int], None] = lambda rows: None  # told after each micro-batch
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            peft_config=peft_config,
            # TRL insists on a dataset and a reward; neither is ever read.
            train_dataset=Dataset.from_dict({"prompt": ["-"] * args.generation_batch_size}),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
        for parameter in self.lora_parameters().values():  # TRL makes those of a quantised model bf16
            parameter.data = parameter.data.float()
        base = self.model.get_base_model()
        self._pass = ForwardPass(base)
        self._worth = forward_cost_per_token(base) if settings.share_prefixes else None
        # Trainer.train() would do what follows; our loop never calls it.
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model_wrapped, self.optimizer, self.lr_scheduler = self._prepared()
        # The micro-batches' losses already sum to the step's loss.
        self.current_gradient_accumulation_steps = self.args.steps_per_generation = 1
        self.model.train()

    def adopt(self, settings: LearnerSettings) -> None:
        """Learn with other settings from now on; those that shape the model and its adapter are the same."""
        self._settings = settings
        self._objective = settings.objective
        self.loss_type, self.importance_sampling_level = loss_of(settings.objective)
        self.epsilon_low, self.epsilon_high = settings.clip
        self.beta = settings.beta
        self.steering.adopt(settings)

    def _prepared(self) -> tuple[Any, Any, Any]:
        """Model, optimiser and schedule, each in accelerate's wrapper."""
        self.create_optimizer_and_scheduler(num_training_steps=1)
        wrapped: tuple[Any, Any, Any] = self.accelerator.prepare(self.model, self.optimizer, self.lr_scheduler)
        return wrapped

    def _send_telemetry(self) -> None:
        """Report nothing home: HF_HUB_DISABLE_TELEMETRY comes too late when huggingface_hub was imported before."""

    def prepare(self, rows: Sequence[TokenRow], *, only_step: bool = False) -> list[Micro]:
        """This process's micro-batches of one optimiser step.

        They hold the policy's logprobs at this moment, the round's start, unless `only_step` says that the step is the
        round: then the loss itself fills them in.
        """
        own = split(
            rows,
            self._settings.token_budget,
            worth=self._worth,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
        )
        device = self.accelerator.device
        micros = [collate(r, self._pad_id, device) if r else blank(rows[0], self._pad_id, device) for r in own]
        units = len(rows) if self._objective.mean != "tokens" else sum(row.tokens_trained for row in rows)
        tokens = sum(len(row.ids) for row in rows)
        for micro, packs in zip(micros, own, strict=True):
            share = sum(len(row.ids) for pack in packs for row in pack) / tokens * self.accelerator.num_processes
            micro["router_share"] = torch.tensor(share, device=device)
            micro["num_items_in_batch"] = torch.tensor(float(units), device=device)
            self._weigh(micro, torch.ones_like(micro["importance"]))  # until it is known which rows are rejected
            if self.beta:
                micro["ref_per_token_logps"] = self.token_logprobs(micro, adapter=False)  # (N, T)
        if self._needs_old_logprobs(only_step):
            self._narrow(micros, [self._begin_with_own(micro) for micro in micros])
        return micros

    def optimiser_step(self, micros: Sequence[Micro]) -> StepMetrics:
        """One step down the summed loss of the micro-batches. Raises TrainingDiverged before a non-finite step."""
        numbers = self.backward(micros)
        if not numbers.taken:
            self.optimizer.zero_grad()
            return numbers
        if not torch.isfinite(torch.tensor(numbers.grad_norm)):
            self.optimizer.zero_grad()
            raise TrainingDiverged(
                f"the gradient's norm is {numbers.grad_norm}: the step was not taken; resume from the last checkpoint "
                "with a lower learning_rate, or look for rows with extreme logprobs"
            )
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return numbers

    def backward(self, micros: Sequence[Micro]) -> StepMetrics:
        """Leave the clipped gradient of the step's loss in the LoRA parameters.

        The mean divides by what was kept: that is known when all micro-batches have been seen, and the gradient is
        linear in it.
        """
        sums = torch.zeros(9, dtype=torch.float64)
        for place, micro in enumerate(micros):
            last = place == len(micros) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model_wrapped):
                loss = self.compute_loss(self.model_wrapped, micro)  # ()
                self.accelerator.backward(loss)
            sums += self._sums(micro, float(loss.detach()))
            self.on_rows(len(micro["prompt_ids"]))
        total = self.accelerator.reduce(sums.to(self.accelerator.device, torch.float32), "sum").tolist()
        loss_sum, units, signal, rejected, *own = total
        scale = float(micros[0]["num_items_in_batch"]) / max(units, 1.0)
        parameters = list(self.lora_parameters().values())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        limit = self._settings.max_grad_norm or float("inf")
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        return StepMetrics(
            taken=units > 0 and (signal > 0 or bool(self.beta)),
            loss=loss_sum * scale / self.accelerator.num_processes,
            grad_norm=grad_norm,
            entropy_sum=own[0],
            clipped_sum=own[1],
            kl_sum=own[2],
            tokens=round(own[3]),
            rows_rejected=round(rejected),
            tokens_forwarded=round(own[4]),
        )

    def mismatch(self, micros: Sequence[Micro]) -> importance_sampling.Mismatch:
        """How far the engine's logprobs lie from this policy's, over the micro-batches of all processes."""
        own = importance_sampling.mismatch(micros, self._settings.vllm_importance_sampling_clip_max)
        numbers = torch.tensor([[own.total, own.largest, own.tokens, own.truncated]], device=self.accelerator.device)
        every = self.accelerator.gather(numbers)  # (processes, 4)
        total, _, tokens, truncated = every.sum(0).tolist()
        return importance_sampling.Mismatch(total, float(every[:, 1].max()), round(tokens), round(truncated))

    def watched(self, rows: Sequence[TokenRow]) -> list[Micro]:
        """This process's share of some of the rows, with the policy's logprobs at this moment."""
        some = rows[:: every(sum(row.tokens_trained for row in rows))]
        micros = self.prepare(some, only_step=True)
        for micro in micros:
            micro["old_per_token_logps"] = self.token_logprobs(micro)
            micro["kept"] = micro["trained"].any(-1, keepdim=True)
        return micros

    def moved(self, micros: Sequence[Micro]) -> policy_shift.Moved:
        """How far the policy is from the one that these micro-batches of all processes hold logprobs of."""
        own = sum((policy_shift.sums(micro, self.token_logprobs(micro)) for micro in micros), torch.zeros(()))
        numbers = own.to(self.accelerator.device, torch.float32)[None]
        return policy_shift.mean(self.accelerator.gather(numbers).double().sum(0))  # of (processes, 5)

    def set_learning_rate(self, rate: float) -> None:
        """Step by this rate from now on, whatever the optimiser was made or loaded with."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate
        schedule = self.lr_scheduler.scheduler  # accelerate's wrapper around torch's
        schedule.base_lrs = [rate] * len(schedule.base_lrs)

    def compute_loss(self, model: Any, inputs: Micro, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss of one micro-batch, as its share of the step's loss; shape ()."""
        self._micro = inputs
        together: Any = self.accelerator
        self.accelerator: Any = _Alone(together)
        try:
            loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
            if self._settings.entropy_coef:
                assert self._seen is not None
                bonus = (self._seen.entropy * inputs["tool_mask"]).sum() / inputs["num_items_in_batch"]  # ()
                loss = loss - self._settings.entropy_coef * bonus * self.accelerator.num_processes
        finally:
            self._micro = None
            self.accelerator = together
        self._metrics["train"].clear()  # TRL's means are over weighted tokens: ours are counted apart
        return loss

    def score(self, rows: Sequence[TokenRow], *, adapter: bool = True) -> list[list[float]]:
        """Logprobs of every token but the first of each row, (T,) each; rows of which all of these are trained."""
        scored: list[list[float]] = [[]] * len(rows)
        for packs in batched(rows, self._settings.token_budget, self._worth):
            micro = collate([[rows[index] for index in pack] for pack in packs], self._pad_id, self.accelerator.device)
            logprobs = self.token_logprobs(micro, adapter=adapter).tolist()  # (N, T)
            for index, found in zip((index for pack in packs for index in pack), logprobs, strict=True):
                scored[index] = found[: len(rows[index].ids) - 1]
        return scored

    def token_logprobs(self, micro: Micro, *, adapter: bool = True) -> torch.Tensor:
        """Logprobs (N, T) of the trained tokens at the rows' temperatures, 0 elsewhere; of the base without adapter."""
        return self._score(micro, adapter=adapter).logprobs

    def lora_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, fp32."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def _pad_id(self) -> int:
        pad_id: int | None = self._tokenizer.pad_token_id
        return 0 if pad_id is None else pad_id  # padding is masked out: any id will do

    def _needs_old_logprobs(self, only_step: bool) -> bool:
        """Whether the policy at the round's start must be computed before the loss is."""
        if self._objective.ratio == "none":
            return False
        return not only_step or self._settings.top_entropy_quantile < 1

    def _begin_with_own(self, micro: Micro) -> torch.Tensor:
        """Take the policy at this moment as the one at the round's start; returns its entropies, (N, T)."""
        scored = self._score(micro)
        self._begin(micro, scored.logprobs)
        return scored.entropy

    def _begin(self, micro: Micro, logprobs: torch.Tensor) -> None:
        """Fix what follows from the policy at the round's start: weights, rejections, and what a token weighs."""
        micro["old_per_token_logps"] = logprobs  # (N, T)
        corrected = self._objective.ratio != "none"
        kept = importance_sampling.kept(micro, self._settings.sequence_mask_threshold if corrected else None)  # (N, 1)
        weight = importance_sampling.importance_weight(
            micro, self._settings.vllm_importance_sampling_clip_max if corrected else None
        )
        micro["advantages"] = torch.where(kept, micro["advantages"] * weight, 0.0)  # (N, T)
        if self.beta:
            # TRL has read the weights by now where this is the training pass itself.
            micro["ref_per_token_logps"] = torch.where(kept, micro["ref_per_token_logps"], logprobs)  # (N, T)
        self._weigh(micro, kept)

    def _weigh(self, micro: Micro, kept: torch.Tensor) -> None:
        micro["tool_mask"], micro["units"] = weigh(micro, self._objective, self._settings.dr_grpo_length, kept)
        micro["kept"] = kept

    def _narrow(self, micros: Sequence[Micro], entropies: Sequence[torch.Tensor]) -> None:
        """Leave the policy gradient to the tokens of highest entropy (Wang et al. 2025, "Beyond the 80/20 rule")."""
        share = self._settings.top_entropy_quantile
        if share == 1:
            return
        own = [e[m["trained"] & m["kept"]].float().cpu() for e, m in zip(entropies, micros, strict=True)]
        found = torch.cat(gather_object(own))  # of all processes
        if not found.numel():
            return
        threshold = float(found.kthvalue(max(1, round((1 - share) * found.numel()))).values)
        for micro, entropy in zip(micros, entropies, strict=True):
            micro["advantages"] = torch.where(entropy > threshold, micro["advantages"], 0.0)  # (N, T)

    def _sums(self, micro: Micro, loss: float) -> torch.Tensor:
        """Loss, units, tokens with a signal, rejected rows; of kept tokens entropy, clipped, KL, number; forwarded."""
        assert self._seen is not None
        logprobs, entropy = self._seen.logprobs.detach(), self._seen.entropy.detach()  # (N, T) each
        on = micro["trained"] & micro["kept"]  # (N, T)
        kl = torch.zeros(())
        if self.beta:
            gap = (micro["ref_per_token_logps"] - logprobs)[on]  # (K,)
            kl = (gap.exp() - gap - 1).sum()
        numbers = [
            micro["units"],
            (micro["advantages"][on] != 0).sum(),
            (micro["trained"].any(-1, keepdim=True) & ~micro["kept"]).sum(),
            entropy[on].sum(),
            self._clipped(micro, logprobs)[on].sum(),
            kl,
            on.sum(),
            micro["forwarded_ids"].numel(),
        ]
        return torch.tensor([loss, *map(float, numbers)], dtype=torch.float64)

    def _clipped(self, micro: Micro, logprobs: torch.Tensor) -> torch.Tensor:
        """Which tokens' ratios met the clip, (N, T)."""
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
        """Logprobs and entropies (N, T) of the trained tokens, without a gradient."""
        with contextlib.nullcontext() if adapter else self.model.disable_adapter(), self.accelerator.autocast():
            return self._pass(self.model, micro)

    def _get_per_token_logps_and_entropies(
        self, model: Any, *unused: Any, compute_aux_loss: bool = False, **unused_too: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """TRL's forward pass; TRL reads the round's first policy, the base's and the advantages only after it."""
        assert self._micro is not None
        router = {"output_router_logits": True} if compute_aux_loss else {}
        with self.accelerator.autocast():
            self._seen = seen = self._pass(model, self._micro, **router)
        if "old_per_token_logps" not in self._micro:
            self._begin(self._micro, seen.logprobs.detach())
        # TRL adds it once a micro-batch: weighted by tokens these add up to its mean over the step.
        balance = None if seen.aux_loss is None else seen.aux_loss * self._micro["router_share"]
        return seen.logprobs, seen.entropy, balance
