"""The warm start of one alias: a round of supervised fine-tuning (SFT), and the candidate version that results.

It works like any round: the same learner with the loss `sft`, one transaction that commits the checkpoint and registers
the candidate, which is then proven, evaluated and released. It consumes no trajectory: its examples may have been
trained before, or be trained later; the round records their ids, so that deletion finds them. Promises: a warm start
with too few examples is refused with the reason, before any weight changes.
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
from ratchet.trainer.controller.warm_start.general_data import GeneralDataRows, general_rows, mean_loss, mix_rows
from ratchet.trainer.controller.warm_start.sft_data import SFTDataCollector, SFTRows
from ratchet.trainer.errors import LearningError, WarmStartRefused
from ratchet.trainer.learner_api.protocol import LearnerProtocol, RoundReport
from ratchet.trainer.rows.build_rows import ALL_ROLES
from ratchet.trainer.rows.chat_rows import ChatRenderer
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings

log = logging.getLogger(__name__)

WARM_START = "warm_start"  # key in the metrics of such a round


@dataclass(frozen=True, slots=True)
class SFTData:
    """Everything that a warm start trains on and is measured with."""

    examples: SFTRows
    general: GeneralDataRows
    rows: tuple[TokenRow, ...]  # examples and general data, in no order


def gather(
    store: Store,
    alias: str,
    judge: Judge,
    chat: ChatRenderer,
    settings: WarmStartSettings,
    general: Iterable[tuple[str, Mapping[str, Any]]] = (),
    tuning_id: str = "",
    roles: Roles = ALL_ROLES,
    held_out: float = 0.0,
    relative: bool = False,
) -> SFTData:
    """Return the data of a warm start. Raises WarmStartRefused if it is too little, with the counts of what was
    skipped.
    """
    examples = SFTDataCollector(store, alias, judge, chat, settings, tuning_id, roles, held_out, relative).collect()
    if len(examples.scores) < settings.min_trajectories:
        reasons = (
            ", ".join(f"{reason}: {count}" for reason, count in examples.skipped.most_common()) or "none were found"
        )
        raise WarmStartRefused(
            f"{len(examples.scores)} trajectories to train on from {', '.join(settings.sources)}, "
            f"{settings.min_trajectories} are "
            f"needed ({reasons}): lower min_score or `least`, or let the agent work first"
        )
    other = general_rows(general, chat, settings) if settings.general is not None else GeneralDataRows()
    return SFTData(
        examples, other, tuple(mix_rows(examples.rows, other.trained, settings.general_ratio, settings.seed))
    )


def learner_settings(settings: WarmStartSettings, learner: LearnerSettings, rows: int) -> LearnerSettings:
    """Return the learner's settings during the warm start."""
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
    """Runs the warm starts of one alias."""

    def __init__(self, store: Store, round_runner: RoundRunner, alias: str) -> None:
        self._store = store
        self._round_runner = round_runner
        self._alias = alias

    def run(
        self,
        learner: LearnerProtocol,
        data: SFTData,
        settings: WarmStartSettings,
        from_version: int,
        tuning_id: str,
        on_epoch: Callable[[int, RoundReport], None] = lambda epoch, report: None,
    ) -> Policy:
        """Train and commit. The learner must have the settings of `learner_settings`.

        Raises WarmStartRefused if the general loss rose too much, TrainingDiverged, NoLearningSignal; the learner needs
        a reload then.
        """
        reference = self._round_runner.next_reference()  # a store that is away costs no step
        started = self._store.rounds.start(self._alias, from_version)
        rows = [row for row in data.rows if learner.unfit(row) is None]
        measured = [row for row in data.general.held_out if learner.unfit(row) is None]
        try:
            before = mean_loss(learner, measured) if measured else None
            reports = []
            for epoch in range(settings.num_train_epochs):
                reports.append(learner.train_round(rows))
                on_epoch(epoch + 1, reports[-1])
            after = mean_loss(learner, measured) if measured else None
            _check_loss_increase(before, after, settings)
        except LearningError as error:
            self._store.rounds.abandon(started.id, str(error))
            raise
        story = _report(data, settings, reports, before, after, len(rows)) | {"tuning": tuning_id}
        candidate = self._round_runner.commit(
            learner,
            started,
            reference,
            groups=[],
            metrics=_metrics(data, reports, story),
            demonstrations=sorted(data.examples.scores),
        )
        log.info(
            "event=warm_start_committed policy=%s@%d trajectories=%d rows=%d loss=%.4f general_before=%s "
            "general_after=%s",
            self._alias, candidate.version, len(data.examples.scores), len(rows), reports[-1].loss, before, after,
        )  # fmt: skip
        return candidate


def warm_start_metrics(store: Store, alias: str, tuning_id: str) -> tuple[int, Mapping[str, Any]] | None:
    """Return the version and the report of a tuning's warm start; None before its commit."""
    before = None
    while page := store.rounds.page(alias, limit=200, before=before):
        for one in page:
            story = one.metrics.get(WARM_START)
            if one.to_version is not None and story is not None and story.get("tuning") == tuning_id:
                return one.to_version, story
        before = page[-1].id
    return None


def _check_loss_increase(before: float | None, after: float | None, settings: WarmStartSettings) -> None:
    limit = settings.max_loss_increase
    if limit is not None and before is not None and after is not None and after - before > limit:
        raise WarmStartRefused(
            f"the held-out general loss rose from {before:.4f} to {after:.4f} nats, more than max_loss_increase "
            f"{limit:g}: raise general_ratio, or lower epochs or learning_rate"
        )


def _report(
    data: SFTData,
    settings: WarmStartSettings,
    reports: Sequence[RoundReport],
    before: float | None,
    after: float | None,
    rows: int,
) -> dict[str, Any]:
    """Return the report of a warm start."""
    return {
        "trajectories": len(data.examples.scores),
        "by_source": dict(data.examples.by_source),
        "skipped": dict(data.examples.skipped),
        "rows": rows,
        "general_rows": len(data.rows) - len(data.examples.rows),
        "general_skipped": dict(data.general.skipped or {}),
        "general_held_out": len(data.general.held_out),
        "general_loss_before": before,
        "general_loss_after": after,
        "loss_by_epoch": [report.loss for report in reports],
        "settings": settings.model_dump(mode="json"),
    }


def _metrics(data: SFTData, reports: Sequence[RoundReport], story: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the round: those of its last epoch, with the sums over all epochs."""
    scores = [score for score in data.examples.scores.values() if score is not None]
    return reports[-1].figures() | {
        "optimizer_steps": sum(report.optimizer_steps for report in reports),
        "tokens_trained": sum(report.tokens_trained for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "groups": 0,
        "trajectories": len(data.examples.scores),
        "reward": fmean(scores) if scores else 0.0,
        "untrained_tokens": {},
        WARM_START: dict(story),
    }
