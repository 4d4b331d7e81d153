"""The trainer's settings with the checks across fields. Unknown names are errors. Imports no torch."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ratchet.trainer.settings.trainable import check_trainable
from ratchet.trainer.settings.trainer_fields import TrainerFields


class TrainerSettings(TrainerFields):
    """The settings of one trainer. Settings that cannot train anything are refused with the reason."""

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
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
