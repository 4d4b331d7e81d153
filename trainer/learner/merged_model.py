"""A version as a folder that others load: its adapter merged into the base model, or the adapter alone; with its card.

Promises: the folder is whole or not there at all; the merged model's logits are those of base and adapter, up to the
rounding of the numbers that the base model's weights are kept in. Torch is imported where a model is merged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged

CARD = "README.md"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def export_merged(
    base_model: str, adapter: Path, folder: Path, card: str, dtype: Literal["auto", "float32"] = "auto"
) -> None:
    """Write base model and adapter as one model in Hugging Face's form, tokenizer and chat template included.

    `dtype`: the numbers that it is kept in; `auto` are those of the base model, whose rounding the adapter then shares.

    Raises ModelNotFound, NotAModel, CheckpointDamaged, CheckpointExists, CheckpointUnwritable.
    """
    _check(adapter)

    def write(inner: Path) -> None:
        model, tokenizer = _merged(base_model, adapter, dtype)
        model.save_pretrained(inner)
        tokenizer.save_pretrained(inner)
        (inner / CARD).write_text(card)

    checkpoint.write_atomically(folder, write)


def export_adapter(adapter: Path, folder: Path, card: str) -> None:
    """Copy the adapter, as peft and vLLM load it. Raises CheckpointDamaged, CheckpointExists, CheckpointUnwritable."""
    _check(adapter)

    def write(inner: Path) -> None:
        for name in _ADAPTER:
            shutil.copyfile(adapter / name, inner / name)
        (inner / CARD).write_text(card)

    checkpoint.write_atomically(folder, write)


def _check(adapter: Path) -> None:
    if not checkpoint.complete(adapter):
        raise CheckpointDamaged(f"{adapter} is missing or not whole: its adapter cannot be exported")


def _merged(base_model: str, adapter: Path, dtype: Literal["auto", "float32"]) -> tuple[Any, Any]:
    import torch
    from peft import PeftModel

    from ratchet.trainer.learner import base_model as policy_model

    base, tokenizer = policy_model.load(base_model, dtype="auto" if dtype == "auto" else torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter))
    return model.merge_and_unload(safe_merge=True), tokenizer
