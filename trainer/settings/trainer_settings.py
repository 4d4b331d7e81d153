"""The trainer's settings: parsed once at the door, passed on as values, never read again.

Unknown names are errors. Torch is not imported here.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ratchet.trainer.settings.trainable import check_trainable
from ratchet.trainer.settings.trainer_fields import TrainerFields


class TrainerSettings(TrainerFields):
    """What the trainer needs to know; settings from which nothing can be learnt are refused."""

    @model_validator(mode="after")
    def _can_learn(self) -> Self:
        reason = check_trainable(self)
        if reason is not None:
            raise ValueError(reason)
        if self.keep_checkpoints <= self.keep_loaded_adapters:
            raise ValueError(
                f"keep_checkpoints {self.keep_checkpoints} must be more than keep_loaded_adapters "
                f"{self.keep_loaded_adapters}: vLLM reads the "
                "folder of what it has loaded"
            )
        return self
