"""The loss and the optimiser: TRL's GRPOTrainer, fed with recorded token rows instead of its own rollouts.

TRL supplies what changes often and is easy to get wrong (clipping, KL, fused LM head, mixed precision); the loop is
ours. What is left out of the textbook, and why:

- Rollouts and rewards: they happened in production. TRL's dataset, sampler and reward machinery stay idle.
- TRL's per-row and per-batch means: they are wrong over ragged micro-batches. Only losses that sum over tokens and
  divide by the step's token count are used; a mean over rows is that loss with each row's advantages weighted.
- TRL's importance sampling, which needs its own vLLM: every TRL loss is linear in a factor >= 0 of the advantage, so
  the truncated weight (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training")
  multiplies the advantages before TRL sees them.
- Clipping against the engine's logprobs: the ratio is to the policy at the round's start, recomputed here, and the
  engine's mismatch enters by that weight alone ("decoupled"); doing both would correct twice.
- The KL penalty is the k3 estimator times the ratio (DeepSeek-V3.2, arXiv:2512.02556), and carries no importance
  weight.
- Packing without padding: it wins only with FlashAttention.

TRL's GRPOTrainer changes several times a week: it is pinned exactly, and tests/trainer/test_loss_contract.py compares
it with a hand-written reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

from trainer import policy_model
from trainer.errors import SettingError, TrainingDiverged
from trainer.learner_settings import LearnerSettings
from trainer.tokens import TokenRow, split_by_budget
from trainer.trl_without_vllm import GRPOConfig, GRPOTrainer

# One micro-batch as TRL names its parts. N rows; T = tokens of the longest row less one, because TRL's "completion"
# is here the whole row after its first token, and TRL's "tool mask" is the row's mask.
Micro = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What one optimiser step did; sums are over its trained tokens."""

    loss: float
    grad_norm: float
    entropy_sum: float
    clipped_sum: float
    tokens: int


class RecordedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss is called by our own loop: `prepare` a round, then `optimiser_step` each of its parts.

    One process. Rows may be ragged in length and in group size.
    """

    def __init__(
        self, model: Any, args: GRPOConfig, tokenizer: Any, peft_config: LoraConfig, settings: LearnerSettings
    ) -> None:
        self._settings = settings
        self._micro: Micro | None = None
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
        self.model.get_base_model().base_model.register_forward_hook(self._divide_by_temperature)
        # Trainer.train() would do what follows; our loop never calls it.
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model_wrapped, self.optimizer, self.lr_scheduler = self._prepared()
        # The micro-batches' losses already sum to the step's loss.
        self.current_gradient_accumulation_steps = self.args.steps_per_generation = 1
        self.model.train()

    def _prepared(self) -> tuple[Any, Any, Any]:
        """Model, optimiser and schedule, each in accelerate's wrapper."""
        self.create_optimizer_and_scheduler(num_training_steps=1)
        wrapped: tuple[Any, Any, Any] = self.accelerator.prepare(self.model, self.optimizer, self.lr_scheduler)
        return wrapped

    def _send_telemetry(self) -> None:
        """Report nothing home: HF_HUB_DISABLE_TELEMETRY comes too late when huggingface_hub was imported before."""

    def prepare(self, rows: Sequence[TokenRow]) -> list[Micro]:
        """The micro-batches of one optimiser step, with the policy's logprobs at this moment (the round's start)."""
        micros = []
        n_trained = sum(row.tokens_trained for row in rows)
        for batch in split_by_budget([len(row.ids) for row in rows], self._settings.token_budget):
            micro = collate([rows[index] for index in batch], self._pad_id, self.accelerator.device)
            micro["num_items_in_batch"] = torch.tensor(float(n_trained), device=self.accelerator.device)
            micro["old_per_token_logps"] = self.token_logprobs(micro)  # (N, T)
            micro["advantages"] = micro["advantages"] * self._importance_weight(micro)  # (N, T)
            if self._settings.loss == "grpo":
                n_row = micro["tool_mask"].sum(-1, keepdim=True)  # (N, 1)
                micro["advantages"] = micro["advantages"] * n_trained / (len(rows) * n_row)  # (N, T)
            if self.beta:
                micro["ref_per_token_logps"] = self.token_logprobs(micro, adapter=False)  # (N, T)
            micros.append(micro)
        return micros

    def optimiser_step(self, micros: Sequence[Micro]) -> StepNumbers:
        """One step down the summed loss of the micro-batches. Raises TrainingDiverged before a non-finite step."""
        losses, entropy_sum, clipped_sum, tokens = [], 0.0, 0.0, 0
        for micro in micros:
            loss = self.compute_loss(self.model_wrapped, micro)  # ()
            self.accelerator.backward(loss)
            self.on_rows(len(micro["temperature"]))
            losses.append(float(loss.detach()))
            n_trained, means = int(micro["tool_mask"].sum()), self._take_metrics()
            entropy_sum += means["entropy"] * n_trained
            clipped_sum += means.get("clip_ratio/region_mean", means.get("cispo_clip_ratio", 0.0)) * n_trained
            tokens += n_trained
        limit = self._settings.max_grad_norm or float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(list(self.lora_parameters().values()), limit)  # ()
        if not torch.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise TrainingDiverged(
                f"the gradient's norm is {float(grad_norm)}: the step was not taken; resume from the last checkpoint "
                "with a lower learning_rate, or look for rows with extreme logprobs"
            )
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return StepNumbers(sum(losses), float(grad_norm), entropy_sum, clipped_sum, tokens)

    def compute_loss(self, model: Any, inputs: Micro, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss of one micro-batch, as its share of the step's loss; shape ()."""
        self._micro = inputs
        try:
            loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._micro = None
        return loss

    @torch.no_grad()
    def token_logprobs(self, micro: Micro, *, adapter: bool = True) -> torch.Tensor:
        """Logprobs (N, T) of the trained tokens at the rows' temperatures, 0 elsewhere; of the base without adapter."""
        ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)  # (N, 1 + T)
        attention = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)  # (N, 1 + T)
        self._micro = micro
        try:
            with contextlib.nullcontext() if adapter else self.model.disable_adapter():
                logprobs: torch.Tensor
                logprobs, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, attention, ids.size(1) - 1)
        finally:
            self._micro = None
        return logprobs

    def lora_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, fp32."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def _pad_id(self) -> int:
        pad_id: int | None = self._tokenizer.pad_token_id
        return 0 if pad_id is None else pad_id  # padding is masked out: any id will do

    def _take_metrics(self) -> dict[str, float]:
        """TRL's means over the trained tokens of the micro-batch just computed."""
        metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        return metrics

    def _importance_weight(self, micro: Micro) -> torch.Tensor:
        """min(pi_trainer / pi_engine, cap) of every token, (N, T); 1 where no correction is possible or wanted."""
        cap = self._settings.truncate_importance_at
        if cap is None:
            return torch.ones_like(micro["advantages"])
        return torch.where(micro["importance"], importance_ratio(micro).clamp(max=cap), 1.0)

    def _divide_by_temperature(self, module: Any, inputs: Any, output: Any) -> Any:
        """Scale hidden states (N, 1 + T, H) by each row's temperature: W (h / t) = logits / t."""
        if self._micro is None:
            return output
        temperature = self._micro["temperature"][:, None, None]  # (N, 1, 1) fp32: bf16 would bias 0.7 by 0.04%
        hidden = output.last_hidden_state
        output.last_hidden_state = (hidden.float() / temperature).to(hidden.dtype)
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's forward pass, but the LM head scores trained tokens only: tool results cost no logits."""
        assert self._micro is not None
        trained = torch.nn.functional.pad(self._micro["tool_mask"], (1, 0))  # (N, 1 + T)
        labels = input_ids.masked_fill(trained == 0, -100)  # (N, 1 + T)
        router = {"output_router_logits": True} if compute_aux_loss else {}
        with self.accelerator.autocast():
            output = model(
                input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **router
            )
        entropy = output.entropy if compute_entropy else None  # (N, T)
        return output.log_probs, entropy, output.aux_loss if compute_aux_loss else None


