"""A LoRA step of a 7B-shaped model on one GPU: tokens per second, MFU and peak memory, beside TRL's SFTTrainer.

    bash benchmarks/gpu_wheels.sh wheels          # with a network: what a machine with torch and transformers lacks
    pip install --no-index --no-deps --target carried/site-packages wheels/*.whl             # without one
    export PYTHONPATH=carried/site-packages       # dill, below datasets, goes by the folder's name
    python -m benchmarks.gpu [--json] [--profile]

One command of under 9 minutes (`--seconds`), on torch 2.11 or later and transformers 5.17 or later. The model has the
shape of Qwen2.5-7B and random weights, made on the GPU in bf16; the adapter is fp32, rank 16, on all linear layers. A
step is the gradient of rows of one length, 32,768 tokens or one row if that is longer, all tokens trained, and AdamW's
step. It is timed between two synchronizations after a step that is not timed, except for rows of over 100,000 tokens,
which follow the shorter ones directly. The learner computes dapo's loss with its own settings of memory (`auto`); TRL
computes cross-entropy with its defaults (gradient checkpointing) on the same rows, one at a time. Both run in one
process, one after the other, each with a model of its own.

MFU is (4 N tokens + attention) / seconds / the peak that the GPU's vendor states for dense bf16. N are the weights of
all linear layers, with the LM head: 2 N for the forward pass and 2 N for the gradient of the activations, because
frozen weights have none. Attention is that of causal rows, 6 L^2 heads head_dim a layer, forward and backward. What is
recomputed is not counted, nor is the adapter (about 1%). A row of `attention` is the same for the kernel alone.

Peak memory is torch's, weights included. `auto` uses the memory that there is, so the plan's formula stands beside the
learner with every layer recomputed (`ratchet, checkpointed`). `ratchet, fsdp2` is the learner with its model sharded,
in a group of one process: what gathering and resharding cost without a second GPU; it has no longest row. Every figure
but the plan's is measured in the run; what there was no time or no memory for is named. On a CPU (`--shape tiny
--device cpu`, which the tests run) there is no peak and no MFU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import TrainerCallback

from ratchet.trainer.learner import base_model, lora, process_group
from ratchet.trainer.planning.gpu_memory import LearnerOption, learner_memory
from ratchet.trainer.planning.model_shape import read_shape
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.gpu_figures import (
    LENGTHS,
    GpuFigures,
    build_model,
    config_of,
    line,
    peak_flops,
    rows_of,
    speedups,
    step_flops,
)
from tests.harness.trainer.tiny import build_tokenizer

UNTIMED_UP_TO = 100_000  # longer rows get no warm-up step of their own
RANK = 16
RATE = 1e-5
NO_TIME = "no time left"


class Deadline:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def build_rows(shape: str, length: int) -> list[TokenRow]:
    """Return the rows of one step: random tokens, all of them trained but the first."""
    dice = random.Random(length)
    vocabulary = config_of(shape).vocab_size
    count = rows_of(shape, length)
    mask, logprobs = (0, *(1,) * (length - 1)), (0.0, *(-12.0,) * (length - 1))
    return [
        TokenRow(
            f"t{row}", tuple(dice.randrange(vocabulary) for _ in range(length)), mask, logprobs, 1.0 - 2 * (row % 2)
        )
        for row in range(count)
    ]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(what: str, shape: str, length: int, seconds: float, device: torch.device) -> GpuFigures:
    """Return the figures of one timed step."""
    rows = rows_of(shape, length)
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return GpuFigures(
        what,
        length,
        rows,
        seconds=seconds,
        tokens_per_second=rows * length / seconds,
        mfu=sum(step_flops(shape, rows, length)) / seconds / peak if peak else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    )


@contextmanager
def model_in_memory(shape: str, device: torch.device) -> Iterator[None]:
    """Let the learner train a model made here in place of one read from files."""
    load = base_model.load
    base_model.load = lambda *_, **__: (build_model(shape, device), build_tokenizer())
    try:
        yield
    finally:
        base_model.load = load


@contextmanager
def learner(
    shape: str, device: torch.device, checkpointing: bool | Literal["auto"], sharding: str = "none"
) -> Iterator[Callable[[int], None]]:
    """Return the learner's step on the rows of a length."""
    with tempfile.TemporaryDirectory() as folder, model_in_memory(shape, device):
        settings = LearnerSettings(
            lora_r=RANK,
            lora_alpha=2 * RANK,
            learning_rate=RATE,
            sequence_mask_threshold=None,
            token_budget=8192,
            gradient_checkpointing=checkpointing,
        )
        trainer = lora.build("random weights", settings, Path(folder), sharding)

        def step(length: int) -> None:
            taken = trainer.optimizer_step(trainer.prepare(build_rows(shape, length), only_step=True))
            assert taken.applied

        yield step


def planned_gib(shape: str, length: int) -> float:
    """Return the plan's formula for a checkpointed step, without the allowance for what torch does not count."""
    planned = learner_memory(
        read_shape(config_of(shape).to_dict()), LearnerOption(gradient_checkpointing=True), length, rank=RANK
    )
    return (planned.total - planned.runtime) / 2**30


def run_checkpointed(shape: str, device: torch.device, deadline: Deadline) -> Iterator[GpuFigures]:
    """Measure the learner with every layer recomputed, beside the plan's formula for that."""
    with learner(shape, device, True) as step:
        for length in LENGTHS[shape]:
            if length <= UNTIMED_UP_TO:
                step(length)
            case = timed("ratchet, checkpointed", shape, length, device, deadline, partial(step, length))
            yield replace(case, plan_gib=planned_gib(shape, length) if case.peak_gib else None)


