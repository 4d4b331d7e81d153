"""One round of one agent: optimizer steps on token rows, and the report.

Promises: only tokens that vLLM sampled carry loss; a round changes the weights or raises with the reason.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ratchet.trainer.errors import NoLearningSignal, RowError
from ratchet.trainer.learner import checkpoint_state, process_group
from ratchet.trainer.learner.agent_state import AgentState, fill, local
from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.learner.learning_rate import RoundShift, sample_stride
from ratchet.trainer.learner.loss import RecordedGRPOTrainer, StepMetrics, log_ratio, whiten
from ratchet.trainer.learner.process_group import over_parts
from ratchet.trainer.learner_api import ModelLimits, RoundReport, unfit, unfit_ids
from ratchet.trainer.rows.token_row import TokenRow, scored_row
from ratchet.trainer.settings.objectives import Preference

# The difference between the trainer's and vLLM's logprob of every trained token of a round, by row.
#
# Micro-batches sort, split and pack rows over the processes; a row is found again by its token ids and recorded
# logprobs.

_Gaps = dict[bytes, bytes | None]  # by the row's key


def mismatch_by_row(micros: Sequence[Micro], rows: Sequence[TokenRow]) -> tuple[bytes | None, ...]:
    """Return RoundReport's `mismatch`. Collective: all processes call it, each with its own micro-batches.

    The micro-batches have been trained, so that they hold the logprobs before the round and which rows were kept.
    """
    gaps: _Gaps = {}
    for found in process_group.gather([_gaps(micro) for micro in micros]):
        for one in found:
            gaps |= one
    return tuple(gaps.get(_key(row), b"") for row in rows)


def _gaps(micro: Micro) -> _Gaps:
    """Return the differences of a micro-batch's rows: empty without `importance`, None if the row was rejected."""
    names = ("trained", "importance", "kept", "prompt_ids", "completion_ids", "completion_mask")
    on_cpu = {name: micro[name].cpu() for name in names}
    differences, sampled = log_ratio(micro).half().cpu(), micro["sampling_per_token_logps"].cpu()  # (N, T) each
    found: _Gaps = {}
    for place, trained in enumerate(on_cpu["trained"]):
        if not trained.any():
            continue
        length = int(on_cpu["completion_mask"][place].sum())
        ids = torch.cat([on_cpu["prompt_ids"][place], on_cpu["completion_ids"][place, :length]])
        key = _digest(ids.numpy().tobytes(), (sampled[place, :length] + 0.0).numpy().tobytes())  # -0.0 becomes 0.0
        if not on_cpu["kept"][place]:
            found[key] = None
        else:
            compared = bool(on_cpu["importance"][place])
            found[key] = differences[place][trained].numpy().tobytes() if compared else b""
    return found


def _key(row: TokenRow) -> bytes:
    recorded = (logprob if trained else 0.0 for logprob, trained in zip(row.logprobs[1:], row.mask[1:], strict=True))
    return _digest(array("q", row.ids).tobytes(), array("f", (one + 0.0 for one in recorded)).tobytes())


def _digest(ids: bytes, logprobs: bytes) -> bytes:
    return hashlib.blake2b(ids + logprobs, digest_size=16).digest()


# The policy shift: how far the steps of a round moved the policy at trained tokens of the round, and what of it shows.
#
# g = log p_new - log p_old of a token, with p_old the policy at the start of the round; k3 = exp(g) - 1 - g estimates
# the KL (Schulman 2020, "Approximating KL divergence"). Rejected rows do not count.
#
# Any change of the weights changes the rounding of the whole forward pass, so that k3 is above 0 whatever was learned:
# in bf16 by 1e-6 nats a token for a tiny model, and for one of 135 million parameters by 0.0001 (answers that it
# samples) to 0.02 (answers that are unlikely to it). This floor is measured in every round, with the round's model,
# rows and number format: k3 after a change of the old adapter that is as small as the format resolves and in a random
# direction, which changes no policy.
#
# bf16 also loses part of a small step: the adapter's output is added to an output of the base model that is rounded to
# eight bits. The share that is left is the slope of the change on that of the same step enlarged k times, of which
# rounding takes a fifth at most, divided by k. Each has an old policy of its own, so that no rounding error is in both:
#
#     share = k sum(g (log p_k - log p_floor)) / (sum((log p_k - log p_floor)^2) - sum((log p_floor - log p_old)^2))
#
# It comes out up to a third too high, and says nothing of a step that cannot be distinguished from the floor.
#
# trainer/learner/learning_rate.py adapts the learning rate to the shift above the floor.

Weights = Mapping[str, torch.Tensor]  # this process's parts of the LoRA parameters, by name

_MAX_GAP = 20.0  # nats; exp of much larger gaps overflows
# Of a weight. Of a new adapter, whose second matrices are 0, bf16 loses a part of smaller changes: of a model of 135
# million parameters 1e-6 shows two thirds of the floor, 1e-5 all of it.
_LEAST_CHANGE = {torch.bfloat16: 2e-5, torch.float32: 1e-7}
_ENLARGED_RMS = 0.5  # nats, of the enlarged step: ten times the rounding error of bf16
_MAX_ENLARGED = 50.0


