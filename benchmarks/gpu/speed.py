"""How fast the learner trains, and in how much memory: questions 4 to 7 of `benchmarks.gpu.measure`.

A step is the gradient of a round's rows and AdamW's step, timed between two synchronizations after a step that is not
timed. Rows are a group's: the members share their prompt, turns alternate between answers, which are trained, and tool
results; lengths are lognormal. MFU counts every token of every row (`shapes.step_flops`) over the vendor's peak for
dense bf16, so that shared prefixes raise it. Peak memory is torch's, weights included.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.decoding import decode
from benchmarks.gpu.precision import RANK, learner_settings, peak_gib, reset_peak, synchronize
from ratchet.trainer.errors import OutOfMemory
from ratchet.trainer.learner import gpu_memory, lora
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.planning.memory import LearnerOption, learner_memory
from ratchet.trainer.planning.model_shape import read_shape
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import process_settings_of
from tests.harness.trainer.gpu_shapes import (
    MEMBERS,
    build_model,
    config_of,
    group_rows,
    model_in_memory,
    peak_flops,
    step_flops,
)

Row = dict[str, Any]

BUDGET = 8192  # tokens of a micro-batch, the default
_SHARE = 0.5  # of the learner, at most


def load_of(shape: str) -> tuple[int, int]:
    """Return the tokens of a step and its max_length row."""
    return {"7b": (65536, 16384), "1.5b": (65536, 16384), "30b-a3b": (32768, 4096)}.get(shape, (512, 64))


def rows_of(shape: str) -> list[TokenRow]:
    """Return the rows of a shape's step."""
    return group_rows(config_of(shape).vocab_size, *load_of(shape))


def counted(config: Any, rows: Sequence[TokenRow], seconds: float, device: torch.device) -> Row:
    """Return the figures of a timed step."""
    lengths, trained = [len(row.ids) for row in rows], sum(row.tokens_trained for row in rows)
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "rows": len(rows), "tokens": sum(lengths), "max_length": max(lengths), "trained": trained,
        "seconds": seconds, "tokens_per_second": sum(lengths) / seconds,
        "mfu": sum(step_flops(config, lengths, trained)) / seconds / peak if peak else None,
        "peak_gib": peak_gib(device),
    }  # fmt: skip


def measured(shape: str, device: torch.device, rows: Sequence[TokenRow], **settings: Any) -> Row:
    """Return the figures of a timed step of a new learner with random weights, and the tokens that it forwarded."""
    free(device)  # of the learner before
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with model_in_memory(build_model(shape, device, dtype=dtype)):
        trainer = lora.build("random weights", learner_settings("auto", token_budget=BUDGET, **settings))
    timed_step(trainer, rows[:MEMBERS], device)
    seconds, forwarded = timed_step(trainer, rows, device)
    parameters = sum(parameter.numel() for parameter in trainer.lora_parameters().values())
    figures = counted(config_of(shape), rows, seconds, device)
    return {**figures, "forwarded": forwarded, "adapter": parameters}


def timed_step(trainer: Any, rows: Sequence[TokenRow], device: torch.device) -> tuple[float, int]:
    """Return the seconds of a step and the tokens that it forwarded."""
    reset_peak(device)
    began = time.perf_counter()
    taken = trainer.optimizer_step(trainer.prepare(rows, only_step=True))
    synchronize(device)
    return time.perf_counter() - began, taken.tokens_forwarded


def plan_gib(shape: str, max_length: int, *, checkpointing: bool) -> float:
    """Return the plan's figure without its allowance for what torch does not count."""
    option = LearnerOption(gradient_checkpointing=checkpointing)
    planned = learner_memory(read_shape(config_of(shape).to_dict()), option, max(max_length, BUDGET), rank=RANK)
    return (planned.total - planned.runtime) / 2**30


