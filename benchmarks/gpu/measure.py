"""What a GPU has to show for the learner, in the order of its worth; one process and one time limit a question.

    python -m benchmarks.gpu.measure [QUESTION ...] [--shape 7b|tiny] [--device cuda|cpu] [--seconds 300] [--out FILE]

    noise     rounding of bf16 in logprobs, with a bf16 and an fp32 LM head, and what it leaves of a small step
    moves     what 1, 4 and 16 steps at 2e-5 to 3e-4 do to the logprobs of good answers, computed in bf16 and in fp32
    head      the learner's loss and gradients on one layer against plain fp32
    step      a GRPO step on rows of mixed lengths, with and without shared prefixes: tokens/s, MFU, memory and its plan
    trl       the same rows through TRL's GRPOTrainer, nothing recomputed where memory allows
    beside    the same step while another process holds 45% of the memory and decodes; a round without memory, and one
              after it
    experts   six layers of Qwen3-30B-A3B: adapters on the experts, and on attention only

Each figure is one line of JSON, appended to FILE as it comes, so that a question that fails or runs out of time loses
no other. `--model` takes a folder for noise and moves in place of random weights. On a CPU (`--shape tiny --device
cpu`, which the tests run) there is no peak and no MFU. With `--at-once` the questions run beside each other: only for
those that measure no time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SECONDS = {"noise": 90, "moves": 100, "head": 45, "step": 75, "trl": 75, "beside": 110, "experts": 60}
_IN_CHILD = "--in-this-process"


def questions(shape: str, model: str | None) -> dict[str, Callable[[Any], Iterator[Row]]]:
    """Return the generator of each question's figures, by name."""
    from benchmarks.gpu import precision, speed

    tiny = shape == "tiny"
    sources = [model] if model else ["tiny"] if tiny else ["smollm2", "1.5b"]

    def of_each(ask: Callable[[str, Any], Iterator[Row]], device: Any) -> Iterator[Row]:
        for source in sources:
            yield from ask(source, device)

    return {
        "noise": partial(of_each, precision.noise),
        "moves": lambda device: precision.moves(sources[0], device),
        "head": lambda device: precision.head("tiny" if tiny else "1.5b", device),
        "step": partial(speed.step, shape),
        "trl": partial(speed.trl, shape),
        "beside": partial(speed.beside, shape),
        "experts": partial(speed.experts, "tiny-moe" if tiny else "30b-a3b"),
    }


def answer(names: list[str], given: argparse.Namespace) -> None:
    """Answer questions in this process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    device = torch.device(given.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    if device.type == "cpu":
        torch.set_num_threads(1)  # on a busy machine two threads wait for each other in every operator of a tiny model
    transformers.logging.disable_progress_bar()
    for name in names:
        about = {"question": name, "device": machine, "torch": torch.__version__}
        began = time.perf_counter()
        for figures in questions(given.shape, given.model)[name](device):
            line = json.dumps({**about, **figures, "at_seconds": round(time.perf_counter() - began, 1)})
            with given.out.open("a") as file:
                file.write(line + "\n")
            print(json.dumps({"question": name, **figures}), flush=True)


def ask(names: list[str], given: argparse.Namespace) -> list[str]:
    """Answer each question in a process of its own; return the names of those that failed."""
    end = time.monotonic() + given.seconds
    failed, running = [], []
    for name in names:
        left = end - time.monotonic()
        if left < 5:
            failed.append(f"{name} (no time left)")
            continue
        limit = min(left, SECONDS[name] if given.device == "cuda" else left)
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.measure", name, *given.passed, _IN_CHILD])
        running.append((name, process, time.monotonic() + limit))
        if not given.at_once:
            failed += waited(running)
            running = []
    return failed + waited(running)


def waited(running: list[tuple[str, subprocess.Popen[bytes], float]]) -> list[str]:
    """Wait for processes until their time ends; return the names of those that failed."""
    failed = []
    for name, process, end in running:
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            failed.append(f"{name} (time limit)")
            continue
        if code:
            failed.append(f"{name} (exit code {code})")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="QUESTION", help=f"{', '.join(SECONDS)}; all of them by default")
    parser.add_argument("--shape", choices=["7b", "1.5b", "tiny"], default="7b")
    parser.add_argument("--model", help="a folder, for noise and moves")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=420.0, help="of all questions")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "figures.jsonl")
    parser.add_argument("--at-once", action="store_true", help="ask all questions at the same time")
    parser.add_argument(_IN_CHILD, action="store_true", help="one process for all, without time limits")
    given = parser.parse_args()
    unknown = set(given.names) - SECONDS.keys()
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    if given.in_this_process:
        answer(given.names or list(SECONDS), given)
        return
    given.passed = ["--shape", given.shape, "--device", given.device, "--out", str(given.out)]
    given.passed += ["--model", given.model] if given.model else []
    failed = ask(given.names or list(SECONDS), given)
    if failed:
        sys.exit(f"no complete answer: {', '.join(failed)}; figures so far are in {given.out}")


if __name__ == "__main__":
    main()
