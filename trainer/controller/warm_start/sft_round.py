"""The warm start of one alias: a round of imitation, and the candidate version that comes of it.

It is a round like any: same learner with the loss `sft`, one transaction that commits the checkpoint and registers the
candidate, which is then proven, evaluated and released like any other. It consumes no trajectory: what is imitated
may have been trained already, or be trained later; the round names what it was shown, for those who want to be
forgotten. Promises: refused with the reason, before any weight moves, where too little is left to imitate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.controller.warm_start.general_data import GeneralDataRows, general_rows, mean_loss, mixed
from ratchet.trainer.controller.warm_start.sft_data import Search, SFTRows
from ratchet.trainer.errors import LearningError, WarmStartRefused
from ratchet.trainer.learner_protocol import LearnerProtocol, RoundReport
from ratchet.trainer.rows.build_rows import ALL_ROLES
from ratchet.trainer.rows.chat_rows import ChatRows
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings

log = logging.getLogger(__name__)

WARM_START = "warm_start"  # what such a round's metrics are told under


@dataclass(frozen=True, slots=True)
class SFTMaterial:
    """Everything that a warm start learns from and is measured on."""

    good: SFTRows
    general: GeneralDataRows
    rows: tuple[TokenRow, ...]  # mixed, in no order


def gather(
    store: Store,
    alias: str,
    judge: Judge,
    chat: ChatRows,
    settings: WarmStartSettings,
    general: Iterable[tuple[str, Mapping[str, Any]]] = (),
    tuning_id: str = "",
    roles: Roles = ALL_ROLES,
    held_out: float = 0.0,
    relative: bool = False,
) -> SFTMaterial:
    """Return what there is to learn. Raises WarmStartRefused, with what was left out, where it is too little."""
    good = Search(store, alias, judge, chat, settings, tuning_id, roles, held_out, relative).everything()
    if len(good.scores) < settings.min_trajectories:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in good.left_out.most_common()) or "none were found"
        raise WarmStartRefused(
            f"{len(good.scores)} trajectories to imitate from {', '.join(settings.sources)}, "
            f"{settings.min_trajectories} are needed ({reasons}): lower min_score or min_trajectories"
        )
    kept = general_rows(general, chat, settings) if settings.general is not None else GeneralDataRows()
    return SFTMaterial(good, kept, tuple(mixed(good.rows, kept.learnt, settings.general_ratio, settings.seed)))


def learner_settings(settings: WarmStartSettings, learner: LearnerSettings, rows: int) -> LearnerSettings:
    """Return the settings of the learner while it imitates."""
    return dataclasses.replace(
        learner,
        loss_type="sft",
        epsilon=None,
        epsilon_high=None,
        beta=0.0,
        entropy_coef=0.0,
        top_entropy_quantile=1.0,
        learning_rate=settings.learning_rate or learner.learning_rate,
        steps_per_round=-(-rows // settings.batch_size),
    )


class SFTRound:
    """Holds warm starts of one alias."""

    def __init__(self, store: Store, school: RoundRunner, alias: str) -> None:
        self._store = store
        self._round_runner = school
        self._alias = alias

    def hold(
        self,
        pupil: LearnerProtocol,
        material: SFTMaterial,
        settings: WarmStartSettings,
        from_version: int,
        tuning_id: str,
        told: Callable[[int, RoundReport], None] = lambda epoch, report: None,
    ) -> Policy:
        """Imitate and commit; the pupil has the settings of `learner_settings`, and is spoilt by whatever is raised.

        Raises WarmStartRefused where too much was forgotten, TrainingDiverged, NoLearningSignal.
        """
        held = self._store.rounds.start(self._alias, from_version)
        rows = [row for row in material.rows if pupil.unfit(row) is None]
        aside = [row for row in material.general.held_out if pupil.unfit(row) is None]
        try:
            before = mean_loss(pupil, aside) if aside else None
            reports = []
            for epoch in range(settings.num_train_epochs):
                reports.append(pupil.train_round(rows))
                told(epoch + 1, reports[-1])
            after = mean_loss(pupil, aside) if aside else None
            _check_loss_increase(before, after, settings)
        except LearningError as stopped:
            self._store.rounds.abandon(held.id, str(stopped))
            raise
        story = _story(material, settings, reports, before, after, len(rows)) | {"tuning": tuning_id}
        candidate = self._round_runner.commit(
            pupil, held, groups=[], metrics=_metrics(material, reports, story), shown=sorted(material.good.scores)
        )
        log.info(
            "event=warm_start_committed policy=%s@%d trajectories=%d rows=%d loss=%.4f general_before=%s "
            "general_after=%s",
            self._alias, candidate.version, len(material.good.scores), len(rows), reports[-1].loss, before, after,
        )  # fmt: skip
        return candidate


def warm_start_metrics(store: Store, alias: str, tuning_id: str) -> tuple[int, Mapping[str, Any]] | None:
    """Return the version that a tuning's warm start made, and what is told of it; None before its commit."""
    before = None
    while page := store.rounds.page(alias, limit=200, before=before):
        for held in page:
            story = held.metrics.get(WARM_START)
            if held.to_version is not None and story is not None and story.get("tuning") == tuning_id:
                return held.to_version, story
        before = page[-1].id
    return None


def _check_loss_increase(before: float | None, after: float | None, settings: WarmStartSettings) -> None:
    limit = settings.max_loss_increase
    if limit is not None and before is not None and after is not None and after - before > limit:
        raise WarmStartRefused(
            f"the held-out general loss rose from {before:.4f} to {after:.4f} nats, more than max_loss_increase "
            f"{limit:g}: raise general_ratio, or lower epochs or learning_rate"
        )


def _story(
    material: SFTMaterial,
    settings: WarmStartSettings,
    reports: Sequence[RoundReport],
    before: float | None,
    after: float | None,
    rows: int,
) -> dict[str, Any]:
    """Return what people are told of a warm start."""
    return {
        "trajectories": len(material.good.scores),
        "by_source": dict(material.good.by_source),
        "left_out": dict(material.good.left_out),
        "rows": rows,
        "general_rows": len(material.rows) - len(material.good.rows),
        "general_left_out": dict(material.general.left_out or {}),
        "general_held_out": len(material.general.held_out),
        "general_loss_before": before,
        "general_loss_after": after,
        "loss_by_epoch": [report.loss for report in reports],
        "settings": settings.model_dump(mode="json"),
    }


def _metrics(material: SFTMaterial, reports: Sequence[RoundReport], story: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the round: those of its last epoch, with the sums of all."""
    scores = [score for score in material.good.scores.values() if score is not None]
    return dataclasses.asdict(reports[-1]) | {
        "optimizer_steps": sum(report.optimizer_steps for report in reports),
        "tokens_trained": sum(report.tokens_trained for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "groups": 0,
        "trajectories": len(material.good.scores),
        "reward": fmean(scores) if scores else 0.0,
        "untrained_tokens": {},
        WARM_START: dict(story),
    }
