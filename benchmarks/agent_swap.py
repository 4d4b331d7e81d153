"""How long the learner takes to put an agent's state in place: at a turn of another agent, or a rollback. No GPU.

    python -m benchmarks.agent_swap [--shape 7b] [--repetitions 9] [--json]

The adapter has the shapes of rank 16 on all linear layers of Qwen2.5-7B, with AdamW's moments: 162 + 324 MB in fp32.
The base model's weights are views of one number, because a swap does not touch them. `swap` keeps the state of one
agent and puts that of another in place; `rollback` reads a committed checkpoint from the disk (its pages are cached)
and puts it in place; `save` writes one. Median and longest seconds, and median CPU seconds, which other work on the
machine lengthens less. On a GPU a swap also copies over PCIe, 486 MB each way: 40 ms at 24 GB/s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ratchet.trainer.learner import lora
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.trainer.gpu_shapes import config_of
from tests.harness.trainer.tiny import build_tokenizer

RANK = 16
AGENTS = ("mail", "support")


def build_hollow_model(shape: str) -> Any:
    """Return a model with the shapes of a real one, whose weights take no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            hollow = torch.zeros(1).expand(parameter.shape)
            setattr(module, name, torch.nn.Parameter(hollow, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.zeros(buffer.shape), persistent=False)
    return model


def train(host: LearnerHost, agent: str) -> None:
    """Give an agent moments, as a round does."""
    host._install(agent)
    for parameter in host.trainer.lora_parameters().values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    host.trainer.optimizer.step()
    host.trainer.optimizer.zero_grad()


def timed(repetitions: int, *runs: Callable[[], object]) -> dict[str, float]:
    """Return the median and the longest seconds of runs that take turns, and the median CPU seconds."""
    seconds, cpu_seconds = [], []
    for _ in range(repetitions):
        for run in runs:
            began, cpu_began = time.perf_counter(), time.process_time()
            run()
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
    return {"median": median(seconds), "longest": max(seconds), "cpu": median(cpu_seconds)}


def measure(shape: str, repetitions: int, folder: Path) -> dict[str, Any]:
    """Return the figures of a model's shapes."""
    load = lora.load
    lora.load = lambda *_, **__: (build_hollow_model(shape), build_tokenizer())
    try:
        process = LearnerProcessSettings(lora_r=RANK, threads=1)
        host = LearnerHost("random weights", process)
    finally:
        lora.load = load
    settings = LearnerSettings(lora_r=RANK, lora_alpha=2 * RANK, learning_rate=1e-5)
    for agent in AGENTS:
        host.open(agent, settings, None)
        train(host, agent)
    commit, numbers = folder / "0001", iter(range(2, 1000))
    host.save(AGENTS[0], commit)
    state = sum(tensor.nbytes for tensor in host._state(AGENTS[1]).lora.values())
    return {
        "state_mb": 3 * state / 1e6,  # the adapter and two moments
        "swap": timed(repetitions, *(lambda agent=agent: host._install(agent) for agent in AGENTS)),
        "rollback": timed(repetitions, lambda: host.open(AGENTS[0], settings, commit)),
        "save": timed(min(repetitions, 3), lambda: host.save(AGENTS[0], folder / f"{next(numbers):04d}")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_swap", description=__doc__)
    parser.add_argument("--shape", choices=("7b", "tiny"), default="7b")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.shape, given.repetitions, Path(folder))
    if given.json:
        print(json.dumps(found))
        return
    print(f"an agent's state: {found.pop('state_mb'):.0f} MB")
    for what, seconds in found.items():
        print(f"{what}: {seconds['median']:.3f} s ({seconds['cpu']:.3f} s of CPU), at most {seconds['longest']:.3f} s")


if __name__ == "__main__":
    main()
