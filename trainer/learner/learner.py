"""The learner: token rows in, a better LoRA adapter out.

Promises: only tokens that the engine sampled carry loss; a round either moves the weights or says why it cannot; a
learner resumed from a checkpoint is bitwise the one that never stopped (same machine, same settings); a checkpoint is
whole or absent. Blind to algorithms: it sees ids, masks, logprobs, advantages and temperatures. Does not group, judge,
choose rows, or serve. One thread at a time. Under `accelerate launch` every process calls the same methods with the
same rows, each computes its share, and all end with the same weights. Torch is imported when a Learner is made, not
before.
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
from ratchet.trainer.learner.learning_rate import RoundShift, every
from ratchet.trainer.learner.whitening import whiten
from ratchet.trainer.learner_protocol import RoundReport
from ratchet.trainer.observability.progress import TRAINING, Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

if TYPE_CHECKING:
    import torch

    from ratchet.trainer.learner.loss import StepMetrics
    from ratchet.trainer.learner.micro_batches import Micro
    from ratchet.trainer.learner.policy_shift import Moved

    Steps = tuple[list[list[Micro]], list[StepMetrics], list[float]]  # micro-batches, steps, losses of taken steps
__all__ = ["Learner", "LearnerSettings", "RoundReport"]

# Settings that shape the model and its adapter when they are made.
_BUILT_IN = (
    "lora_r", "lora_alpha", "target_modules", "quantization", "gradient_checkpointing", "share_prefixes", "seed",
    "threads"
)  # fmt: skip
_NO_ROOM = ("out of memory", "can't allocate memory")  # torch's words on a GPU and on a CPU


class Learner:
    """A base model, its LoRA adapter and the optimiser between them.

    `base_model` is a folder or a hub name; `workdir` takes whatever the libraries below write; `resume_from` is a
    checkpoint folder that `save` made. Raises ModelNotFound, NotAModel, CheckpointDamaged or CheckpointMismatch.
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
        # huggingface_hub reads it once, when it is first imported, so it is set before any import that leads there.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        # The learner often shares its cores with the engine; OpenMP threads that spin while they wait are costly then.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

        import torch

        from ratchet.trainer.learner import checkpoint_state, lora

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._progress = Progress()
        self._settings = settings
        self._clock = clock
        self._trainer = lora.build(base_model, settings, workdir / "trl")
        self._first = checkpoint_state.held(self._trainer)  # the adapter as it is before any round
        self._step = checkpoint_state.read(self._trainer, settings, resume_from) if resume_from else 0

    @property
    def step(self) -> int:
        """Optimiser steps taken since the first round, over all restarts."""
        return self._step

    def report_progress_to(self, progress: Progress) -> None:
        """Tell how far a round is from now on."""
        self._progress = progress

    def unfit(self, row: TokenRow) -> str | None:
        """Why the base model cannot learn from a row, None where it can."""
        try:
            self._check_fits(row.ids, f"row of trajectory {row.trajectory_id}", row.temperature)
        except RowError as error:
            return str(error)
        return None

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Learn from the rows once, with `rate_scale` times the learning rate.

        Raises NoLearningSignal when no row could move a weight, RowError when a row does not fit the model (both before
        anything changes), TrainingDiverged when a gradient is not finite, OutOfMemory.
        """
        work = self._progress.begin(TRAINING, len(rows))
        self._trainer.on_rows = work.add
        try:
            return self._trained(rows, rate_scale)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_ROOM):
                raise
            raise OutOfMemory(
                f"no memory for a round of {len(rows)} rows, the longest {max(len(row.ids) for row in rows)} tokens: "
                f"lower learner.token_budget (now {self._settings.token_budget}), "
                "set learner.gradient_checkpointing, or give the trainer more"
            ) from error
        finally:
            work.end()

    def _trained(self, rows: Sequence[TokenRow], rate_scale: float) -> RoundReport:
        began = self._clock()
        given, rows = rows, whiten(rows) if self._settings.objective.whitened else rows
        self._check_signal(rows)
        for row in rows:
            self._check_fits(row.ids, f"row of trajectory {row.trajectory_id}", row.temperature)
        self._trainer.optimizer.zero_grad()  # what a round without memory left
        before = {name: p.detach().clone() for name, p in self._trainer.lora_parameters().items()}
        # Without a ratio no step needs the policy at the round's start, which the movement is measured from.
        watched = self._trainer.watched(rows) if self._settings.objective.ratio == "none" else None
        self._trainer.set_learning_rate(self._trainer.steering.rate * rate_scale)
        prepared, steps, losses = self._preferred(rows) if self._settings.objective.preference else self._stepped(rows)
        taken = [step for step in steps if step.taken]
        if not taken:
            raise NoLearningSignal(self._why_nothing_was_left(len(rows), sum(step.rows_rejected for step in steps)))
        micros = [micro for part in prepared for micro in part]
        gap = self._trainer.mismatch(micros)
        tokens = sum(step.tokens for step in taken)
        entropy = sum(step.entropy_sum for step in taken) / tokens
        moved = self._trainer.moved(micros[:: every(tokens)] if watched is None else watched)
        return RoundReport(
            loss=fmean(losses),
            grad_norm=sum(step.grad_norm for step in taken) / len(taken),
            entropy=entropy,
            clip_ratio=sum(step.clipped_sum for step in taken) / tokens,
            tokens_trained=tokens,
            rows=len(given),
            optimizer_steps=len(taken),
            step=self._step,
            logprob_abs_diff_mean=gap.total / max(gap.tokens, 1),
            logprob_abs_diff_max=gap.largest,
            tokens_compared=gap.tokens,
            importance_clipped_ratio=gap.truncated / max(gap.tokens, 1),
            seconds=self._clock() - began,
            weight_change=self._distance_from(before),
            kl=sum(step.kl_sum for step in taken) / tokens,
            rows_rejected=sum(step.rows_rejected for step in steps),
            tokens_forwarded=sum(step.tokens_forwarded for step in steps),
            **self._steered(moved, entropy, rows, rate_scale),
        )

    def _steered(self, moved: Moved, entropy: float, rows: Sequence[TokenRow], scale: float) -> dict[str, Any]:
        """Let the learning rate follow from what a round moved; return what the report says of both."""
        steering = self._trainer.steering
        used = steering.rate * scale
        target = steering.target(sum(row.tokens_trained for row in rows), len({row.trajectory_id for row in rows}))
        seen = RoundShift(moved.k3, entropy, target, scale)
        aimed = steering.aim(seen) * scale**2
        steering.after(seen)
        return {
            "learning_rate": used,
            "approx_kl": moved.k3,
            "approx_kl_target": aimed,
            "approx_kl_tokens": moved.tokens,
            "logprob_change_abs_mean": moved.absolute,
            "logprob_change_positive_mean": moved.good,
            "dtype": steering.dtype,
        }

    def _stepped(self, rows: Sequence[TokenRow]) -> Steps:
        parts = self._parts([[row] for row in rows])
        # All logprobs of the round's first policy come before its first step.
        prepared = [self._trainer.prepare(part, only_step=len(parts) == 1) for part in parts]
        steps = [self._step_on(micros) for micros in prepared]
        return prepared, steps, [step.loss for step in steps if step.taken]

    def _preferred(self, rows: Sequence[TokenRow]) -> Steps:
        """Take steps of preference: each weighs its answers at the policy that it starts from."""
        loss, beta = self._settings.loss_type, self._settings.preference_beta
        prepared, steps, losses = [], [], []
        for part in self._parts(preference_weights.units(rows, loss)):
            weighed = preference_weights.weigh(part, self._gaps(part), loss, beta)
            prepared.append(self._trainer.prepare(weighed.rows, only_step=True))
            steps.append(self._step_on(prepared[-1]))
            losses.append(weighed.loss)
        return prepared, steps, losses

    def _step_on(self, micros: Sequence[Micro]) -> StepMetrics:
        step = self._trainer.optimiser_step(micros)
        self._step += step.taken
        return step

    def _gaps(self, rows: Sequence[TokenRow]) -> list[float]:
        """How much likelier each row's answers are than under the base model, log p, summed."""
        both = zip(rows, self.score(rows), self.score(rows, adapter=False), strict=True)
        return [
            sum(own - base for own, base, on in zip(ours, theirs, row.mask, strict=True) if on)
            for row, ours, theirs in both
        ]

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        """Logprobs at temperature 1 of every token of each sequence, (T,) each; the first token's is 0.0.

        Under the current adapter, under the base model with `adapter=False`, or under the adapter in a folder that
        `save` made. Raises RowError for a sequence that does not fit the model, CheckpointDamaged, CheckpointMismatch.
        """
        if isinstance(adapter, Path):
            from ratchet.trainer.learner import checkpoint_state

            with checkpoint_state.lent(self._trainer, adapter):
                return self.score(rows)
        sequences = [tuple(row.ids if isinstance(row, TokenRow) else row) for row in rows]
        for index, ids in enumerate(sequences):
            self._check_fits(ids, f"sequence {index}")
        # A sequence of fewer than two tokens has nothing to score.
        scored: list[tuple[float, ...]] = [(0.0,) * len(ids) for ids in sequences]
        longer = [index for index, ids in enumerate(sequences) if len(ids) > 1]
        # They are only scored: all tokens but the first count, and the recorded logprobs are never read.
        plain = [
            TokenRow("", ids, (0, *(1,) * (len(ids) - 1)), (0.0,) * len(ids), advantage=0.0)
            for ids in (sequences[index] for index in longer)
        ]
        for index, found in zip(longer, self._trainer.score(plain, adapter=adapter), strict=True):
            scored[index] = (0.0, *found)
        return scored

    def save(self, folder: Path) -> None:
        """Write a checkpoint to the new `folder`, loadable by vLLM as an adapter and by `resume_from`.

        Of several processes the first one writes. Raises CheckpointExists or CheckpointUnwritable; nothing half-written
        is left.
        """
        from ratchet.trainer.learner import checkpoint_state

        try:
            if self._trainer.accelerator.is_main_process:
                checkpoint.write_atomically(
                    folder, lambda aside: checkpoint_state.write(self._trainer, self._settings, self._step, aside)
                )
        finally:
            self._trainer.accelerator.wait_for_everyone()

    def load(self, folder: Path | None, settings: LearnerSettings) -> None:
        """Stand where a learner stands that is made with `settings` and resumed from `folder`, or, with None, is new.

        Adapter and optimiser are put in place; the base model is neither read again nor held twice. Raises SettingError
        for settings that another adapter or base model would need, CheckpointDamaged or CheckpointMismatch.
        """
        from ratchet.trainer.learner import checkpoint_state

        for field in _BUILT_IN:
            if getattr(settings, field) != getattr(self._settings, field):
                raise SettingError(f"learner setting {field} cannot change while the trainer runs: restart it")
        self._settings = settings
        self._trainer.adopt(settings)
        checkpoint_state.put(self._trainer, settings, self._first)
        self._step = 0
        if folder is not None:
            self._step = checkpoint_state.read(self._trainer, settings, folder)

    def _check_signal(self, rows: Sequence[TokenRow]) -> None:
        if not rows:
            raise NoLearningSignal("the round has no rows")
        if self._settings.objective.preference and not preference_weights.units(rows, self._settings.loss_type):
            raise NoLearningSignal(f"no trajectory of the round's {len(rows)} rows is preferred to another")
        # Without a gradient AdamW would still move the weights, by the momentum of earlier rounds.
        if not self._settings.beta and not any(row.has_signal for row in rows):
            raise NoLearningSignal(
                f"all advantages of the round's {len(rows)} rows are 0: no score differed in its group"
            )

    def _why_nothing_was_left(self, rows: int, rejected: int) -> str:
        if not rejected:
            return f"no advantage other than 0 was left in any step of the round's {rows} rows"
        return (
            f"{rejected} of the round's {rows} rows were rejected, and the others have no advantage: over whole rows "
            f"the engine's probabilities are more than {self._settings.sequence_mask_threshold} times off the "
            "trainer's; "
            "check that base_model is what vLLM serves, with --logprobs-mode processed_logprobs, or lower max_staleness"
        )

    def _check_fits(self, ids: Sequence[int], what: str, temperature: float = 1.0) -> None:
        config = self._trainer.model.config.get_text_config()
        vocabulary = self._trainer.model.get_input_embeddings().weight.shape[0]
        longest = getattr(config, "max_position_embeddings", None)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise RowError(f"{what}: a token id is outside the base model's {vocabulary} ids")
        if longest is not None and len(ids) > longest:
            raise RowError(f"{what}: {len(ids)} tokens exceed the base model's {longest} positions")
        if temperature != 1.0 and getattr(config, "final_logit_softcapping", None):
            raise RowError(
                f"{what}: temperature {temperature} cannot be applied to a base model that caps its "
                "logits; sample at temperature 1"
            )

    def _parts(self, units: Sequence[Sequence[TokenRow]]) -> list[list[TokenRow]]:
        """The rows of each optimiser step: shuffled by seed and step, units whole, sizes as even as they can be."""
        count = min(self._settings.steps_per_round, len(units))
        if count == 1:
            return [[row for unit in units for row in unit]]
        shuffled = list(units)
        random.Random(f"{self._settings.seed}/{self._step}").shuffle(shuffled)
        return [[row for unit in shuffled[part::count] for row in unit] for part in range(count)]

    def _distance_from(self, before: dict[str, torch.Tensor]) -> float:
        after = self._trainer.lora_parameters()
        return math.sqrt(sum(float((after[name].detach() - tensor).pow(2).sum()) for name, tensor in before.items()))
