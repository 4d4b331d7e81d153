"""One round of one agent: optimizer steps on token rows, and the report.

Promises: only tokens that vLLM sampled carry loss; a round changes the weights or raises with the reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ratchet.trainer.errors import NoLearningSignal, RowError
from ratchet.trainer.learner import checkpoint_state, policy_shift, sharding, token_mismatch
from ratchet.trainer.learner.agent_state import AgentState, local
from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.learner.learning_rate import RoundShift, sample_stride
from ratchet.trainer.learner.loss import RecordedGRPOTrainer, StepMetrics
from ratchet.trainer.learner.policy_loss import whiten
from ratchet.trainer.learner.policy_shift import PolicyShift
from ratchet.trainer.learner_api import ModelLimits, RoundReport, unfit, unfit_ids
from ratchet.trainer.rows.token_row import TokenRow, scored_row
from ratchet.trainer.settings.objectives import Preference

Steps = tuple[list[list[Micro]], list[StepMetrics], list[float]]  # micro-batches, steps, losses of taken steps


class TrainingRound:
    """A round of the agent that the trainer holds. Counts the agent's steps."""

    def __init__(
        self, trainer: RecordedGRPOTrainer, limits: ModelLimits, state: AgentState, clock: Callable[[], float]
    ) -> None:
        self._trainer = trainer
        self._limits = limits
        self._state = state
        self._settings = state.settings
        self._clock = clock

    def train(self, rows: Sequence[TokenRow], rate_scale: float) -> RoundReport:
        """Train on the rows once. Raises NoLearningSignal, RowError, TrainingDiverged."""
        began = self._clock()
        received, rows = rows, whiten(rows) if self._settings.objective.whitened else rows
        self._check_signal(rows)
        for row in rows:
            if reason := unfit(self._limits, row):
                raise RowError(reason)
        self._trainer.optimizer.zero_grad()  # a round without memory may have left gradients
        before = {name: local(p.detach()).clone() for name, p in self._trainer.lora_parameters().items()}
        # The policy shift is measured from the start of the round; without a ratio no step computes those logprobs.
        shift_micros = self._trainer.shift_sample(rows) if self._settings.objective.ratio == "none" else None
        rate = self._trainer.rate_controller.rate_at(self._state.step) * rate_scale
        self._trainer.set_learning_rate(rate)
        preference = self._settings.objective.preference
        prepared, steps, losses = self._preference_steps(rows, preference) if preference else self._policy_steps(rows)
        applied = [step for step in steps if step.applied]
        if not applied:
            raise NoLearningSignal(self._reason_for_no_signal(len(rows), sum(step.rows_rejected for step in steps)))
        micros = [micro for part in prepared for micro in part]
        gap = self._trainer.mismatch(micros)
        tokens = sum(step.tokens for step in applied)
        entropy = sum(step.entropy_sum for step in applied) / tokens
        shift = policy_shift.measure(
            self._trainer,
            micros[:: sample_stride(tokens)] if shift_micros is None else shift_micros,
            before,
            coarse=self._trainer.rate_controller.dtype == "bf16",
        )
        return RoundReport(
            loss=fmean(losses),
            grad_norm=sum(step.grad_norm for step in applied) / len(applied),
            entropy=entropy,
            clip_ratio=sum(step.clipped_sum for step in applied) / tokens,
            tokens_trained=tokens,
            rows=len(received),
            optimizer_steps=len(applied),
            step=self._state.step,
            logprob_abs_diff_mean=gap.total / max(gap.tokens, 1),
            logprob_abs_diff_max=gap.largest,
            tokens_compared=gap.tokens,
            fresh_logprob_abs_diff_mean=gap.fresh_total / max(gap.fresh_tokens, 1),
            fresh_tokens_compared=gap.fresh_tokens,
            importance_clipped_ratio=gap.truncated / max(gap.tokens, 1),
            seconds=self._clock() - began,
            weight_change=self._weight_change_since(before),
            kl=sum(step.kl_sum for step in applied) / tokens,
            rows_rejected=sum(step.rows_rejected for step in steps),
            tokens_forwarded=sum(step.tokens_forwarded for step in steps),
            **self._adapt_rate(shift, entropy, rows, rate_scale),
            learning_rate=rate,
            mismatch=token_mismatch.by_row(micros, received),
        )

    def _adapt_rate(self, shift: PolicyShift, entropy: float, rows: Sequence[TokenRow], scale: float) -> dict[str, Any]:
        """Adapt the learning rate to the policy shift of a round; return the report's fields on that shift."""
        rate_controller = self._trainer.rate_controller
        target = rate_controller.target(
            sum(row.tokens_trained for row in rows), len({row.trajectory_id for row in rows})
        )
        round_shift = RoundShift(shift.k3, shift.floor, entropy, target, scale)
        target_kl = rate_controller.target_shift(round_shift) * scale**2
        rate_controller.update(round_shift)
        self._trainer.set_learning_rate(rate_controller.rate)  # of the next round, as a checkpoint has it
        return {
            "approx_kl": shift.k3,
            "approx_kl_target": target_kl,
            "approx_kl_tokens": shift.tokens,
            "approx_kl_floor": shift.floor,
            "logprob_change_share": shift.share,
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

    def _preference_steps(self, rows: Sequence[TokenRow], preference: Preference) -> Steps:
        """Take the steps of a preference loss: each computes its weights with the policy that it starts from."""
        prepared, steps, losses = [], [], []
        for part in self._parts(preference.units(rows)):
            gaps = preference_gaps(self._trainer, self._limits, part)
            weighted, loss = preference.weighted_rows(part, gaps, self._settings.preference_beta)
            prepared.append(self._trainer.prepare(weighted, only_step=True))
            steps.append(self._take_step(prepared[-1]))
            losses.append(loss)
        return prepared, steps, losses

    def _take_step(self, micros: Sequence[Micro]) -> StepMetrics:
        step = self._trainer.optimizer_step(micros)
        self._state.step += step.applied
        return step

    def _check_signal(self, rows: Sequence[TokenRow]) -> None:
        if not rows:
            raise NoLearningSignal("the round has no rows")
        if (preference := self._settings.objective.preference) and not preference.units(rows):
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

    def _parts(self, units: Sequence[Sequence[TokenRow]]) -> list[list[TokenRow]]:
        """Return the rows of each optimizer step: whole units, shuffled by seed and step, of nearly equal counts."""
        count = min(self._settings.steps_per_round, len(units))
        if count == 1:
            return [[row for unit in units for row in unit]]
        shuffled = list(units)
        random.Random(f"{self._settings.seed}/{self._state.step}").shuffle(shuffled)
        return [[row for unit in shuffled[part::count] for row in unit] for part in range(count)]

    def _weight_change_since(self, before: dict[str, torch.Tensor]) -> float:
        after = self._trainer.lora_parameters()
        squares = (float((local(after[name].detach()) - tensor).pow(2).sum()) for name, tensor in before.items())
        return math.sqrt(sharding.over_parts(after.values(), sum(squares)))


def preference_gaps(trainer: RecordedGRPOTrainer, limits: ModelLimits, rows: Sequence[TokenRow]) -> list[float]:
    """Return the sum of log p minus the base model's log p over the answers of each row."""
    both = zip(rows, score(trainer, limits, rows), score(trainer, limits, rows, adapter=False), strict=True)
    return [
        sum(
            policy - reference
            for policy, reference, trained in zip(policy_logprobs, reference_logprobs, row.mask, strict=True)
            if trained
        )
        for row, policy_logprobs, reference_logprobs in both
    ]


def score(
    trainer: RecordedGRPOTrainer,
    limits: ModelLimits,
    rows: Sequence[TokenRow | Sequence[int]],
    *,
    adapter: bool | Path = True,
) -> list[tuple[float, ...]]:
    """Return the logprobs at temperature 1 of all tokens of each sequence, (T,) each; the first token's is 0.0. Of a
    TokenRow only the tokens of its mask are scored, the others are 0.0: what precedes them costs no logits.

    `adapter`: True for the trainer's, False for the base model, or a folder with one. Raises RowError,
    CheckpointDamaged, CheckpointError.
    """
    if isinstance(adapter, Path):
        with checkpoint_state.temporary_adapter(trainer, adapter):
            return score(trainer, limits, rows)
    sequences = [tuple(row.ids if isinstance(row, TokenRow) else row) for row in rows]
    for index, ids in enumerate(sequences):
        if reason := unfit_ids(limits, ids, f"sequence {index}"):
            raise RowError(reason)
    # A sequence of fewer than two tokens has nothing to score.
    scored: list[tuple[float, ...]] = [(0.0,) * len(ids) for ids in sequences]
    longer = [index for index, ids in enumerate(sequences) if len(ids) > 1]
    # Scoring reads neither the recorded logprobs, nor the advantage, nor the temperature.
    plain = [scored_row(sequences[index], _scored_mask(rows[index])) for index in longer]
    for index, logprobs in zip(longer, trainer.score(plain, adapter=adapter), strict=True):
        scored[index] = (0.0, *logprobs)
    return scored


def _scored_mask(row: TokenRow | Sequence[int]) -> tuple[int, ...]:
    return row.mask if isinstance(row, TokenRow) else (0, *(1,) * (len(row) - 1))
