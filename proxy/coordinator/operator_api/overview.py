"""The overview for the console's first page: the report of `ratchet status --report` for every alias.

It is cheap to poll: the database computes the sums, and expensive ones are cached for twenty times as long as they
took.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import msgspec

from ratchet.store.db.verbs import CachedCount
from ratchet.store.operation_records import JobProgress
from ratchet.store.reasons import drop_meaning
from ratchet.store.records import Policy, Round
from ratchet.store.reports.learning_report import is_relative, movement_of, read_learning_report, to_dict
from ratchet.store.reports.version_reports import read_awaiting_approval, read_ramp_scores, read_release
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

_ROUNDS = 50
_DECISIONS = 5
_ROUND_METRICS = (
    "reward",
    "trajectories",
    "groups",
    "loss",
    "grad_norm",
    "entropy",
    "clip_ratio",
    "tokens_trained",
    "seconds",
    "approx_kl",
    "rows",
    "rows_rejected",
)


class Overview:
    """Reads the store for the overview."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._learning: dict[str, CachedCount[dict[str, Any]]] = {}

    def read(self, alias: str | None = None) -> dict[str, Any]:
        """Return the data of the page, for one alias or for all."""
        store = self._store
        serving = store.policies.serving()
        versions, progress = store.policies.counts(), store.job_progress.all()
        return {
            "at": time.time(),
            "aliases": [
                self._alias(name, serving, versions[name], progress)
                for name in sorted(versions)
                if alias in (None, name)
            ],
            "trajectories": store.trajectories.counts(alias),
            "dropped": [
                {"reason": reason, "count": count, "meaning": drop_meaning(reason)}
                for reason, count in sorted(store.trajectories.drop_counts(alias).items(), key=lambda one: -one[1])
            ],
            "rounds": [_round(one) for one in store.rounds.page(alias, limit=_ROUNDS)],
            "alarms": [
                msgspec.structs.asdict(alarm)
                for alarm in store.alarms.active()
                if concerns(alarm.name, alias, versions)
            ],
        }

    def _alias(
        self, alias: str, serving: list[Policy], versions: dict[str, int], progress: list[JobProgress]
    ) -> dict[str, Any]:
        live = _version(alias, PolicyState.LIVE, serving)
        decisions = self._store.decisions.decisions_of(alias, limit=_DECISIONS)
        return {
            "alias": alias,
            "versions": versions,
            "live": live,
            "release": read_release(self._store, alias),
            "decisions": [
                {
                    "version": one.version,
                    "action": one.action,
                    "by": one.decided_by,
                    "reason": one.reason,
                    "at": one.decided_at,
                }
                for one in decisions
            ],
            "progress": [_progress(job) for job in progress if job.alias == alias],
            **self._report(alias),
        }

    def _report(self, alias: str) -> dict[str, Any]:
        """Return the learning report of an alias, cached by its cost."""
        if alias not in self._learning:
            self._learning[alias] = CachedCount(lambda: self._read_report(alias))
        return self._learning[alias]()

    def _read_report(self, alias: str) -> dict[str, Any]:
        judge = self._store.groups.newest_judge_version(alias)
        report = read_learning_report(self._store, alias)
        ramp = read_ramp_scores(self._store, alias)
        relative = is_relative(self._store, alias, judge)
        return {
            "judge": judge,
            "relative": relative,
            "learning": to_dict(report),
            "ramp": ramp,
            "awaiting_approval": read_awaiting_approval(self._store, alias),
        }


def concerns(alarm: str, alias: str | None, known: Collection[str]) -> bool:
    """Return whether an alarm concerns an agent: it names that one (`no_signal:mail`), or none of the known ones."""
    named = [part for part in alarm.split(":")[1:] if part in known]
    return alias is None or alias in named or not named


def _version(alias: str, state: PolicyState, serving: list[Policy]) -> dict[str, Any] | None:
    found = next((one for one in serving if one.alias == alias and one.state is state), None)
    return {"version": found.version, "created_at": found.created_at} if found else None


def _progress(job: JobProgress) -> dict[str, Any]:
    pace = {"seconds_per_item": job.seconds_per_item, "eta_seconds": job.eta_seconds}
    return msgspec.structs.asdict(job) | pace


def _round(one: Round) -> dict[str, Any]:
    movement = movement_of(one.metrics)
    return msgspec.structs.asdict(one) | {
        "metrics": {name: one.metrics[name] for name in _ROUND_METRICS if name in one.metrics},
        "untrained_tokens": one.metrics.get("untrained_tokens") or {},
        "policy_movement": movement and movement.describe(),
    }