def step(shape: str, device: torch.device) -> Iterator[Row]:
    """Question 4: a realistic step, with shared prefixes and without, and with everything recomputed."""
    rows = rows_of(shape)
    plans = {f"plan_gib_{name}": plan_gib(shape, max(len(r.ids) for r in rows), checkpointing=on)
             for name, on in (("recomputed", True), ("kept", False))}  # fmt: skip
    yield {"shape": shape, **plans}
    cases: list[tuple[str, Row]] = [
        ("shared prefixes", {}),
        ("separate rows", {"share_prefixes": False}),
        ("shared prefixes, all recomputed", {"gradient_checkpointing": True}),
    ]
    for name, settings in cases:
        yield {"case": name, **measured(shape, device, rows, **settings)}


def trl(shape: str, device: torch.device) -> Iterator[Row]:
    """Question 7: the same rows through TRL's own loss, in micro-batches of the same size; dapo, one AdamW step."""
    rows = rows_of(shape)
    config = config_of(shape)
    batches = micro_batches([row for row in rows if len(row.ids) <= BUDGET], BUDGET)
    kept = [row for batch in batches for row in batch]
    for recomputed, budget in ((False, BUDGET), (False, BUDGET // 2), (True, BUDGET)):
        trainer = trl_trainer(shape, device, recomputed)
        batches = micro_batches([row for row in kept if len(row.ids) <= budget], budget)
        used = [row for batch in batches for row in batch]
        name = {"case": "TRL's loss", "recomputed": recomputed, "token_budget": budget}
        try:
            trl_step(trainer, batches[-1:], device)
            reset_peak(device)
            began = time.perf_counter()
            trl_step(trainer, batches, device)
            yield {**name, **counted(config, used, time.perf_counter() - began, device)}
            done = True
        except torch.OutOfMemoryError as error:
            yield {**name, "missing": str(error).splitlines()[0][:120]}
            done = False
        del trainer
        free(device)
        if done and len(used) == len(kept):
            yield {"case": "the learner on the same rows", **measured(shape, device, kept)}
            return


def trl_trainer(shape: str, device: torch.device, recomputed: bool) -> Any:
    """Return TRL's GRPOTrainer on a model with random weights; its dataset and reward are not used."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from tests.harness.trainer.tiny import build_tokenizer

    class OfflineGRPOTrainer(GRPOTrainer):
        def _send_telemetry(self) -> None:
            """Send nothing."""

    arguments = GRPOConfig(
        tempfile.mkdtemp(), loss_type="dapo", learning_rate=1e-4, per_device_train_batch_size=2, num_generations=2,
        gradient_checkpointing=recomputed, bf16=device.type == "cuda", use_cpu=device.type == "cpu",
        disable_dropout=True, report_to="none", save_strategy="no", beta=0.0,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainer: Any = OfflineGRPOTrainer(
        model=build_model(shape, device, dtype=dtype),
        args=arguments,
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        train_dataset=Dataset.from_dict({"prompt": ["-"] * arguments.generation_batch_size}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.train()
    return trainer


def trl_step(trainer: Any, batches: Sequence[Sequence[TokenRow]], device: torch.device) -> None:
    """Take one step on TRL's loss."""
    units = float(sum(row.tokens_trained for batch in batches for row in batch))
    for batch in batches:
        width = max(len(row.ids) for row in batch) - 1

        def padded(values: Sequence[Sequence[float]], width: int = width) -> torch.Tensor:
            return torch.tensor([[*one, *(0,) * (width - len(one))] for one in values], device=device)

        inputs = {
            "prompt_ids": torch.tensor([row.ids[:1] for row in batch], device=device),
            "prompt_mask": torch.ones(len(batch), 1, dtype=torch.long, device=device),
            "completion_ids": padded([row.ids[1:] for row in batch]),
            "completion_mask": padded([(1,) * (len(row.ids) - 1) for row in batch]),
            "tool_mask": padded([row.mask[1:] for row in batch]),
            "advantages": torch.tensor([row.advantage for row in batch], device=device),
            "num_items_in_batch": torch.tensor(units, device=device),
        }
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer._metrics["train"].clear()
    torch.nn.utils.clip_grad_norm_([p for p in trainer.model.parameters() if p.requires_grad], 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    synchronize(device)


def micro_batches(rows: Sequence[TokenRow], budget: int) -> list[list[TokenRow]]:
    """Return rows in micro-batches of at most `budget` padded tokens, shortest first."""
    batches: list[list[TokenRow]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batches and (len(batches[-1]) + 1) * len(row.ids) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def beside(shape: str, device: torch.device) -> Iterator[Row]:
    """Question 5: the step while another process holds memory and decodes; a round without memory, and the next one."""
    rows = rows_of(shape)
    context = multiprocessing.get_context("spawn")
    stop, ready, passes = context.Event(), context.Event(), context.Value("l", 0)
    other = context.Process(target=decode, args=(str(device), stop, ready, passes), daemon=True)
    settings = learner_settings("auto", token_budget=BUDGET)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with model_in_memory(build_model(shape, device, dtype=dtype)):
        process = replace(process_settings_of(settings, None), gpu_memory_utilization=_SHARE)
        host = LearnerHost("random weights", process)
    host.open("agent", settings, None)
    host.train_round("agent", rows[:MEMBERS])
    alone = timed_round(host, rows, device)
    yield {"case": "alone", **alone}
    free(device)
    other.start()
    try:
        if not ready.wait(60):
            yield {"case": "beside", "missing": "the other process did not start"}
            return
        before, began = passes.value, time.perf_counter()
        time.sleep(2.0 if device.type == "cuda" else 0.2)
        undisturbed = (passes.value - before) / (time.perf_counter() - began)
        before, began = passes.value, time.perf_counter()
        row = timed_round(host, rows, device)
        rate = (passes.value - before) / (time.perf_counter() - began)
        yield {"case": "beside", **row, "slower": row["seconds"] / alone["seconds"],
               "other_passes_per_second": rate, "other_alone": undisturbed}  # fmt: skip
        yield {"case": "no memory", **without_memory(host, rows, device)}
        yield {"case": "the next round", **timed_round(host, rows, device)}
    finally:
        stop.set()
        other.join(10)
        other.kill()


def timed_round(host: LearnerHost, rows: Sequence[TokenRow], device: torch.device) -> Row:
    """Return the figures of one round of a learner's agent."""
    reset_peak(device)
    began = time.perf_counter()
    report = host.train_round("agent", rows)
    synchronize(device)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(len(row.ids) for row in rows), "k3": report.approx_kl,
            "peak_gib": peak_gib(device), "free_gib": free_gib(device)}  # fmt: skip


def without_memory(host: LearnerHost, rows: Sequence[TokenRow], device: torch.device) -> Row:
    """Take all but half a GiB of the free memory and train a round; return what came of it."""
    if device.type != "cuda":
        return {"missing": "needs a GPU"}
    free(device)
    left = 2**29
    taken = torch.empty(max(0, gpu_memory.free_bytes() - left), dtype=torch.uint8, device=device)
    try:
        host.train_round("agent", rows)
        return {"recognised": False, "error": "none: the round needed no more than half a GiB"}
    except OutOfMemory as error:
        return {"recognised": True, "error": str(error)[:200], "cause": str(error.__cause__)[:120]}
    except Exception as error:  # noqa: BLE001  which error came is the figure
        return {"recognised": False, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        del taken
        free(device)


def experts(shape: str, device: torch.device) -> Iterator[Row]:
    """Question 6: adapters on experts and attention, and on attention only."""
    rows = rows_of(shape)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for name, targets in (("all-linear", "all-linear"), ("attention only", attention)):
        figures = measured(shape, device, rows, target_modules=targets)
        yield {"case": name, "shape": shape, "layers": config_of(shape).num_hidden_layers, **figures}


def free(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_gib(device: torch.device) -> float | None:
    """Return the free memory of the GPU; None on a CPU."""
    return torch.cuda.mem_get_info()[0] / 2**30 if device.type == "cuda" else None
