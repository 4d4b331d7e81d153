"""The LM head of the learner: logprobs and entropies of chosen tokens, without logits that are whole in memory.

    z_j = cap tanh(s w_j h / cap) / T      log p_t = z_t - log sum_j e^z_j      H = log sum_j e^z_j - sum_j p_j z_j

for hidden states h, rows w_j of the head, its scale s, its cap (Gemma's soft cap; else z_j = s w_j h / T) and the
temperature T of each token. The sums run over tiles of tokens and vocabulary, and the backward pass computes each tile
again: dlog p_t / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log p_j + H). The products of bf16 operands are exact, are
summed in fp32 and stay in fp32: a bf16 logit above 16 is a multiple of 0.125. The head itself is frozen.

A token that was sampled with top_k, top_p or min_p is normalised over the tokens that these leave, as vLLM's
`processed_logprobs` are: min_p and top_k first, then top_p of what is left. Which tokens were left is not recorded, so
it follows from the logits computed here, and the sampled token is always among them. That set is a constant for the
gradient (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "keep sampling mask").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

TOKEN_TILE = 2048
VOCABULARY_TILE = 16384


@dataclass(frozen=True, slots=True)
class HeadFunction:
    """The scale and the cap that a model's head gives its logits."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> HeadFunction:
        """Return those of a text model's configuration, whose names differ by family."""
        factors = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        scale = next((value for name in factors if (value := getattr(config, name, None)) is not None), 1.0)
        divisor = getattr(config, "logits_scaling", None)  # HyperCLOVA X multiplies by it
        if divisor is not None:
            scale *= divisor if config.model_type == "hyperclovax" else 1 / divisor
        return HeadFunction(float(scale), getattr(config, "final_logit_softcapping", None))


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    function: HeadFunction,
    truncation: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of K targets and the entropies of their distributions, in fp32: (K, H) -> (K,), (K,).

    `truncation` holds top_k (0: all), top_p (1: all) and min_p (0: all) of each token, (K, 3).
    """
    least = None
    if truncation is not None and len(targets):
        with torch.no_grad():
            least = _bounds(hidden, head, temperatures, function, truncation)  # (K,)
    logprobs, entropies = _TiledLogprobs.apply(
        hidden, head.weight, head.bias, targets, temperatures[:, None], function, least
    )
    return logprobs, entropies


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (K, H)
        weight: torch.Tensor,  # (V, H)
        bias: torch.Tensor | None,  # (V,)
        targets: torch.Tensor,  # (K,)
        temperatures: torch.Tensor,  # (K, 1)
        function: HeadFunction,
        least: torch.Tensor | None,  # (K,) bound of the z that are left beside the target; None: all are
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, sums = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for tokens in _tiles(len(hidden), TOKEN_TILE):
                chosen = torch.zeros_like(sums[tokens])
                # Of each tile of the vocabulary: its largest z, log sum e^z, and the mean of z - largest by e^z.
                tops, parts, means = [], [], []
                for ids in _tiles(len(weight), VOCABULARY_TILE):
                    z = _logits(hidden[tokens], weight[ids], _part(bias, ids), temperatures[tokens], function)
                    place, inside = _places(targets[tokens], ids)
                    chosen = torch.where(inside, z.gather(1, place[:, None])[:, 0], chosen)
                    out = None if least is None else _left_out(z, least[tokens], place, inside)
                    tops.append(z.amax(1))
                    z -= tops[-1][:, None]
                    p = z.exp() if out is None else z.exp().masked_fill_(out, 0.0)
                    part = p.sum(1)
                    parts.append(tops[-1] + part.log())
                    means.append(p.mul_(z).sum(1) / part.clamp(min=torch.finfo(dtype).tiny))
                each = torch.stack(parts)  # (tiles, tokens)
                total = each.logsumexp(0)
                sums[tokens], logprobs[tokens] = total, chosen - total
                gaps = total - torch.stack(tops) - torch.stack(means)  # mean of total - z: small, where both are large
                entropies[tokens] = ((each - total).exp() * gaps).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, least, sums, entropies)
        ctx.function = function
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, least, sums, entropies = ctx.saved_tensors
        of_logprob, of_entropy = gradients
        if of_logprob is None:
            of_logprob = torch.zeros_like(sums)
        of_hidden = torch.zeros_like(hidden, dtype=sums.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for tokens in _tiles(len(hidden), TOKEN_TILE):
                for ids in _tiles(len(weight), VOCABULARY_TILE):
                    z = _logits(hidden[tokens], weight[ids], _part(bias, ids), temperatures[tokens], ctx.function)
                    cap = ctx.function.cap
                    slope = None if cap is None else 1 - (z * temperatures[tokens] / cap).square_()
                    place, inside = _places(targets[tokens], ids)
                    out = None if least is None else _left_out(z, least[tokens], place, inside)
                    logp = z.sub_(sums[tokens, None])
                    of_z = logp.exp() if out is None else logp.exp().masked_fill_(out, 0.0)
                    if of_entropy is None:
                        of_z *= -of_logprob[tokens, None]
                    else:
                        logp.add_(entropies[tokens, None]).mul_(of_entropy[tokens, None]).add_(of_logprob[tokens, None])
                        of_z *= logp.neg_()
                    of_z.scatter_add_(1, place[:, None], (of_logprob[tokens] * inside)[:, None])
                    of_z *= ctx.function.scale / temperatures[tokens]
                    if slope is not None:
                        of_z *= slope
                    of_hidden[tokens] += _product(of_z.to(weight.dtype), weight[ids])
        return of_hidden.to(hidden.dtype), None, None, None, None, None, None


def _bounds(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    temperatures: torch.Tensor,
    function: HeadFunction,
    truncation: torch.Tensor,
) -> torch.Tensor:
    """Return the bound of each token's z that truncation leaves, (K,); -inf without truncation."""
    least = torch.full((len(hidden),), -math.inf, dtype=torch.float32, device=hidden.device)
    truncated = ((truncation[:, 0] > 0) | (truncation[:, 1] < 1) | (truncation[:, 2] > 0)).nonzero()[:, 0]
    with torch.autocast(hidden.device.type, enabled=False):
        for some in truncated.split(max(1, TOKEN_TILE * VOCABULARY_TILE // len(head.weight))):
            temperature = temperatures[some, None]
            z = _logits(hidden[some], head.weight, head.bias, temperature, function)  # (R, V)
            least[some] = bound_of_left(z, truncation[some]).to(least.dtype)
    return least


def bound_of_left(z: torch.Tensor, truncation: torch.Tensor) -> torch.Tensor:
    """Return a bound between the logits that top_k, top_p and min_p leave and the others: (R, V), (R, 3) -> (R,).

    It is in the middle, so that rounding in another tile decides nothing; ties are left.
    """
    top_k, top_p, min_p = truncation.to(z.dtype).unbind(1)
    ordered = z.sort(1).values
    count = torch.where(top_k > 0, top_k, float(z.shape[1])).long().clamp(max=z.shape[1])
    floor = torch.maximum(ordered.gather(1, z.shape[1] - count[:, None])[:, 0], ordered[:, -1] + min_p.log())
    out = ordered < floor[:, None]
    mass = ordered.masked_fill(out, -math.inf).softmax(1).cumsum(1)  # of a token and those below it
    out |= (mass <= 1 - top_p[:, None]) & (top_p[:, None] < 1)
    out[:, -1] = False
    smallest_left = ordered.masked_fill(out, math.inf).amin(1)
    largest_out = ordered.masked_fill(~out, -math.inf).amax(1)
    return (smallest_left + largest_out) / 2


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor,
    function: HeadFunction,
) -> torch.Tensor:
    """Return z of a tile, (tokens, ids), in fp32 or better."""
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias
    if function.scale != 1.0:
        logits *= function.scale
    if function.cap is not None:
        logits = logits.div_(function.cap).tanh_().mul_(function.cap)
    return logits.div_(temperatures)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a matrix product summed and kept in fp32 or better."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype) @ b.to(dtype)


def _tiles(size: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, size)) for start in range(0, size, tile)]


def _part(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _left_out(z: torch.Tensor, least: torch.Tensor, place: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return which tokens of a tile truncation leaves out, (tokens, ids): never the target."""
    out = z < least[:, None]
    return out.scatter_(1, place[:, None], out.gather(1, place[:, None]) & ~inside[:, None])


def _places(targets: torch.Tensor, ids: slice) -> tuple[torch.Tensor, torch.Tensor]:
    place = targets - ids.start
    return place.clamp(0, ids.stop - ids.start - 1), (targets >= ids.start) & (targets < ids.stop)
