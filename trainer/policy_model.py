"""Loads the base model and its tokenizer for training.

Promises that a wrong path and a folder that is no model are told apart, with the remedy, before any training begins. A
folder is read as it is; a hub name is fetched by the hub's client, which honours HF_HUB_OFFLINE and HF_TOKEN as the
user set them. Imports transformers; not imported before a learner is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from trainer.errors import ModelNotFound, NotAModel


def load(model: str, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and tokenizer of a folder or hub name.

    Raises ModelNotFound or NotAModel.
    """
    is_folder = _is_folder(model)
    source = str(Path(model).expanduser()) if is_folder else model
    transformers_logging.disable_progress_bar()
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _why_not(model, is_folder, error) from error
    return network, tokenizer


def _is_folder(model: str) -> bool:
    """Whether `model` means a folder; raises when it means one that is not there or plainly no model."""
    folder = Path(model).expanduser()
    if not folder.exists():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ModelNotFound(f"base model folder {folder} does not exist: give a folder or a hub name (owner/model)")
        return False
    if not (folder / "config.json").is_file():
        raise NotAModel(
            f"{folder} is not a model: it has no config.json; give the folder that holds config.json, "
            "the safetensors weights and the tokenizer"
        )
    return True


def _why_not(model: str, is_folder: bool, error: Exception) -> ModelNotFound | NotAModel:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if is_folder:
        return NotAModel(
            f"{model} cannot be read as a causal language model with its tokenizer: {reason}; "
            "check that config.json, the weights and the tokenizer files are all there and whole"
        )
    return ModelNotFound(
        f"base model {model} is neither a folder nor a hub model that can be reached: {reason}; "
        "check the name, HF_TOKEN and HF_HUB_OFFLINE"
    )
