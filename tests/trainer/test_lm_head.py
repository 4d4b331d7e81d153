"""Claims about the LM head: its logprobs, entropies and gradients are those of whole logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ratchet.trainer.learner import lm_head
from ratchet.trainer.learner.lm_head import HeadFunction, bound_of_left, token_logprobs
from ratchet.trainer.planning import memory as plan_memory
from tests.trainer.test_plan_activations import LiveBytes

TOKENS, HIDDEN, VOCABULARY = 37, 24, 101
FUNCTIONS = (HeadFunction(), HeadFunction(0.25), HeadFunction(1.0, 5.0), HeadFunction(2.0, 30.0))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that end inside of the tokens and of the vocabulary."""
    monkeypatch.setattr(lm_head, "TOKEN_TILE", 10)
    monkeypatch.setattr(lm_head, "VOCABULARY_TILE", 16)


def inputs(dtype: torch.dtype, *, bias: bool, size: float = 3.0) -> Any:
    generator = torch.Generator().manual_seed(0)
    hidden = (size * torch.randn(TOKENS, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    head = head.to(dtype).requires_grad_(False)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperatures = 0.5 + torch.rand(TOKENS, generator=generator)
    return hidden, head, targets, temperatures


def reference(
    hidden: torch.Tensor, head: Any, targets: torch.Tensor, temperatures: torch.Tensor, function: HeadFunction,
    left: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same in float64, over whole logits; `left` says which tokens truncation leaves, (K, V)."""
    z = torch.nn.functional.linear(
        hidden.double(), head.weight.double(), None if head.bias is None else head.bias.double()
    )
    z = z * function.scale
    z = function.cap * torch.tanh(z / function.cap) if function.cap else z
    z = z / temperatures.double()[:, None]
    logp = (z if left is None else z.masked_fill(~left, -torch.inf)).log_softmax(1)
    p = logp.exp()
    return logp.gather(1, targets[:, None])[:, 0], -(p * logp.clamp(min=-1e9)).sum(1)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_logprobs_entropies_and_gradients_are_those_of_whole_logits(function: HeadFunction, bias: bool) -> None:
    given = inputs(torch.float32, bias=bias)
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    found, expected = (
        token_logprobs(given[0], given[1], given[2], given[3], function),
        reference(given[0], given[1], given[2], given[3], function),
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max().item() < 5e-5  # of logits of up to 60
    for both in ((1.0, 0.0), (1.0, 0.3)):
        ours, theirs = (
            torch.autograd.grad(
                sum(share * (w * one).sum() for share, w, one in zip(both, weights, pair, strict=True)), given[0],
                retain_graph=True,
            )[0]
            for pair in (found, expected)
        )  # fmt: skip
        assert (ours - theirs).norm() / theirs.norm() < 5e-5
    (alone,) = torch.autograd.grad((weights[0] * found[0]).sum(), given[0])
    assert alone.isfinite().all()


def test_a_bf16_model_has_the_logprobs_of_its_exact_logits() -> None:
    """A head in bf16 rounds logits above 16 to multiples of 0.125."""
    given = inputs(torch.bfloat16, bias=False, size=8.0)
    hidden, head, targets, temperatures = given
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = token_logprobs(given[0], given[1], given[2], given[3], HeadFunction())
        rounded = (head(hidden) / temperatures[:, None]).float().log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert ours.dtype == torch.float32
    exact, _ = reference(given[0], given[1], given[2], given[3], HeadFunction())
    assert (ours - exact).abs().max().item() < 1e-4
    assert (rounded - exact).abs().max().item() > 0.05
    ours.sum().backward()
    (theirs,) = torch.autograd.grad(exact.sum(), hidden)
    assert (hidden.grad.double() - theirs.double()).norm() / theirs.double().norm() < 0.01


def vllms_choice(z: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens vLLM leaves, (V,), one after the other: min_p, the top_k of those, then top_p of those."""
    p = z.double().softmax(0)
    left = p >= min_p * p.max()
    if top_k:
        left &= z >= z.masked_fill(~left, -torch.inf).sort(descending=True).values[min(top_k, len(z)) - 1]
    p = z.double().masked_fill(~left, -torch.inf).softmax(0)
    mass, kept = 0.0, torch.zeros_like(left)
    for token in p.argsort(descending=True).tolist():
        if (top_p < 1 and mass >= top_p) or not left[token]:
            break
        kept[token], mass = True, mass + float(p[token])
    return kept


TRUNCATIONS = (
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.8, 0.0),
    (0, 1.0, 0.1),
    (7, 0.6, 0.01),
    (1, 1.0, 0.0),
    (200, 0.9, 0.0),
)


def test_truncated_tokens_are_normalised_over_what_vllm_leaves() -> None:
    hidden, head, targets, temperatures = inputs(torch.float32, bias=True)
    truncation = torch.tensor([TRUNCATIONS[place % len(TRUNCATIONS)] for place in range(TOKENS)])
    z = head(hidden).detach() / temperatures[:, None]
    left = torch.stack([vllms_choice(row, int(k), p, m) for row, (k, p, m) in zip(z, truncation.tolist(), strict=True)])
    least = bound_of_left(z, truncation)
    assert torch.equal(z >= least[:, None], left)
    targets = torch.stack([torch.where(row)[0][place % row.sum()] for place, row in enumerate(left)])
    found = token_logprobs(hidden, head, targets, temperatures, HeadFunction(), truncation)
    expected = reference(hidden, head, targets, temperatures, HeadFunction(), left)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max().item() < 5e-5
    ours, theirs = (torch.autograd.grad(pair[0].sum() + pair[1].sum(), hidden)[0] for pair in (found, expected))
    assert (ours - theirs).norm() / theirs.norm() < 5e-5


def test_the_sampled_token_is_always_among_those_that_are_left() -> None:
    hidden, head, targets, temperatures = inputs(torch.float32, bias=False)
    only_one = torch.tensor([(1, 1.0, 0.0)] * TOKENS)
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures, HeadFunction(), only_one)
    assert logprobs.isfinite().all()


def test_nothing_to_score_gives_nothing_and_a_gradient_of_0() -> None:
    hidden, head, targets, temperatures = inputs(torch.float32, bias=False)
    logprobs, entropies = token_logprobs(hidden[:0], head, targets[:0], temperatures[:0], HeadFunction())
    (logprobs.sum() + entropies.sum()).backward()
    assert len(logprobs) == 0
    assert not hidden.grad.any()


def test_the_tiles_are_as_large_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "TOKEN_TILE", plan_memory.TOKEN_TILE)
    monkeypatch.setattr(lm_head, "VOCABULARY_TILE", plan_memory.VOCAB_TILE)
    hidden = torch.zeros(plan_memory.TOKEN_TILE, 8, requires_grad=True)
    head = torch.nn.Linear(8, plan_memory.VOCAB_TILE, bias=False).requires_grad_(False)
    with LiveBytes([hidden, head.weight]) as live:
        logprobs, _ = token_logprobs(
            hidden, head, torch.zeros(len(hidden)).long(), torch.ones(len(hidden)), HeadFunction()
        )
        logprobs.sum().backward()
    tile = plan_memory.TOKEN_TILE * plan_memory.VOCAB_TILE * 4
    assert live.peak < 2.2 * tile
