"""Training: the learner's time over a plain PyTorch loop on the same rows, and the tokens that a trajectory costs.

    python -m benchmarks.training [--rounds 7]

The plain loop is what one would write by hand: peft's LoRA on a transformers model, the same length-sorted
micro-batches, all logits, log-softmax, the truncated importance weight and dapo's loss, AdamW; with a KL penalty, the
base model's logprobs from a pass with the adapter off. Both train one step a round, in turns, in one process and on one
thread; CPU seconds of the process, median. The model is tiny and random.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ratchet.store.records import Call, Choice, pack_ids, pack_logprobs
from ratchet.store.states import CallState
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import build_row, build_tiny_model

SETTINGS = LearnerSettings(learning_rate=1e-4, threads=1, token_budget=2048, sequence_mask_threshold=None)
KL = 0.01


def plain_loop(folder: Path, kl: float = 0.0) -> Callable[[Sequence[TokenRow]], None]:
    """Return one round of the loop that one would write by hand."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=SETTINGS.learning_rate)

    def train(rows: Sequence[TokenRow]) -> None:
        trained = sum(row.tokens_trained for row in rows)
        for batch in split_by_budget([len(row.ids) for row in rows], SETTINGS.token_budget):
            members = [rows[place] for place in batch]
            width = max(len(row.ids) for row in members)
            ids = padded([row.ids for row in members], width).long()
            mask = padded([row.mask for row in members], width)[:, 1:]
            sampled = padded([row.logprobs for row in members], width)[:, 1:]
            attended = padded([(1,) * len(row.ids) for row in members], width).long()
            logprobs = all_logprobs(model, ids, attended)
            old = logprobs.detach()
            weight = ((old - sampled) * mask).exp().clamp(max=2.0)
            ratio = (logprobs - old).exp()
            advantage = torch.tensor([[row.advantage] for row in members])
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            terms = -clipped * weight
            if kl:
                with torch.no_grad(), model.disable_adapter():
                    base = all_logprobs(model, ids, attended)
                terms = terms + kl * ratio * ((base - logprobs).exp() - (base - logprobs) - 1)
            ((terms * mask).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return train


def all_logprobs(model: Any, ids: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Logprobs of every token but the first, (N, T)."""
    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def padded(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    return torch.tensor([[*row, *(0,) * (width - len(row))] for row in rows], dtype=torch.float32)


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = build_tiny_model(Path(name) / "model", hidden=128, layers=4)
        rows = [build_row(seed) for seed in range(96)]
        ways: dict[str, Callable[[Any], Any]] = {}
        for kl in (0.0, KL):
            learner = Learner(str(folder), replace(SETTINGS, beta=kl))
            ways[f"plain loop, kl {kl}"] = plain_loop(folder, kl)
            ways[f"learner, kl {kl}"] = learner.train_round
        times: dict[str, list[float]] = {way: [] for way in ways}
        for place in range(rounds + 2):  # the first two warm up
            for way, work in ways.items():
                spent = cpu_seconds(partial(work, rows))
                if place > 1:
                    times[way].append(spent)
    print(
        f"{len(rows)} rows, {sum(len(row.ids) for row in rows)} tokens, {sum(r.tokens_trained for r in rows)} trained"
    )
    for way, seconds in times.items():
        median = statistics.median(seconds)
        least = statistics.median(times[way.replace("learner", "plain loop")])
        print(f"{way}: {median:.3f} s of CPU ({min(seconds):.3f} to {max(seconds):.3f}), {median / least:.2f} times")


def tokens_of_a_trajectory(turns: int = 10, prompt: int = 400, answer: int = 60, result: int = 90) -> tuple[int, int]:
    """Tokens forwarded for an agent of exact continuations: as the learner's rows, and as one sequence per call."""
    calls = [_call(turn, prompt if turn == 0 else result, answer) for turn in range(turns)]
    rows = build_rows("t", calls, 1.0).rows
    apart = sum(prompt + turn * (answer + result) + answer for turn in range(turns))
    return sum(len(row.ids) for row in rows), apart


def _call(turn: int, prompt: int, answer: int) -> Call:
    ids, logprobs = pack_ids([5] * answer), pack_logprobs([-1.0] * answer)
    choice = Choice(index=0, finish_reason="stop", token_ids=ids, logprobs=logprobs)
    return Call(
        id=str(turn), trajectory_id="t", state=CallState.ANSWERED, alias="a", version=1, dialect="chat", streamed=False,
        linked_by="root" if turn == 0 else "path", parent_call=str(turn - 1) if turn else None, parent_choice=0,
        role=None, sampling={"temperature": 1.0}, prompt_node=str(turn), tools_hash="",
        context="exact" if turn else "root", prompt_ids=pack_ids([3] * prompt), prompt_tokens=prompt,
        completion_tokens=answer, started_at=float(turn), first_byte_at=None, ended_at=turn + 0.5, status=200,
        untrainable=None, error=None, choices=(choice,),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    measure(parser.parse_args().rounds)
    ours, apart = tokens_of_a_trajectory()
    print(f"ten turns, exact: {ours} tokens in rows, {apart} as one sequence per call, {apart / ours:.1f} times fewer")


if __name__ == "__main__":
    main()
