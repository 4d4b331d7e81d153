"""Creates the trainer of a base model with a new LoRA adapter, and TRL's arguments from the learner's settings."""

from __future__ import annotations

from pathlib import Path

import torch

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import base_model as policy_model
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.launch import processes
from ratchet.trainer.learner.learning_rate import LearningRateController
from ratchet.trainer.learner.lora_targets import lora_config
from ratchet.trainer.learner.loss import RecordedGRPOTrainer, loss_of
from ratchet.trainer.learner.sharding import attach_sharded
from ratchet.trainer.learner.trl_imports import GRPOConfig
from ratchet.trainer.settings.adapter_and_memory import AUTO
from ratchet.trainer.settings.learner_settings import LearnerSettings

# Between rounds there may be hours without traffic, during which the processes of a run wait for each other.
_DDP_TIMEOUT = 30 * 24 * 3600  # seconds


def build(base_model: str, settings: LearnerSettings, output_dir: Path, sharding: str = "none") -> RecordedGRPOTrainer:
    """Return the trainer of a new LoRA adapter, on the GPU if there is one, computed in `settings.dtype`.

    LoRA parameters are always fp32: with AdamW at 1e-5 most updates are below bf16's resolution and would be lost.
    Raises ModelNotFound, NotAModel, or SettingError if the model lacks target_modules or the quantization is not
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
    arguments = _arguments(settings, output_dir, dtype, rate_controller.rate)
    targets = settings.target_modules
    lora = lora_config(model, settings)
    try:
        if sharded:
            model = attach_sharded(model, lora, settings.attn_implementation, device.type)
        return RecordedGRPOTrainer(model, arguments, tokenizer, None if sharded else lora, settings, rate_controller)
    except ValueError as error:  # peft does not find the layers, or TRL cannot train them
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


def _arguments(settings: LearnerSettings, output_dir: Path, dtype: torch.dtype, learning_rate: float) -> GRPOConfig:
    low, high = settings.clip
    loss_type, level = loss_of(settings.objective)
    return GRPOConfig(
        str(output_dir),
        loss_type=loss_type,
        importance_sampling_level=level,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        epsilon=low,
        epsilon_high=high,
        use_bias_correction_kl=True,  # without the ratio the gradient is not that of the reverse KL
        gradient_checkpointing=False,  # trainer/learner/activations.py
        seed=settings.seed,
        per_device_train_batch_size=2,
        num_generations=2,
        disable_dropout=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=dtype == torch.bfloat16,
        ddp_timeout=_DDP_TIMEOUT,
        ddp_find_unused_parameters=False,
        report_to="none",
        save_strategy="no",
    )
