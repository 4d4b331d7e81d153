"""The learner trains a LoRA adapter on token rows.

Promises: only tokens that vLLM sampled carry loss; a round changes the weights or raises with the reason; a learner
resumed from a checkpoint is bitwise the one that never stopped (same machine, same settings); a checkpoint is complete
or absent. The learner sees ids, masks, logprobs, advantages and temperatures; it does not group, judge, select rows or
serve. It is not thread-safe. Under `accelerate launch` every process calls the same methods with the same rows,
computes its share and ends with the same weights. Torch is imported when a Learner is created.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import NoLearningSignal, OutOfMemory, RowError, SettingError
from ratchet.trainer.learner import preference_weights
from ratchet.trainer.learner.learning_rate import RoundShift, sample_stride
from ratchet.trainer.learner.whitening import whiten
from ratchet.trainer.learner_protocol import RoundReport
from ratchet.trainer.observability.progress import TRAINING, Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

if TYPE_CHECKING:
    import torch

    from ratchet.trainer.learner.loss import StepMetrics
    from ratchet.trainer.learner.micro_batches import Micro
    from ratchet.trainer.learner.policy_shift import PolicyShift

    Steps = tuple[list[list[Micro]], list[StepMetrics], list[float]]  # micro-batches, steps, losses of taken steps
__all__ = ["Learner", "LearnerSettings", "RoundReport"]

# Settings that shape the model and its adapter at creation.
_FIXED = (
    "lora_r", "lora_alpha", "target_modules", "quantization", "gradient_checkpointing", "share_prefixes", "seed",
    "threads"
)  # fmt: skip
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # in torch's messages on a GPU and on a CPU


class Learner:
    """A base model with a LoRA adapter and its optimizer.

    `base_model` is a folder or a hub name; libraries write their files to `workdir`; `resume_from` is a checkpoint
    folder written by `save`. Raises ModelNotFound, NotAModel, CheckpointDamaged or CheckpointMismatch.
    """

    def __init__(
        self,
        base_model: str,
        settings: LearnerSettings,
        *,
        workdir: Path,
        resume_from: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # huggingface_hub reads the variable at its first import.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        # The learner often shares its cores with vLLM: waiting OpenMP threads must not spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

        import torch

        from ratchet.trainer.learner import checkpoint_state, lora

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._progress = Progress()
        self._settings = settings
        self._clock = clock
        self._trainer = lora.build(base_model, settings, workdir / "trl")
        self._initial_state = checkpoint_state.snapshot(self._trainer)  # the adapter before any round
        self._step = checkpoint_state.read(self._trainer, settings, resume_from) if resume_from else 0

    @property
    def step(self) -> int:
        """Optimizer steps since the first round, over all restarts."""
        return self._step

    def report_progress_to(self, progress: Progress) -> None:
        """Report the progress of rounds here from now on."""
        self._progress = progress

    def unfit(self, row: TokenRow) -> str | None:
        """Return why the base model cannot be trained on a row; None if it can."""
        try:
            self._check_fits(row.ids, f"row of trajectory {row.trajectory_id}", row.temperature)
        except RowError as error:
            return str(error)
        return None

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train on the rows once, with `rate_scale` times the learning rate.

        Raises NoLearningSignal if no row could change a weight and RowError if a row does not fit the model, both
        before any change; TrainingDiverged if a gradient is not finite; OutOfMemory.
        """
        work = self._progress.begin(TRAINING, len(rows))
        self._trainer.on_rows = work.add
        try:
            return self._train(rows, rate_scale)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _OUT_OF_MEMORY):
                raise
            raise OutOfMemory(
                f"out of memory in a round of {len(rows)} rows of up to {max(len(row.ids) for row in rows)} tokens: "
                f"lower learner.token_budget (now {self._settings.token_budget}), "
                "set learner.gradient_checkpointing, or give the trainer more memory"
            ) from error
        finally:
            work.end()

    def _train(self, rows: Sequence[TokenRow], rate_scale: float) -> RoundReport:
        began = self._clock()
        received, rows = rows, whiten(rows) if self._settings.objective.whitened else rows
        self._check_signal(rows)
        for row in rows:
            self._check_fits(row.ids, f"row of trajectory {row.trajectory_id}", row.temperature)
        self._trainer.optimizer.zero_grad()  # a round without memory may have left gradients
        before = {name: p.detach().clone() for name, p in self._trainer.lora_parameters().items()}
        # The policy shift is measured from the start of the round; without a ratio no step computes those logprobs.
        shift_micros = self._trainer.shift_sample(rows) if self._settings.objective.ratio == "none" else None
        self._trainer.set_learning_rate(self._trainer.rate_controller.rate * rate_scale)
        prepared, steps, losses = (
            self._preference_steps(rows) if self._settings.objective.preference else self._policy_steps(rows)
        )
        applied = [step for step in steps if step.applied]
        if not applied:
            raise NoLearningSignal(self._reason_for_no_signal(len(rows), sum(step.rows_rejected for step in steps)))
        micros = [micro for part in prepared for micro in part]
        gap = self._trainer.mismatch(micros)
        tokens = sum(step.tokens for step in applied)
        entropy = sum(step.entropy_sum for step in applied) / tokens
        shift = self._trainer.shift(micros[:: sample_stride(tokens)] if shift_micros is None else shift_micros)
        return RoundReport(
            loss=fmean(losses),
            grad_norm=sum(step.grad_norm for step in applied) / len(applied),
            entropy=entropy,
            clip_ratio=sum(step.clipped_sum for step in applied) / tokens,
            tokens_trained=tokens,
            rows=len(received),
            optimizer_steps=len(applied),
            step=self._step,
            logprob_abs_diff_mean=gap.total / max(gap.tokens, 1),
            logprob_abs_diff_max=gap.largest,
            tokens_compared=gap.tokens,
            importance_clipped_ratio=gap.truncated / max(gap.tokens, 1),
            seconds=self._clock() - began,
            weight_change=self._weight_change_since(before),
            kl=sum(step.kl_sum for step in applied) / tokens,
            rows_rejected=sum(step.rows_rejected for step in steps),
            tokens_forwarded=sum(step.tokens_forwarded for step in steps),
            **self._adapt_rate(shift, entropy, rows, rate_scale),
        )

    def _adapt_rate(self, shift: PolicyShift, entropy: float, rows: Sequence[TokenRow], scale: float) -> dict[str, Any]:
        """Adapt the learning rate to the policy shift of a round; return the report's fields on both."""
        rate_controller = self._trainer.rate_controller
        used = rate_controller.rate * scale
        target = rate_controller.target(
            sum(row.tokens_trained for row in rows), len({row.trajectory_id for row in rows})
        )
        round_shift = RoundShift(shift.k3, entropy, target, scale)
        target_kl = rate_controller.target_shift(round_shift) * scale**2
        rate_controller.update(round_shift)
        return {
            "learning_rate": used,
            "approx_kl": shift.k3,
            "approx_kl_target": target_kl,
            "approx_kl_tokens": shift.tokens,
            "logprob_change_abs_mean": shift.absolute,
            "logprob_change_positive_mean": shift.positive,
            "dtype": rate_controller.dtype,
        }

    def _policy_steps(self, rows: Sequence[TokenRow]) -> Steps:
        parts = self._parts([[row] for row in rows])
        # All old logprobs are computed before the first step.
        prepared = [self._trainer.prepare(part, only_step=len(parts) == 1) for part in parts]
        steps = [self._take_step(micros) for micros in prepared]
        return prepared, steps, [step.loss for step in steps if step.applied]

    def _preference_steps(self, rows: Sequence[TokenRow]) -> Steps:
        """Take the steps of a preference loss: each computes its weights with the policy that it starts from."""
        loss, beta = self._settings.loss_type, self._settings.preference_beta
        prepared, steps, losses = [], [], []
        for part in self._parts(preference_weights.units(rows, loss)):
            weighted = preference_weights.weighted_rows(part, self._gaps(part), loss, beta)
            prepared.append(self._trainer.prepare(weighted.rows, only_step=True))
            steps.append(self._take_step(prepared[-1]))
            losses.append(weighted.loss)
        return prepared, steps, losses

    def _take_step(self, micros: Sequence[Micro]) -> StepMetrics:
        step = self._trainer.optimizer_step(micros)
        self._step += step.applied
        return step

    def _gaps(self, rows: Sequence[TokenRow]) -> list[float]:
        """Return the sum of log p minus the base model's log p over the answers of each row."""
        both = zip(rows, self.score(rows), self.score(rows, adapter=False), strict=True)
        return [
            sum(
                policy - reference
                for policy, reference, trained in zip(policy_logprobs, reference_logprobs, row.mask, strict=True)
                if trained
            )
            for row, policy_logprobs, reference_logprobs in both
        ]

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs at temperature 1 of all tokens of each sequence, (T,) each; the first token's is 0.0.

        `adapter`: True for the current adapter, False for the base model, or a folder written by `save`. Raises
        RowError if a sequence does not fit the model, CheckpointDamaged, CheckpointMismatch.
        """
        if isinstance(adapter, Path):
            from ratchet.trainer.learner import checkpoint_state

            with checkpoint_state.temporary_adapter(self._trainer, adapter):
                return self.score(rows)
        sequences = [tuple(row.ids if isinstance(row, TokenRow) else row) for row in rows]
        for index, ids in enumerate(sequences):
            self._check_fits(ids, f"sequence {index}")
        # A sequence of fewer than two tokens has nothing to score.
        scored: list[tuple[float, ...]] = [(0.0,) * len(ids) for ids in sequences]
        longer = [index for index, ids in enumerate(sequences) if len(ids) > 1]
        # Scoring reads neither the recorded logprobs nor the advantage.
        plain = [
            TokenRow("", ids, (0, *(1,) * (len(ids) - 1)), (0.0,) * len(ids), advantage=0.0)
            for ids in (sequences[index] for index in longer)
        ]
        for index, logprobs in zip(longer, self._trainer.score(plain, adapter=adapter), strict=True):
            scored[index] = (0.0, *logprobs)
        return scored

    def save(self, folder: Path) -> None:
        """Write a checkpoint to the new `folder`, for vLLM and for `resume_from`.

        Only the first of several processes writes. Raises CheckpointExists or CheckpointUnwritable; no partial
        checkpoint remains.
        """
        from ratchet.trainer.learner import checkpoint_state

        try:
            if self._trainer.accelerator.is_main_process:
                checkpoint.write_atomically(
                    folder, lambda target: checkpoint_state.write(self._trainer, self._settings, self._step, target)
                )
        finally:
            self._trainer.accelerator.wait_for_everyone()

    def load(self, folder: Path | None, settings: LearnerSettings) -> None:
        """Take the state of a learner created with `settings` and resumed from `folder`; None: of a new learner.

        Replaces adapter and optimizer in place; the base model stays loaded. Raises SettingError if a setting shapes
        the model or adapter and differs, CheckpointDamaged or CheckpointMismatch.
        """
        from ratchet.trainer.learner import checkpoint_state

        for field in _FIXED:
            if getattr(settings, field) != getattr(self._settings, field):
                raise SettingError(f"learner setting {field} cannot change while the trainer runs: restart it")
        self._settings = settings
        self._trainer.apply_settings(settings)
        checkpoint_state.restore(self._trainer, settings, self._initial_state)
        self._step = 0
        if folder is not None:
            self._step = checkpoint_state.read(self._trainer, settings, folder)

    def _check_signal(self, rows: Sequence[TokenRow]) -> None:
        if not rows:
            raise NoLearningSignal("the round has no rows")
        if self._settings.objective.preference and not preference_weights.units(rows, self._settings.loss_type):
            raise NoLearningSignal(f"no trajectory among the {len(rows)} rows of the round is preferred to another")
        # Without a gradient AdamW would still move the weights, by the momentum of earlier rounds.
        if not self._settings.beta and not any(row.has_signal for row in rows):
            raise NoLearningSignal(
                f"all advantages of the {len(rows)} rows of the round are 0: no score differs within its group"
            )

    def _reason_for_no_signal(self, rows: int, rejected: int) -> str:
        if not rejected:
            return f"no step of the {rows} rows of the round had an advantage other than 0"
        return (
            f"{rejected} of the {rows} rows of the round were rejected, and the others have advantage 0: over whole "
            f"rows vLLM's probabilities differ from the trainer's by more than a factor of "
            f"{self._settings.sequence_mask_threshold}; check that vLLM serves base_model with --logprobs-mode "
            "processed_logprobs, or lower max_staleness"
        )

    def _check_fits(self, ids: Sequence[int], what: str, temperature: float = 1.0) -> None:
        config = self._trainer.model.config.get_text_config()
        vocabulary = self._trainer.model.get_input_embeddings().weight.shape[0]
        max_length = getattr(config, "max_position_embeddings", None)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise RowError(f"{what}: a token id is outside the base model's {vocabulary} ids")
        if max_length is not None and len(ids) > max_length:
            raise RowError(f"{what}: {len(ids)} tokens exceed the base model's {max_length} positions")
        if temperature != 1.0 and getattr(config, "final_logit_softcapping", None):
            raise RowError(
                f"{what}: temperature {temperature} cannot be applied to a base model that caps its "
                "logits; sample at temperature 1"
            )

    def _parts(self, units: Sequence[Sequence[TokenRow]]) -> list[list[TokenRow]]:
        """Return the rows of each optimizer step: whole units, shuffled by seed and step, of nearly equal counts."""
        count = min(self._settings.steps_per_round, len(units))
        if count == 1:
            return [[row for unit in units for row in unit]]
        shuffled = list(units)
        random.Random(f"{self._settings.seed}/{self._step}").shuffle(shuffled)
        return [[row for unit in shuffled[part::count] for row in unit] for part in range(count)]

    def _weight_change_since(self, before: dict[str, torch.Tensor]) -> float:
        after = self._trainer.lora_parameters()
        return math.sqrt(sum(float((after[name].detach() - tensor).pow(2).sum()) for name, tensor in before.items()))