@dataclass(frozen=True, slots=True)
class PolicyShift:
    """Means over the sampled tokens.

    k3        exp(g) - 1 - g, which estimates the KL
    floor     what k3 is without any change of the policy, by rounding alone
    share     of the trained change that the number format shows, from 0 to 1; 1 in fp32
    absolute  |g|
    positive  g of the tokens with a positive advantage, 0 if there are none
    """

    k3: float
    floor: float
    share: float
    absolute: float
    positive: float
    tokens: int


def measure_policy_shift(
    trainer: RecordedGRPOTrainer, micros: Sequence[Micro], before: Weights, *, coarse: bool
) -> PolicyShift:
    """Return how far the policy is from that of the weights `before`, whose logprobs these micro-batches hold.

    All processes call it with their micro-batches. `coarse`: the model computes in bf16.
    """
    after = {name: local(p.detach()).clone() for name, p in trainer.lora_parameters().items()}
    changes = [_change(micro, trainer.token_logprobs(micro)) for micro in micros]  # (K,) each
    with _weights(trainer, _unchanged(before, torch.bfloat16 if coarse else torch.float32), after):
        floors = [_change(micro, trainer.token_logprobs(micro)) for micro in micros]
    sums = [_sums(micro, *pair) for micro, *pair in zip(micros, changes, floors, strict=True)]
    k3, floor, absolute, positive, tokens, n_positive = _over_processes(sums)
    k3, floor = k3 / max(tokens, 1), floor / max(tokens, 1)
    share = 1.0
    if coarse:
        times = min(_MAX_ENLARGED, max(2.0, _ENLARGED_RMS / sqrt(2 * max(k3 - floor, floor / 4, 1e-12))))
        enlarged = {name: old + times * (after[name] - old) for name, old in before.items()}
        with _weights(trainer, enlarged, after):
            large = [_change(micro, trainer.token_logprobs(micro)) for micro in micros]
        parts = [_products(*three) for three in zip(changes, floors, large, strict=True)]
        share = _share(times, *_over_processes(parts))
    return PolicyShift(
        k3, floor, share, absolute / max(tokens, 1), positive / max(n_positive, 1), round(tokens)
    )  # fmt: skip


def _change(micro: Micro, now: torch.Tensor) -> torch.Tensor:
    counted = micro["trained"] & micro["kept"]  # (N, T)
    return (now - micro["old_per_token_logps"])[counted].double().clamp(max=_MAX_GAP)


def _sums(micro: Micro, change: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return the sums of k3, floor, |g| and g of tokens with a positive advantage, and both token counts; (6,)."""
    positive = change[micro["advantages"][micro["trained"] & micro["kept"]] > 0]
    totals = [_k3(change), _k3(floor), change.abs().sum(), positive.sum()]
    counts = torch.tensor([change.numel(), positive.numel()], dtype=torch.float64, device=change.device)
    return torch.cat([torch.stack(totals), counts])


def _k3(gap: torch.Tensor) -> torch.Tensor:
    return (gap.exp() - 1 - gap).sum()


def _products(change: torch.Tensor, floor: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Return the sums that `_share` needs; (3,)."""
    from_floor = large - floor
    return torch.stack([(change * from_floor).sum(), from_floor.square().sum(), floor.square().sum()])


def _share(times: float, both: float, large: float, noise: float) -> float:
    """Return the share of the change that shows; 0 where the enlarged step does not show either."""
    share = times * both / (large - noise) if large > noise else 0.0
    return min(1.0, max(0.0, share)) if isfinite(share) else 0.0


def _unchanged(weights: Weights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights that differ from these by what `dtype` resolves, up or down at random: the same policy.

    Only the second matrix of a layer differs: with both, the change would grow with the adapter.
    """
    changed = {}
    for seed, (name, weight) in enumerate(weights.items()):
        generator = torch.Generator(weight.device).manual_seed(seed)
        sign = 1.0 - 2.0 * torch.randint(0, 2, weight.shape, generator=generator, device=weight.device)
        step = _LEAST_CHANGE[dtype] + torch.finfo(dtype).eps * weight.abs()
        changed[name] = weight if "lora_A" in name or "embedding_A" in name else weight + sign * step
    return changed


@contextmanager
def _weights(trainer: RecordedGRPOTrainer, weights: Weights, after: Weights) -> Iterator[None]:
    """Use other weights in the block."""
    fill(trainer, weights)
    try:
        yield
    finally:
        fill(trainer, after)


def _over_processes(sums: Sequence[torch.Tensor]) -> list[float]:
    own = torch.stack(list(sums)).sum(0).tolist()
    return [sum(values) for values in zip(*process_group.gather(own), strict=True)]


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
        shift = measure_policy_shift(
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
            mismatch=mismatch_by_row(micros, received),
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
        return math.sqrt(over_parts(after.values(), sum(squares)))


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
    masks = [row.mask if isinstance(row, TokenRow) else (0, *(1,) * (len(row) - 1)) for row in rows]
    plain = [scored_row(sequences[index], masks[index]) for index in longer]
    for index, logprobs in zip(longer, trainer.score(plain, adapter=adapter), strict=True):
        scored[index] = (0.0, *logprobs)
    return scored
