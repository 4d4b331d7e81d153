"""Exports a version as a folder, with its card: the adapter merged into the base model, or the adapter alone.

The folder is complete or absent. The merged model's logits are those of base model and adapter, up to the rounding of
its dtype. Torch is imported by the merge only.
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
    base_model: str, adapter: Path, folder: Path, card: str | None, dtype: Literal["auto", "float32"] = "auto"
) -> None:
    """Write base model and adapter as one Hugging Face model with tokenizer and chat template.

    `dtype` is that of the written weights; `auto` takes the base model's, which also rounds the adapter's changes.

    Raises ModelError, CheckpointDamaged, CheckpointError.
    """
    _check(adapter)

    def write(inner: Path) -> None:
        model, tokenizer = _merged(base_model, adapter, dtype)
        model.save_pretrained(inner)
        tokenizer.save_pretrained(inner)
        _write_card(inner, card)

    checkpoint.write_atomically(folder, write)


def export_adapter(adapter: Path, folder: Path, card: str | None) -> None:
    """Copy the adapter, as peft and vLLM load it. Raises CheckpointDamaged, CheckpointError."""
    _check(adapter)

    def write(inner: Path) -> None:
        for name in _ADAPTER:
            shutil.copyfile(adapter / name, inner / name)
        _write_card(inner, card)

    checkpoint.write_atomically(folder, write)


def _write_card(folder: Path, card: str | None) -> None:
    if card is not None:
        (folder / CARD).write_text(card)


def _check(adapter: Path) -> None:
    if not checkpoint.complete(adapter):
        raise CheckpointDamaged(f"{adapter} is missing or incomplete: its adapter cannot be exported")


def _merged(base_model: str, adapter: Path, dtype: Literal["auto", "float32"]) -> tuple[Any, Any]:
    import torch
    from peft import PeftModel

    from ratchet.trainer.learner.lora import load

    base, tokenizer = load(base_model, dtype="auto" if dtype == "auto" else torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter))
    return model.merge_and_unload(safe_merge=True), tokenizer
