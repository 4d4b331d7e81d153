"""`ratchet plan`: which settings fit which GPUs, by formula, before anything is loaded."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import show
from ratchet.trainer.settings.learner_settings import MAX_SERVABLE_RANK

if TYPE_CHECKING:
    from ratchet.trainer.planning.plan import OptionFit, Plan

_GIB = 2**30
_MOST_GPUS = 512


def _gpus(text: str) -> tuple[int, int]:
    """Return number and bytes of GPUs of one kind, such as `8x80GB`. Raises BadParameter."""
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(\d+(?:\.\d+)?)\s*(?:[gG](?:i?[bB])?)?", text.strip())
    if match is None or not int(match[1] or 1) or not float(match[2]):
        raise click.BadParameter(f"{text!r} are no GPUs; write 8x80GB, or 24GB for one")
    if int(match[1] or 1) > _MOST_GPUS:
        raise click.BadParameter(f"{text!r}: a plan is for at most {_MOST_GPUS} GPUs")
    return int(match[1] or 1), round(float(match[2]) * _GIB)


@click.command()
@click.option("--base-model", required=True, metavar="PATH", help="Base model: a folder or a hub name.")
@click.option("--gpus", required=True, type=_gpus, metavar="NxGB", help="Number and memory of the GPUs: 8x80GB.")
@click.option(
    "--context",
    type=click.IntRange(min=1024),
    help="Tokens of the longest row, and of vLLM's context.  [default: 32768, or the model's own if it is less]",
)
@click.option(
    "--lora-r",
    type=click.IntRange(1, MAX_SERVABLE_RANK),
    default=16,
    show_default=True,
    help="Rank of the adapter, and the maximum that vLLM serves.",
)
@options.as_json
def plan(base_model: str, gpus: tuple[int, int], context: int | None, lora_r: int, **_: Any) -> None:
    """Plan the memory of vLLM and learner from a model's config.json, and print settings that fit.

    Loads no weights. All figures of GPU memory are for each GPU.

    \b
    Example:
      ratchet plan --base-model Qwen/Qwen2.5-7B-Instruct --gpus 8x80GB --context 32768
    """
    from ratchet.trainer.planning.model_shape import extends_context, read_config, read_shape
    from ratchet.trainer.planning.plan import PlanRequest, make_plan

    config = read_config(base_model)
    shape = read_shape(config)
    if context is not None and context > shape.max_positions and not extends_context(config):
        raise click.BadParameter(
            f"{context} tokens are more than the model's own {shape.max_positions} (max_position_embeddings), and vLLM "
            f"refuses that: plan for {shape.max_positions}, or set rope_scaling in the model's config.json",
            param_hint="'--context'",
        )
    number, size = gpus
    request = PlanRequest(number, size, context or min(32768, shape.max_positions), rank=lora_r)
    found = make_plan(shape, request)
    data = {"base_model": base_model, "concurrent_sequences": found.concurrent_sequences}
    settings = _settings(found, base_model)
    show(dataclasses.asdict(found) | data | {"settings": settings}, _lines(found, base_model, settings))


def _settings(found: Plan, base_model: str) -> dict[str, Any]:
    """Return the settings of a plan, as ratchet.yaml holds them."""
    option = found.learner.option
    vllm: dict[str, Any] = {"max_model_len": found.request.context}
    learner: dict[str, Any] = {"lora_r": found.request.rank}
    if not found.shared:
        vllm |= {"devices": _devices(0, found.vllm_gpus), "tensor_parallel_size": found.vllm_gpus}
        learner |= {"devices": _devices(found.vllm_gpus, found.learner_gpus), "num_processes": found.learner_gpus}
    vllm["gpu_memory_utilization"] = found.gpu_memory_utilization
    if option.sharding != "none":
        learner["sharding"] = option.sharding
    if option.activation_offload:
        learner["activation_offload"] = True
    if option.quantization != "none":
        learner["quantization"] = option.quantization
    learner |= {"token_budget": found.token_budget, "max_length": found.request.context}
    return {"base_model": base_model, "vllm": vllm, "learner": learner}


def _devices(first: int, number: int) -> str:
    return ",".join(str(index) for index in range(first, first + number))


def _lines(found: Plan, base_model: str, settings: dict[str, Any]) -> list[str]:
    import yaml

    request, serving, memory = found.request, found.serving, found.learner.memory
    where = "the same GPU" if found.shared else f"{found.learner_gpus} GPU(s)"
    return [
        f"{base_model}: {_count(found.parameters)} parameters, adapter of rank {request.rank}: "
        f"{_count(found.lora_parameters)}",
        f"vLLM on {found.vllm_gpus} GPU(s), {found.gpu_memory_utilization:.0%} of each: "
        + _parts(serving, ("weights", "adapters", "activations", "runtime"))
        + f", KV cache {found.kv_cache_bytes / _GIB:.1f} GiB: {found.concurrent_sequences} sequences of "
        f"{request.context} tokens",
        f"learner on {where}, {memory.total / _GIB:.1f} GiB of each: "
        + _parts(memory, ("weights", "adapter", "gradients", "optimizer", "activations", "runtime"))
        + (f"; {memory.host / _GIB:.1f} GiB of the host's memory" if memory.host else ""),
        "",
        f"learner's settings, with a row of {request.context} tokens:",
        *(_alternative(fit, "*" if fit.option == found.learner.option else " ") for fit in found.alternatives),
        "",
        "# ratchet.yaml",
        yaml.safe_dump(settings, sort_keys=False).rstrip(),
        "",
        "ratchet up --judge my_agent.judge:judge",
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _parts(memory: Any, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {getattr(memory, name) / _GIB:.1f}" for name in names) + " GiB"


def _alternative(fit: OptionFit, mark: str) -> str:
    rows = f"rows of up to {fit.max_row_length} tokens" if fit.max_row_length else "no row fits"
    verdict = "fits" if fit.fits else "does not fit"
    return f"{mark} {fit.option}: {fit.memory.total / _GIB:.1f} GiB, {verdict}; {rows}"
