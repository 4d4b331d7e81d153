"""Loads the base model and its tokenizer for training.

The hub's client downloads a hub name; it respects HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from ratchet.store.errors import install_hint
from ratchet.trainer.errors import SettingError
from ratchet.trainer.rows.tokenizer import is_folder, why_not_loaded


def load(
    model: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    quantization: str = "none",
    parts: int = 1,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the causal language model and tokenizer of a folder or hub name; `auto` is the dtype of its files.

    The weights are read straight onto the `device`, tensor by tensor; None: onto the CPU. With `parts`, each of that
    many processes reads its part of every tensor. Raises ModelError, or SettingError if the
    quantization is not installed.
    """
    how: dict[str, Any] = {"quantization_config": _nf4(dtype)} if quantization == "nf4" else {}
    if parts > 1:
        how["distributed_config"] = DistributedConfig(fsdp_size=parts)
    elif device is not None:
        how["device_map"] = {"": device}
    local = is_folder(model)
    source = str(Path(model).expanduser()) if local else model
    transformers_logging.disable_progress_bar()
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **how)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise why_not_loaded(model, local, error) from error
    return network, tokenizer


def _nf4(dtype: torch.dtype | Literal["auto"]) -> Any:
    """Return four-bit NF4 quantization, computed in `dtype`: Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314)."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as absent:
        raise SettingError(
            f"learner setting quantization is 'nf4', which needs bitsandbytes: {install_hint('qlora')}, "
            "or set quantization to none"
        ) from absent
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
