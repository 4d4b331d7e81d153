"""Loads the tokenizer of a base model without its weights."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ratchet.trainer.errors import ModelError


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name. Raises ModelError."""
    local = is_folder(model)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(Path(model).expanduser()) if local else model
        )
    except (OSError, ValueError, KeyError) as error:
        raise why_not_loaded(model, local, error) from error
    return tokenizer


def is_folder(model: str) -> bool:
    """Return whether `model` is a folder. Raises ModelError if the folder is missing or no model."""
    folder = Path(model).expanduser()
    if not folder.exists():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ModelError(f"base model folder {folder} does not exist: give a folder or a hub name (owner/model)")
        return False
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model: it has no config.json; give the folder with config.json, the "
            "safetensors weights and the tokenizer"
        )
    return True


def why_not_loaded(model: str, is_folder: bool, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if found := re.search(r"Unrecognized configuration class .*\.(\w+)Config", reason):
        return ModelError(
            f"{model} is a {found[1]} model, of which transformers loads no causal language model: it cannot be "
            "trained; use a text model (docs/training.md lists the families)"
        )
    if is_folder:
        return ModelError(
            f"{model} cannot be read as a causal language model with its tokenizer: {reason}; "
            "check that config.json, the weights and the tokenizer files are present and complete"
        )
    return ModelError(
        f"base model {model} is neither a folder nor a reachable hub model: {reason}; "
        "check the name, HF_TOKEN and HF_HUB_OFFLINE"
    )
