"""Warm starts that tunings ask the trainer for: found, gathered and answered, once each.

A tuning of weights that runs, whose `config` holds `warm_start` and whose progress has reached that stage asks for one.
It is answered by a committed round that names the tuning, or by the tuning's failure, with the reason. Promises:
whatever dies in between, no tuning gets two warm starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ratchet.store.records.tuning import Tuning
from ratchet.store.states import TuningState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.controller.warm_start.sft_round import SFTMaterial, gather, warm_start_metrics
from ratchet.trainer.errors import LearningError, RowError, SettingError, TuningError
from ratchet.trainer.rows.chat_rows import ChatRows
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings
from ratchet.trainer.tasks.task_set import TaskSet

log = logging.getLogger(__name__)

WARM_START = "warm_start"  # the part of a tuning's config that says which, and the stage of its progress that asks
REFUSALS = (LearningError, RowError, SettingError, TuningError)  # what a tuning fails for, and nothing else does

_LOOK_EVERY = 1.0  # seconds
_NEWEST = 20  # tunings looked at


class WarmStarts:
    """The warm starts that the tunings of one alias ask for."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self._looked_at = 0.0
        self._answered: set[str] = set()

    def next(self, now: float) -> Tuning | None:
        """Return the oldest tuning that waits for its warm start."""
        if now - self._looked_at < _LOOK_EVERY:
            return None
        self._looked_at = now
        return next((one for one in self._asking() if not self._has_it(one)), None)

    def gather(self, asked: Tuning) -> tuple[WarmStartSettings, SFTMaterial]:
        """Return what was asked for and what there is to learn. Raises one of REFUSALS."""
        try:
            wanted = WarmStartSettings.model_validate(asked.config[WARM_START])
        except ValidationError as wrong:
            raise SettingError(f"tuning {asked.id}: warm_start: {wrong.errors()[0]['msg']}") from wrong
        from ratchet.trainer.rows.tokenizer import load_tokenizer

        chat = ChatRows(load_tokenizer(self._settings.base_model))
        judge = make_judge(self._settings.judge, os.environ)
        try:
            return wanted, gather(
                self._store,
                self._settings.model,
                judge,
                chat,
                wanted,
                _general(wanted),
                tuning_id=asked.id,
                roles=Roles(self._settings.roles, self._settings.role_patterns),
                held_out=self._settings.release.held_out_share,
                relative=gives_only_ranks(self._settings.judge),
            )
        finally:
            judge.close()

    def refuse(self, asked: Tuning, reason: str) -> None:
        """End a tuning that cannot have its warm start."""
        log.warning("event=warm_start_refused tuning=%s reason=%r", asked.id, reason)
        self._store.tunings.end(asked.id, TuningState.FAILED, error=f"warm start: {reason}")

    def _asking(self) -> list[Tuning]:
        newest = self._store.tunings.page("weights", limit=_NEWEST, state=TuningState.RUNNING)
        running = [one for one in newest if one.alias == self._settings.model]
        asking = [one for one in reversed(running) if WARM_START in one.config and one.id not in self._answered]
        return [one for one in asking if (one.result or {}).get("stage") == WARM_START]

    def _has_it(self, asked: Tuning) -> bool:
        if warm_start_metrics(self._store, self._settings.model, asked.id) is None:
            return False
        self._answered.add(asked.id)
        return True


def _general(wanted: WarmStartSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if wanted.general is not None:
        for task in TaskSet.open(wanted.general).rows(wanted.general_split):
            yield task.id, task.row
