"""The warm start: a fresh Llama of under a million parameters imitates scripted episodes, phase by phase.

What is taught is told as `Lessons`; the result is a folder that transformers and vLLM load, the same for the same seed.
It does no reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.tiny_policy.chat_format import END, PAD, RUN, Drawn, make_tokenizer, render

CONTEXT = 2048
WORD_WEIGHT = 4.0
OTHER_TURN_WEIGHT = 0.1
WEIGHT_OF_A_ROW = 64.0

Row = tuple[list[int], list[float]]  # token ids and loss weights, equally long


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the warm start: its share of all steps, the sequences of a step, and what is drawn."""

    name: str
    share: float
    batch: int
    draw: Callable[[random.Random], Drawn]


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model and of the optimisation."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 3e-3
    initializer_range: float = 0.08


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a policy is taught.

    `words` are what it has to copy: one token each, and more weight. `corpus` gives the tokenizer its other tokens,
    `pattern` says what a run of it is; `held_out` are good episodes about nothing that is in the phases.
    """

    phases: tuple[Phase, ...]
    corpus: Sequence[str]
    words: frozenset[str]
    held_out: Sequence[Drawn]
    pattern: str = RUN
    shape: Shape = Shape()
    steps: int = 1300  # of the optimiser


class Encoder:
    """Turns an episode into token ids and loss weights: 1 on what the assistant says, more on copied words."""

    def __init__(self, tokenizer: Any, words: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|im_start|>", END])
        self._head = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
        self._words = {tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words}

    def encode(self, drawn: Drawn) -> Row:
        """(ids, weights), both of the length of the rendered chat."""
        ids: list[int] = self._tokenizer(render(*drawn), add_special_tokens=False)["input_ids"]
        weights, ours, begun, turns = [], False, 0, 0
        for place, token in enumerate(ids):
            if token == self._start:
                turns += 1
                ours = ids[place + 1 : place + 1 + len(self._head)] == self._head
                begun = place + 1 + len(self._head)
            inside = ours and place >= begun
            if inside:
                weights.append(WORD_WEIGHT if token in self._words else 1.0)
            else:
                weights.append(OTHER_TURN_WEIGHT if turns > 1 else 0.0)
            if token == self._end:
                ours = False
        return ids, weights


class Batches:
    """Endless batches of one phase, sorted by length inside a pool so that little is padded."""

    def __init__(self, phase: Phase, encoder: Encoder, rng: random.Random) -> None:
        self._phase, self._encoder, self._rng = phase, encoder, rng
        self._pool: list[list[Row]] = []

    def next(self) -> list[Row]:
        """The next batch."""
        size = self._phase.batch
        if not self._pool:
            rows = (self._encoder.encode(self._phase.draw(self._rng)) for _ in range(size * 8))
            drawn = sorted(rows, key=lambda row: len(row[0]))
            self._pool = [drawn[i : i + size] for i in range(0, len(drawn), size)]
            self._rng.shuffle(self._pool)
        return self._pool.pop()


def make_model(tokenizer: Any, shape: Shape) -> Any:
    """A fresh Llama in float32; `initializer_range` 0.08 lets heads of this size learn to copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=CONTEXT,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


def _tensors(rows: Sequence[Row], pad: int) -> tuple[Any, Any]:
    """(ids, weights), each (rows, longest); padding has weight 0."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), pad)
    weights = torch.zeros(len(rows), longest)
    for i, (row, weight) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        weights[i, : len(row)] = torch.tensor(weight)
    return ids, weights


def weighted_loss(model: Any, ids: Any, weights: Any) -> Any:
    """Weighted cross-entropy of the next token, summed, over the number of rows and a constant.

    Batches hold rows of like length: a mean over tokens would weigh short, failed episodes more than long, good ones.
    The head runs only where a weight is set.
    """
    import torch

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets, weight = ids[:, 1:], weights[:, 1:]
    chosen = weight > 0
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), targets[chosen], reduction="none")
    return (losses * weight[chosen]).sum() / (len(ids) * WEIGHT_OF_A_ROW)


def _optimizer(model: Any, learning_rate: float) -> Any:
    import torch

    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


class Examination:
    """How well a policy, teacher-forced, copies the words of the held-out episodes."""

    def __init__(self, encoder: Encoder, held_out: Sequence[Drawn], pad: int) -> None:
        self._ids, weights = _tensors([encoder.encode(drawn) for drawn in held_out], pad)
        self._asked = weights[:, 1:] == WORD_WEIGHT

    def copied(self, model: Any) -> float:
        """The share of words that it would have copied right."""
        import torch

        with torch.no_grad():
            best = model(input_ids=self._ids).logits[:, :-1].argmax(-1)
        return float((best == self._ids[:, 1:])[self._asked].float().mean())


def train(
    model: Any, feeds: Sequence[tuple[Phase, Batches]], steps: int, shape: Shape, pad: int, examination: Examination
) -> None:
    """The phases in order, `steps` optimiser steps in all."""
    import torch

    optimizer = _optimizer(model, shape.learning_rate)
    ends = [sum(phase.share for phase, _ in feeds[: i + 1]) * steps for i in range(len(feeds))]
    model.train()
    bar = tqdm(range(steps), desc="warm start", unit="step", mininterval=2.0, file=sys.stderr)
    for step in bar:
        phase, batches = feeds[next(i for i, end in enumerate(ends) if step < end or i == len(ends) - 1)]
        ids, weights = _tensors(batches.next(), pad)
        for group in optimizer.param_groups:
            group["lr"] = shape.learning_rate * _schedule(step, steps)
        loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            copied = examination.copied(model)
            bar.set_postfix(phase=phase.name, loss=f"{float(loss.detach()):.3f}", copied=f"{copied:.3f}")


def _schedule(step: int, steps: int) -> float:
    """Warm-up over 40 steps, then flat, then linear down over the second half to 2%."""
    return min(1.0, (step + 1) / 40) * max(0.02, min(1.0, 2.0 * (1 - step / steps)))


def make_policy(
    out: Path, lessons: Lessons, *, seed: int = 0, steps: int | None = None, shape: Shape | None = None
) -> dict[str, float]:
    """Writes the policy folder `out` and returns what was measured: parameters, held-out copying, seconds.

    `steps` and `shape` take the place of the lessons' own.
    """
    import torch

    begun, shape = time.monotonic(), shape or lessons.shape
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(lessons.corpus, lessons.words, lessons.pattern)
    encoder, pad = Encoder(tokenizer, lessons.words), int(tokenizer.convert_tokens_to_ids(PAD))
    model, examination = make_model(tokenizer, shape), Examination(encoder, lessons.held_out, pad)
    rng = random.Random(seed)
    feeds = [(phase, Batches(phase, encoder, rng)) for phase in lessons.phases]
    train(model, feeds, steps or lessons.steps, shape, pad, examination)
    figures = {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "copied": examination.copied(model),
        "seconds": time.monotonic() - begun,
    }
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return figures


def main(teach: Callable[[int], Lessons], prog: str, description: str, arguments: Sequence[str] | None = None) -> None:
    """The command line of a script that makes a policy; `teach(seed)` gives its lessons."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimiser steps of the warm start, in place of the policy's own")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    chosen = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(chosen.threads)
    figures = make_policy(chosen.out, teach(chosen.seed), seed=chosen.seed, steps=chosen.steps)
    print(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))
