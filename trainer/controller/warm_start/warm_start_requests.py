"""Warm starts that tuning runs request from the trainer.

A running weight tuning requests one if its `config` holds `warm_start` and its progress has reached that stage. The
answer is a committed round that names the tuning, or the failure of the tuning with the reason. Promises: no tuning
gets two warm starts, whatever process dies in between.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ratchet.store.errors import RecordDamaged
from ratchet.store.states import TuningState
from ratchet.store.store import Store
from ratchet.store.tuning_records import Tuning
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.controller.warm_start.sft_round import SFTData, gather, warm_start_metrics
from ratchet.trainer.errors import LearningError, RowError, SettingError, TuningError
from ratchet.trainer.rows.chat_process import ChatRowsProcess
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings
from ratchet.trainer.tasks.task_set import TaskSet

log = logging.getLogger(__name__)

WARM_START = "warm_start"  # the key in a tuning's config, and the stage of its progress
# Errors that fail the tuning, not the trainer.
REFUSALS = (LearningError, RecordDamaged, RowError, SettingError, TuningError)

_INTERVAL_SECONDS = 5.0
_MAX_TUNINGS = 20  # newest ones


class WarmStartRequests:
    """The warm starts that the tunings of one alias request."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self._checked_at = 0.0
        self._answered: set[str] = set()

    def next(self, now: float) -> Tuning | None:
        """Return the oldest tuning that waits for its warm start, if any."""
        if now - self._checked_at < _INTERVAL_SECONDS:
            return None
        self._checked_at = now
        return next((one for one in self._requesting() if not self._is_answered(one)), None)

    def gather(self, request: Tuning) -> tuple[WarmStartSettings, SFTData]:
        """Return the settings and the data of a requested warm start. Raises one of REFUSALS."""
        try:
            settings = WarmStartSettings.model_validate(request.config[WARM_START])
        except ValidationError as error:
            raise SettingError(f"tuning {request.id}: warm_start: {error.errors()[0]['msg']}") from error
        judge = make_judge(self._settings.judge, os.environ)
        try:
            with ChatRowsProcess(self._settings.base_model) as chat:
                return settings, gather(
                    self._store,
                    self._settings.model,
                    judge,
                    chat,
                    settings,
                    _general_data(settings),
                    tuning_id=request.id,
                    roles=Roles(self._settings.roles, self._settings.role_patterns),
                    held_out=self._settings.release.held_out_share,
                    relative=gives_only_ranks(self._settings.judge),
                )
        finally:
            judge.close()

    def refuse(self, request: Tuning, reason: str) -> None:
        """Fail a tuning that cannot have its warm start."""
        log.warning("event=warm_start_refused tuning=%s reason=%r", request.id, reason)
        self._store.tunings.end(request.id, TuningState.FAILED, error=f"warm start: {reason}")

    def _requesting(self) -> list[Tuning]:
        newest = self._store.tunings.page("weights", limit=_MAX_TUNINGS, state=TuningState.RUNNING)
        running = [one for one in newest if one.alias == self._settings.model]
        requesting = [one for one in reversed(running) if WARM_START in one.config and one.id not in self._answered]
        return [one for one in requesting if (one.result or {}).get("stage") == WARM_START]

    def _is_answered(self, request: Tuning) -> bool:
        if warm_start_metrics(self._store, self._settings.model, request.id) is None:
            return False
        self._answered.add(request.id)
        return True


def _general_data(settings: WarmStartSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if settings.general is not None:
        for task in TaskSet.open(settings.general).rows(settings.general_split):
            yield task.id, task.row
