"""The policy shift: how far the steps of a round moved the policy at trained tokens of the round, and what of it shows.

g = log p_new - log p_old of a token, with p_old the policy at the start of the round; k3 = exp(g) - 1 - g estimates the
KL (Schulman 2020, "Approximating KL divergence"). Rejected rows do not count.

Any change of the weights changes the rounding of the whole forward pass, so that k3 is above 0 whatever was learned: in
bf16 by 1e-6 nats a token for a tiny model, and for one of 135 million parameters by 0.0001 (answers that it samples) to
0.02 (answers that are unlikely to it). This floor is measured in every round, with the round's model, rows and number
format: k3 after a change of the old adapter that is as small as the format resolves and in a random direction, which
changes no policy.

bf16 also loses part of a small step: the adapter's output is added to an output of the base model that is rounded to
eight bits. The share that is left is the slope of the change on that of the same step enlarged k times, of which
rounding takes a fifth at most, divided by k. Each has an old policy of its own, so that no rounding error is in both:

    share = k sum(g (log p_k - log p_floor)) / (sum((log p_k - log p_floor)^2) - sum((log p_floor - log p_old)^2))

It comes out up to a third too high, and says nothing of a step that cannot be distinguished from the floor.

trainer/learner/learning_rate.py adapts the learning rate to the shift above the floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING

import torch

from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.agent_state import fill, local
from ratchet.trainer.learner.forward_pass import Micro

if TYPE_CHECKING:
    from ratchet.trainer.learner.loss import RecordedGRPOTrainer

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


def measure(trainer: RecordedGRPOTrainer, micros: Sequence[Micro], before: Weights, *, coarse: bool) -> PolicyShift:
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
    """Return g of the counted tokens, (K,)."""
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
    """Return the sums over the micro-batches of all processes."""
    own = torch.stack(list(sums)).sum(0).tolist()
    return [sum(values) for values in zip(*process_group.gather(own), strict=True)]
