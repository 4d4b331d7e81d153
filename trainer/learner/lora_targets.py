"""Which layers of a base model get an adapter: `target_modules` and `exclude_modules` as PEFT's configuration.

`all-linear` means the linear layers of the text decoder and the experts of a mixture of experts. It leaves out the LM
head, routers, whose choice a small change can turn over for every token, and everything outside of the decoder: vision
and audio towers and their projectors, which text never reaches. PEFT's own `all-linear` includes those, and experts of
some families only. transformers stacks experts in parameters of three dimensions; next to them the linear layers with
the names of an expert's (dense layers, shared experts) are left out, because PEFT takes those names for the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig

from ratchet.trainer.settings.learner_settings import LearnerSettings

ALL_LINEAR = "all-linear"
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def lora_config(model: Any, settings: LearnerSettings) -> LoraConfig:
    """Return PEFT's configuration of a new adapter for the model."""
    modules: Any = settings.target_modules
    excluded = [*settings.exclude_modules]
    experts = sorted({name for name, _ in stacked_experts(model)})
    if modules == ALL_LINEAR:
        modules = sorted(name for name in _linear_layers(model, bool(experts)) if not _ends_with(name, excluded))
        experts = [name for name in experts if not _ends_with(name, excluded)]
    elif not isinstance(modules, str):
        named = set(modules)
        experts = experts if named & _EXPERT_LAYERS else []  # vLLM serves all layers of an expert or none
        modules = sorted(named - _EXPERT_LAYERS) if experts else sorted(named)
    else:
        experts = []
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        target_modules=modules,
        target_parameters=experts or None,
        exclude_modules=None if settings.target_modules == ALL_LINEAR else excluded or None,
        task_type="CAUSAL_LM",
    )


def stacked_experts(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the stacked weights of experts under the ends of their names, such as experts.gate_up_proj."""
    for name, parameter in model.get_decoder().named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner.split(".")[-1] == "experts" and parameter.ndim == 3:
            yield f"experts.{leaf}", parameter


def _linear_layers(model: Any, mixture: bool) -> Iterator[str]:
    """Yield the names of the decoder's linear layers."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or id(module) not in inside or module is head:
            continue
        parts = name.split(".")
        if _ROUTERS.isdisjoint(parts) and not (mixture and parts[-1] in _EXPERT_LAYERS):
            yield name


def _ends_with(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)
