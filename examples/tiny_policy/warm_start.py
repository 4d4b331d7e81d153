"""The warm start: a fresh Llama of under a million parameters imitates scripted episodes, phase by phase.

`Lessons` describe the curriculum. The result is a folder that transformers and vLLM load, identical for the same seed.
No reinforcement learning happens here.
"""

from __future__ import annotations

import argparse
import bisect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.tiny_policy.chat_format import END, PAD, RUN, Drawn, make_tokenizer, render

CONTEXT = 2048
WORD_WEIGHT = 4.0
OTHER_TURN_WEIGHT = 0.1
WEIGHT_OF_A_ROW = 64.0

Row = tuple[list[int], list[float]]  # token ids and loss weights, equally long


@dataclass(frozen=True, slots=True)
class CurriculumPhase:
    """A phase of the warm start: its number of optimiser steps, the batch size, and the source of its episodes.

    A phase with a `learning_rate` has an optimiser and a schedule of its own; otherwise it continues those of the phase
    before it.
    """

    name: str
    steps: int
    batch: int
    draw: Callable[[random.Random], Drawn]
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model, and optimiser settings."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 3e-3
    initializer_range: float = 0.08


@dataclass(frozen=True, slots=True)
class Lessons:
    """The curriculum of a policy.

    `words` are the words to copy: one token each, with a larger loss weight. The tokenizer takes its other tokens from
    `corpus`, split by `pattern`. `held_out` are good episodes about facts that are in no phase.
    """

    phases: tuple[CurriculumPhase, ...]
    corpus: Sequence[str]
    words: frozenset[str]
    held_out: Sequence[Drawn]
    pattern: str = RUN
    shape: Shape = Shape()

    @property
    def steps(self) -> int:
        """The optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)


class Encoder:
    """Encodes episodes as token ids and loss weights: 1 on assistant tokens, more on copied words."""

    def __init__(self, tokenizer: Any, words: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|im_start|>", END])
        self._head = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
        self._words = {tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words}

    def encode(self, drawn: Drawn) -> Row:
        """Return (ids, weights), both of the length of the rendered chat."""
        ids: list[int] = self._tokenizer(render(*drawn), add_special_tokens=False)["input_ids"]
        weights, is_assistant, content_start, turns = [], False, 0, 0
        for place, token in enumerate(ids):
            if token == self._start:
                turns += 1
                is_assistant = ids[place + 1 : place + 1 + len(self._head)] == self._head
                content_start = place + 1 + len(self._head)
            inside = is_assistant and place >= content_start
            if inside:
                weights.append(WORD_WEIGHT if token in self._words else 1.0)
            else:
                weights.append(OTHER_TURN_WEIGHT if turns > 1 else 0.0)
            if token == self._end:
                is_assistant = False
        return ids, weights


class Batches:
    """Endless batches of one phase, sorted by length within a pool to reduce padding."""

    def __init__(self, phase: CurriculumPhase, encoder: Encoder, rng: random.Random) -> None:
        self._phase, self._encoder, self._rng = phase, encoder, rng
        self._pool: list[list[Row]] = []

    def next(self) -> list[Row]:
        """Return the next batch."""
        size = self._phase.batch
        if not self._pool:
            rows = (self._encoder.encode(self._phase.draw(self._rng)) for _ in range(size * 8))
            drawn = sorted(rows, key=lambda row: len(row[0]))
            self._pool = [drawn[i : i + size] for i in range(0, len(drawn), size)]
            self._rng.shuffle(self._pool)
        return self._pool.pop()


def make_model(tokenizer: Any, shape: Shape) -> Any:
    """Return a new Llama in float32; with `initializer_range` 0.08 heads of this size learn to copy."""
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
    """Return (ids, weights), each (rows, longest row); padding has weight 0."""
    import torch

    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), pad)
    weights = torch.zeros(len(rows), width)
    for i, (row, weight) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        weights[i, : len(row)] = torch.tensor(weight)
    return ids, weights


def weighted_loss(model: Any, ids: Any, weights: Any) -> Any:
    """Return the summed weighted cross-entropy of the next token, divided by the number of rows and a constant.

    Rows of a batch have similar lengths: with a mean over tokens, short, failed episodes would count more than long,
    good ones. The head runs only on positions with a weight.
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


