"""The model that is trained: the base model and its tokenizer, with a new LoRA adapter.

The hub's client downloads a hub name; it respects HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from peft import get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from ratchet.store.errors import install_hint
from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.launch import processes
from ratchet.trainer.learner.learning_rate import LearningRateController
from ratchet.trainer.learner.lora_linear import lora_config
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.learner.process_group import attach_sharded
from ratchet.trainer.rows.tokenizer import is_folder, why_not_loaded
from ratchet.trainer.settings.learner_settings import AUTO, LearnerSettings


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


def build(base_model: str, settings: LearnerSettings, sharding: str = "none") -> RecordedGRPOTrainer:
    """Return the trainer of a new LoRA adapter, on the GPU if there is one, computed in `settings.dtype`.

    LoRA parameters are always fp32: with AdamW at 1e-5 most updates are below bf16's resolution and would be lost.
    Raises ModelError, or SettingError if the model lacks target_modules or the quantization is not
    installed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = base_dtype(settings)
    sharded = sharding == "fsdp2"
    model, tokenizer = load(
        base_model,
        dtype=dtype,
        quantization=settings.quantization,
        parts=processes() if sharded else 1,
        device=None if sharded else device,
    )
    choose_attention(model, settings.attn_implementation)
    rate_controller = LearningRateController(
        settings, model.num_parameters(), "bf16" if dtype == torch.bfloat16 else "fp32"
    )
    targets = settings.target_modules
    lora = lora_config(model, settings)
    try:
        set_seed(settings.seed)  # of the adapter's initial weights
        adapted = (
            attach_sharded(model, lora, settings.attn_implementation, device.type)
            if sharded
            else get_peft_model(model, lora)
        )
        return RecordedGRPOTrainer(adapted, tokenizer, settings, rate_controller, device, dtype)
    except ValueError as error:  # peft does not find the layers, or they include the head
        raise SettingError(
            f"learner setting target_modules is {targets!r}, which does not fit {base_model}: {error}; "
            'use "all-linear" or names of its linear layers, such as q_proj'
        ) from error


def base_dtype(settings: LearnerSettings) -> torch.dtype:
    """Return the number format of the base model's weights and of the computation; auto: what vLLM serves by default.

    bfloat16 on a GPU, and float32 on a CPU.
    """
    if settings.dtype == AUTO:
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