def run_learner(shape: str, device: torch.device, deadline: Deadline, profile: bool) -> Iterator[GpuFigures]:
    """Measure the learner on rows of each length."""
    with learner(shape, device, "auto") as step:
        for length in LENGTHS[shape]:
            if length <= UNTIMED_UP_TO:
                step(length)
            yield timed("ratchet", shape, length, device, deadline, partial(step, length))
        if profile:
            print(profiled(device, lambda: step(LENGTHS[shape][0])))


def run_sharded(shape: str, device: torch.device, deadline: Deadline) -> Iterator[GpuFigures]:
    """Measure the learner with a sharded model, in a group of one process."""
    lengths = [length for length in LENGTHS[shape] if length <= UNTIMED_UP_TO][:2]
    if deadline.left() < 0:
        yield from (GpuFigures("ratchet, fsdp2", length, rows_of(shape, length), missing=NO_TIME) for length in lengths)
        return
    process_group.join(alone=True)
    try:
        with learner(shape, device, "auto", "fsdp2") as step:
            for length in lengths:
                step(length)
                yield timed("ratchet, fsdp2", shape, length, device, deadline, partial(step, length))
    finally:
        torch.distributed.destroy_process_group()


def timed(
    what: str, shape: str, length: int, device: torch.device, deadline: Deadline, step: Callable[[], None]
) -> GpuFigures:
    """Time one step; without memory or time for it, say so."""
    rows = rows_of(shape, length)
    if deadline.left() < 0:
        return GpuFigures(what, length, rows, missing=NO_TIME)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize(device)
    began = time.perf_counter()
    try:
        step()
    except torch.OutOfMemoryError:
        return GpuFigures(what, length, rows, missing="out of memory")
    synchronize(device)
    return measured(what, shape, length, time.perf_counter() - began, device)


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Times the last step of a Trainer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self.seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(self._device)
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(self._device)
        self.seconds = time.perf_counter() - self._began


def run_trl(shape: str, device: torch.device, deadline: Deadline) -> Iterator[GpuFigures]:
    """Measure TRL's SFTTrainer with its defaults on the same rows."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model = build_model(shape, device)
    for length in LENGTHS[shape]:
        rows = [list(row.ids) for row in build_rows(shape, length)]
        if deadline.left() < 0:
            yield GpuFigures("trl sft", length, len(rows), missing=NO_TIME)
            continue
        clock = StepClock(device)
        steps = 2 if length <= UNTIMED_UP_TO else 1
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=len(rows),
                max_steps=steps,
                max_length=None,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataset_num_proc=None,
            )
            adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            trainer: Any = SFTTrainer(
                model,
                arguments,
                train_dataset=Dataset.from_dict({"input_ids": rows * steps}),
                processing_class=build_tokenizer(),
                peft_config=adapter,
                callbacks=[clock],
            )
            try:
                trainer.train()
                yield measured("trl sft", shape, length, clock.seconds, device)
            except torch.OutOfMemoryError:
                yield GpuFigures("trl sft", length, len(rows), missing="out of memory")
            model = trainer.model.unload()
            del trainer
            free(device)


def run_attention(shape: str, device: torch.device) -> Iterator[GpuFigures]:
    """Measure torch's attention kernels alone, one layer forward and backward; the step uses the first by default."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = config_of(shape)
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for length in LENGTHS[shape][:2]:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            query, key, value = (
                torch.randn(1, heads, length, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            what = f"attention {backend.name.split('_')[0].lower()}"
            try:
                with sdpa_kernel(backend):
                    for _ in range(2):
                        synchronize(device)
                        began = time.perf_counter()
                        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
                        torch.autograd.backward(out, torch.ones_like(out))
                        synchronize(device)
                        seconds = time.perf_counter() - began
            except RuntimeError as error:
                yield GpuFigures(what, length, 1, missing=str(error).splitlines()[0])
                continue
            flops = step_flops(shape, 1, length)[1] / config.num_hidden_layers
            peak = peak_flops(torch.cuda.get_device_name())
            yield GpuFigures(what, length, 1, seconds=seconds, mfu=flops / seconds / peak if peak else None)


def profiled(device: torch.device, step: Callable[[], None]) -> str:
    """Return the kernels of a step by their time."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds) as recorded:
        step()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=80))


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(shape: str, device: torch.device, seconds: float, profile: bool = False) -> list[GpuFigures]:
    """Return the figures of all cases, and print each as it comes."""
    deadline = Deadline(seconds)
    cases: list[GpuFigures] = []
    print(
        "| what | rows x tokens | seconds | tokens/s | MFU | peak GiB | plan GiB |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    runs: list[Callable[[], Iterator[GpuFigures]]] = [
        partial(run_learner, shape, device, deadline, profile),
        partial(run_trl, shape, device, deadline),
        partial(run_sharded, shape, device, deadline),
    ]
    if device.type == "cuda":
        runs.append(partial(run_checkpointed, shape, device, deadline))
        runs.append(partial(run_attention, shape, device))
    for run in runs:
        for case in run():
            cases.append(case)
            print(line(case), flush=True)
        free(device)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=sorted(LENGTHS), default="7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins later")
    parser.add_argument("--profile", action="store_true", help="also the kernels of one step by time")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    given = parser.parse_args()
    device = torch.device(given.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        print(f"{name}, {versions}")
        cases = measure(given.shape, device, given.seconds, given.profile)
        print(*speedups(cases), sep="\n")
    if given.json:
        print(json.dumps({"device": name, "versions": versions, "cases": [asdict(case) for case in cases]}))


if __name__ == "__main__":
    main()