class Validation:
    """Measures how well a policy, teacher-forced, copies the words of held-out episodes."""

    def __init__(self, encoder: Encoder, held_out: Sequence[Drawn], pad: int) -> None:
        self._ids, weights = _tensors([encoder.encode(drawn) for drawn in held_out], pad)
        self._copied_words = weights[:, 1:] == WORD_WEIGHT

    def copied(self, model: Any) -> float:
        """Return the share of words that the policy copies correctly."""
        import torch

        with torch.no_grad():
            best = model(input_ids=self._ids).logits[:, :-1].argmax(-1)
        return float((best == self._ids[:, 1:])[self._copied_words].float().mean())


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive phases with one optimiser and one learning rate schedule; `ends` are their last steps, cumulative."""

    learning_rate: float
    feeds: tuple[tuple[CurriculumPhase, Batches], ...]
    ends: tuple[int, ...]

    def feed_of(self, step: int) -> tuple[CurriculumPhase, Batches]:
        """Return the phase and the batches of a step."""
        return self.feeds[bisect.bisect_right(self.ends, step)]


def stretches(lessons: Lessons, encoder: Encoder, rng: random.Random, steps: int | None = None) -> list[Stretch]:
    """Return the curriculum in order; with `steps` its phases are scaled to about that many steps in total."""
    scale = 1.0 if steps is None else steps / lessons.steps
    parts: list[list[CurriculumPhase]] = []
    for phase in lessons.phases:
        if phase.learning_rate is not None or not parts:
            parts.append([])
        parts[-1].append(phase)
    return [
        Stretch(
            learning_rate=phases[0].learning_rate or lessons.shape.learning_rate,
            feeds=tuple((phase, Batches(phase, encoder, rng)) for phase in phases),
            ends=tuple(accumulate(max(1, round(phase.steps * scale)) for phase in phases)),
        )
        for phases in parts
    ]


def train(model: Any, course: Sequence[Stretch], pad: int, validation: Validation) -> None:
    """Train on every stretch in order."""
    model.train()
    done, total = 0, sum(stretch.ends[-1] for stretch in course)
    with _progress_bar() as bars:
        bar = bars.add_task("warm start", total=total, metrics="")
        for stretch in course:
            optimizer = _optimizer(model, stretch.learning_rate)
            for step in range(stretch.ends[-1]):
                phase, batches = stretch.feed_of(step)
                rate = stretch.learning_rate * _schedule(step, stretch.ends[-1])
                loss = _step(model, optimizer, rate, _tensors(batches.next(), pad))
                if done % 50 == 0 or done == total - 1:
                    text = f"{phase.name} loss={loss:.3f} copied={validation.copied(model):.3f}"
                    bars.update(bar, metrics=text)
                bars.advance(bar)
                done += 1


def _step(model: Any, optimizer: Any, rate: float, batch: tuple[Any, Any]) -> float:
    """Take one optimiser step at the learning rate `rate`; return the loss."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = weighted_loss(model, *batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _progress_bar() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[metrics]}"))
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up over 40 steps, constant, then linear to 2% in the second half."""
    return min(1.0, (step + 1) / 40) * max(0.02, min(1.0, 2.0 * (1 - step / steps)))


def make_policy(
    out: Path, lessons: Lessons, *, seed: int = 0, steps: int | None = None, shape: Shape | None = None
) -> dict[str, float]:
    """Write the policy folder `out`; return its figures: parameters, held-out copying, seconds.

    `steps` and `shape` override those of the lessons.
    """
    import torch

    started_at, shape = time.monotonic(), shape or lessons.shape
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(lessons.corpus, lessons.words, lessons.pattern)
    encoder, pad = Encoder(tokenizer, lessons.words), int(tokenizer.convert_tokens_to_ids(PAD))
    model, validation = make_model(tokenizer, shape), Validation(encoder, lessons.held_out, pad)
    rng = random.Random(seed)
    train(model, stretches(lessons, encoder, rng, steps), pad, validation)
    figures = {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "copied": validation.copied(model),
        "seconds": time.monotonic() - started_at,
    }
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return figures


def main(teach: Callable[[int], Lessons], prog: str, description: str, arguments: Sequence[str] | None = None) -> Path:
    """Run the command line of a script that creates a policy; `teach(seed)` returns its lessons. Return its folder."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimiser steps of the warm start, instead of the default")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    chosen = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(chosen.threads)
    out: Path = chosen.out
    figures = make_policy(out, teach(chosen.seed), seed=chosen.seed, steps=chosen.steps)
    print(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    return out
