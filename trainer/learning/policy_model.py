"""Loads the base model and its tokenizer for training.

Promises that a wrong path and a folder that is no model are told apart, with the remedy, before any training begins. A
folder is read as it is; a hub name is fetched by the hub's client, which honours HF_HUB_OFFLINE and HF_TOKEN as the
user set them. Imports transformers; not imported before a learner is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ratchet.trainer.errors import ModelNotFound, NotAModel, SettingError


def load(
    model: str, *, dtype: torch.dtype | Literal["auto"], quantization: str = "none"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and tokenizer of a folder or hub name; `auto`: in the numbers that it is kept in.

    Raises ModelNotFound or NotAModel, or SettingError where the quantization is not installed.
    """
    quantized = {"quantization_config": _nf4(dtype)} if quantization == "nf4" else {}
    is_folder = _is_folder(model)
    source = str(Path(model).expanduser()) if is_folder else model
    transformers_logging.disable_progress_bar()
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **quantized)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _why_not(model, is_folder, error) from error
    return network, tokenizer


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer alone of a folder or hub name. Raises ModelNotFound or NotAModel."""
    is_folder = _is_folder(model)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(Path(model).expanduser()) if is_folder else model
        )
    except (OSError, ValueError, KeyError) as error:
        raise _why_not(model, is_folder, error) from error
    return tokenizer


def _nf4(dtype: torch.dtype | Literal["auto"]) -> Any:
    """Four bits a weight in blocks, computed in `dtype`: Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314)."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as absent:
        raise SettingError(
            "learner setting quantization is 'nf4', which needs bitsandbytes: install the extra `qlora` "
            "(pip install -e '.[qlora]'), or set quantization to none"
        ) from absent
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


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
