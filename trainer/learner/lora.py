"""Creates the trainer of a base model with a new LoRA adapter."""

from __future__ import annotations

import torch
from peft import get_peft_model
from transformers import set_seed

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import base_model as policy_model
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.launch import processes
from ratchet.trainer.learner.learning_rate import LearningRateController
from ratchet.trainer.learner.lora_linear import lora_config
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.learner.process_group import attach_sharded
from ratchet.trainer.settings.learner_settings import AUTO, LearnerSettings


def build(base_model: str, settings: LearnerSettings, sharding: str = "none") -> RecordedGRPOTrainer:
    """Return the trainer of a new LoRA adapter, on the GPU if there is one, computed in `settings.dtype`.

    LoRA parameters are always fp32: with AdamW at 1e-5 most updates are below bf16's resolution and would be lost.
    Raises ModelError, or SettingError if the model lacks target_modules or the quantization is not
    installed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = base_dtype(settings)
    sharded = sharding == "fsdp2"
    model, tokenizer = policy_model.load(
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