def collate(rows: Sequence[TokenRow], pad_id: int, device: torch.device) -> Micro:
    """One right-padded micro-batch of N rows, under TRL's names (see Micro)."""
    n_rows, width = len(rows), max(len(row.ids) for row in rows) - 1
    ids = torch.full((n_rows, width), pad_id, dtype=torch.long)  # (N, T)
    attended = torch.zeros(n_rows, width, dtype=torch.long)  # (N, T)
    trained = torch.zeros(n_rows, width, dtype=torch.long)  # (N, T)
    sampled = torch.zeros(n_rows, width)  # (N, T)
    advantages = torch.zeros(n_rows, width)  # (N, T)
    for place, row in enumerate(rows):
        length = len(row.ids) - 1
        ids[place, :length] = torch.tensor(row.ids[1:])
        attended[place, :length] = 1
        trained[place, :length] = torch.tensor(row.mask[1:])
        sampled[place, :length] = torch.tensor(row.logprobs[1:])
        advantages[place, :length] = torch.tensor(row.advantages[1:]) if row.advantages else row.advantage
    micro = {
        "prompt_ids": torch.tensor([row.ids[:1] for row in rows]),  # (N, 1)
        "prompt_mask": torch.ones(n_rows, 1, dtype=torch.long),  # (N, 1)
        "completion_ids": ids,
        "completion_mask": attended,
        "tool_mask": trained,
        "sampling_per_token_logps": sampled * trained,
        "advantages": advantages,
        "temperature": torch.tensor([row.temperature for row in rows]),  # (N,)
        "importance": torch.tensor([[row.importance] for row in rows]),  # (N, 1)
    }
    return {name: tensor.to(device) for name, tensor in micro.items()}


def importance_ratio(micro: Micro) -> torch.Tensor:
    """pi_trainer / pi_engine of every trained token, (N, T); 1 at all others."""
    log_ratio = micro["old_per_token_logps"] - micro["sampling_per_token_logps"]  # (N, T)
    return log_ratio.masked_fill(micro["tool_mask"] == 0, 0.0).exp()


def build(base_model: str, settings: LearnerSettings, output_dir: Path) -> RecordedGRPOTrainer:
    """The trainer over a fresh LoRA adapter, on the GPU in bf16 if there is one, else on the CPU in fp32.

    LoRA parameters are fp32 on both: under AdamW at 1e-5 most updates are below bf16's resolution and would be lost.
    Raises ModelNotFound, NotAModel, or SettingError for target_modules that the model does not have.
    """
    on_cpu = not torch.cuda.is_available()
    model, tokenizer = policy_model.load(base_model, dtype=torch.float32 if on_cpu else torch.bfloat16)
    targets = settings.target_modules
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    args = GRPOConfig(
        str(output_dir),
        loss_type="dapo" if settings.loss == "grpo" else settings.loss,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        epsilon=settings.epsilon_low,
        epsilon_high=settings.epsilon_high,
        beta=settings.kl,
        use_bias_correction_kl=True,  # times the ratio: else its gradient is not that of the reverse KL
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=settings.seed,
        per_device_train_batch_size=2,
        num_generations=2,
        disable_dropout=True,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        report_to="none",
        save_strategy="no",
    )
    try:
        return RecordedGRPOTrainer(model, args, tokenizer, lora, settings)
    except ValueError as error:  # peft knows no such layer, or TRL cannot train it
        raise SettingError(
            f"learner setting target_modules is {targets!r}, which does not fit {base_model}: {error}; "
            'use "all-linear" or names of its linear layers, such as q_proj'
        ) from error
