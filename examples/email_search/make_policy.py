"""Makes the tiny policy: tokenizer, chat template and a Llama of under a million parameters, from nothing but a seed.

`python -m examples.email_search.make_policy --out DIR --seed 0` runs three stages on scripted episodes: short good
tails (question, mail, answer), then whole good episodes, then the mixture of good and bad ones. Copying is learned
first and the bad habits last; the other way round the policy learns to guess. The result is a folder that transformers
and vLLM load. It does no reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.email_search.chat_format import END, PAD, make_tokenizer, render
from examples.email_search.demonstrations import GOOD, MIXED, Messages, Mix, Stage, draw, play, tools
from examples.email_search.tasks import TEST_PAIRS, make_task
from examples.email_search.words import ENTITIES

CONTEXT = 2048
ENTITY_WEIGHT = 4.0
OTHER_TURN_WEIGHT = 0.1
CORPUS = 4000
WEIGHT_OF_A_ROW = 64.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the warm start: what is drawn, how many sequences a step, and the share of all steps."""

    name: str
    share: float
    batch: int
    mix: Mix
    whole: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model and of the optimisation."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 3e-3
    initializer_range: float = 0.08


PHASES = (
    Phase("tails", 0.30, 64, GOOD, whole=False),
    Phase("good", 0.35, 24, GOOD, whole=True),
    Phase("mixed", 0.35, 24, MIXED, whole=True),
)


class Encoder:
    """Turns an episode into token ids and loss weights: 1 on what the assistant says, more on copied words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|im_start|>", END])
        self._head = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
        self.entities = frozenset(tokenizer.convert_tokens_to_ids(sorted(ENTITIES)))

    def encode(self, messages: Messages, *, with_tools: bool) -> tuple[list[int], list[float]]:
        """(ids, weights), both of the length of the rendered chat."""
        text = render(messages, tools() if with_tools else None)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        weights, ours, begun, turns = [], False, 0, 0
        for place, token in enumerate(ids):
            if token == self._start:
                turns += 1
                ours = ids[place + 1 : place + 1 + len(self._head)] == self._head
                begun = place + 1 + len(self._head)
            inside = ours and place >= begun
            if inside:
                weights.append(ENTITY_WEIGHT if token in self.entities else 1.0)
            else:
                weights.append(OTHER_TURN_WEIGHT if turns > 1 else 0.0)
            if token == self._end:
                ours = False
        return ids, weights


class Batches:
    """Endless batches of one phase, sorted by length inside a pool so that little is padded."""

    def __init__(self, phase: Phase, stages: list[Stage], encoder: Encoder, rng: random.Random) -> None:
        self._phase, self._stages, self._encoder, self._rng = phase, stages, encoder, rng
        self._pool: list[list[tuple[list[int], list[float]]]] = []

    def next(self) -> list[tuple[list[int], list[float]]]:
        """The next batch of (ids, weights)."""
        size = self._phase.batch
        if not self._pool:
            drawn = sorted((self._one() for _ in range(size * 8)), key=lambda row: len(row[0]))
            self._pool = [drawn[i : i + size] for i in range(0, len(drawn), size)]
            self._rng.shuffle(self._pool)
        return self._pool.pop()

    def _one(self) -> tuple[list[int], list[float]]:
        episode = draw(self._stages, self._rng, self._phase.mix)
        if self._phase.whole:
            return self._encoder.encode(episode, with_tools=True)
        question, tail = episode[1:2], episode[-3:-1] if self._rng.random() < 0.75 else episode[2:-1]
        return self._encoder.encode([*question, *tail], with_tools=False)


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


def _tensors(rows: Sequence[tuple[list[int], list[float]]], pad: int) -> tuple[Any, Any]:
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


def copy_accuracy(model: Any, encoder: Encoder, pad: int, count: int = 48) -> float:
    """Share of held-out words (pairs and facts never trained on) that the policy, teacher-forced, copies right."""
    import torch

    rng, stage = random.Random(5), Stage.made(9)
    episodes = [play(stage, make_task(stage.by_pair[pair], rng), rng, GOOD) for pair in TEST_PAIRS[:count]]
    ids, weights = _tensors([encoder.encode(episode, with_tools=True) for episode in episodes], pad)
    with torch.no_grad():
        best = model(input_ids=ids).logits[:, :-1].argmax(-1)
    asked = weights[:, 1:] == ENTITY_WEIGHT
    return float((best == ids[:, 1:])[asked].float().mean())


def train(model: Any, encoder: Encoder, steps: int, seed: int, shape: Shape, pad: int) -> None:
    """The three phases in order, `steps` optimiser steps in all."""
    import torch

    rng = random.Random(seed)
    stages = [Stage.made(1000 * (seed + 1) + i) for i in range(12)]
    optimizer = _optimizer(model, shape.learning_rate)
    feeds = [Batches(phase, stages, encoder, rng) for phase in PHASES]
    ends = [sum(phase.share for phase in PHASES[: i + 1]) * steps for i in range(len(PHASES))]
    model.train()
    bar = tqdm(range(steps), desc="warm start", unit="step", mininterval=2.0, file=sys.stderr)
    for step in bar:
        phase = next(i for i, end in enumerate(ends) if step < end or i == len(ends) - 1)
        ids, weights = _tensors(feeds[phase].next(), pad)
        for group in optimizer.param_groups:
            group["lr"] = shape.learning_rate * _schedule(step, steps)
        loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            copied = copy_accuracy(model, encoder, pad)
            bar.set_postfix(phase=PHASES[phase].name, loss=f"{float(loss.detach()):.3f}", copied=f"{copied:.3f}")


def _schedule(step: int, steps: int) -> float:
    """Warm-up over 40 steps, then flat, then linear down over the second half to 2%."""
    return min(1.0, (step + 1) / 40) * max(0.02, min(1.0, 2.0 * (1 - step / steps)))


def make_policy(out: Path, *, seed: int = 0, steps: int = 1300, shape: Shape | None = None) -> dict[str, float]:
    """Writes the policy folder `out` and returns what was measured: parameters, held-out copying, seconds."""
    import torch

    begun, shape = time.monotonic(), shape or Shape()
    torch.manual_seed(seed)
    rng, stages = random.Random(seed), [Stage.made(500 + i) for i in range(4)]
    corpus = [render(draw(stages, rng, MIXED), tools() if i % 8 == 0 else None) for i in range(CORPUS)]
    tokenizer = make_tokenizer(corpus)
    encoder, pad = Encoder(tokenizer), int(tokenizer.convert_tokens_to_ids(PAD))
    model = make_model(tokenizer, shape)
    train(model, encoder, steps, seed, shape, pad)
    figures = {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "copied": copy_accuracy(model, encoder, pad),
        "seconds": time.monotonic() - begun,
    }
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.email_search.make_policy", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300, help="optimiser steps of the warm start")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    chosen = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(chosen.threads)
    figures = make_policy(chosen.out, seed=chosen.seed, steps=chosen.steps)
    print(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
