"""The overview: what `ratchet status --report` tells, of every alias, in one answer for the console's first page.

Promises that being looked at costs next to nothing: sums are made in the database, the dear ones are remembered for
twenty times as long as they took, and only small figures pass through this process.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ratchet.store.coordination.job_progress import JobProgress
from ratchet.store.db.count_cache import CachedCount
from ratchet.store.reasons import drop_meaning
from ratchet.store.records import Policy, Round
from ratchet.store.reports.learning_report import to_dict
from ratchet.store.reports.policy_movement import movement_of
from ratchet.store.reports.relative_judges import is_relative, read_learning_report
from ratchet.store.reports.undecided_versions import read_awaiting_approval, read_canary_scores
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

_ROUNDS = 50
_DECISIONS = 5
_SHOWN = (
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
)


class Overview:
    """Reads the store for the overview."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._learning: dict[str, CachedCount[dict[str, Any]]] = {}

    def read(self) -> dict[str, Any]:
        """Return everything that the page shows, of all aliases."""
        store = self._store
        serving = store.policies.serving()
        versions, progress = store.policies.counts(), store.job_progress.all()
        return {
            "at": time.time(),
            "aliases": [self._alias(name, serving, versions[name], progress) for name in sorted(versions)],
            "trajectories": store.trajectories.counts(),
            "dropped": [
                {"reason": reason, "count": count, "meaning": drop_meaning(reason)}
                for reason, count in sorted(store.trajectories.drop_counts().items(), key=lambda one: -one[1])
            ],
            "rounds": [_round(one) for one in store.rounds.page(limit=_ROUNDS)],
            "alarms": [msgspec.structs.asdict(alarm) for alarm in store.alarms.active()],
        }

    def _alias(
        self, alias: str, serving: list[Policy], versions: dict[str, int], progress: list[JobProgress]
    ) -> dict[str, Any]:
        live = _version(alias, PolicyState.LIVE, serving)
        told = self._store.decisions.decisions_of(alias, limit=_DECISIONS)
        return {
            "alias": alias,
            "versions": versions,
            "live": live,
            "decisions": [
                {
                    "version": one.version,
                    "action": one.action,
                    "by": one.decided_by,
                    "reason": one.reason,
                    "at": one.decided_at,
                }
                for one in told
            ],
            "progress": [_progress(job) for job in progress if job.alias == alias],
            **self._report(alias),
        }

    def _report(self, alias: str) -> dict[str, Any]:
        """Return whether an alias learns, as old as that was dear to find out."""
        if alias not in self._learning:
            self._learning[alias] = CachedCount(lambda: self._read_report(alias))
        return self._learning[alias]()

    def _read_report(self, alias: str) -> dict[str, Any]:
        judge = self._store.groups.newest_judge_version(alias)
        told = read_learning_report(self._store, alias)
        canary = read_canary_scores(self._store, alias)
        relative = is_relative(self._store, alias, judge)
        return {
            "judge": judge,
            "relative": relative,
            "learning": to_dict(told),
            "canary": canary,
            "held": read_awaiting_approval(self._store, alias),
        }


def _version(alias: str, state: PolicyState, serving: list[Policy]) -> dict[str, Any] | None:
    found = next((one for one in serving if one.alias == alias and one.state is state), None)
    return {"version": found.version, "created_at": found.created_at} if found else None


def _progress(job: JobProgress) -> dict[str, Any]:
    pace = {"seconds_per_item": job.seconds_per_item, "eta_seconds": job.eta_seconds}
    return msgspec.structs.asdict(job) | pace


def _round(one: Round) -> dict[str, Any]:
    plain_one = msgspec.structs.asdict(one) | {"metrics": {k: one.metrics[k] for k in _SHOWN if k in one.metrics}}
    moved = movement_of(one.metrics)
    said = {"untrained_tokens": one.metrics.get("untrained_tokens") or {}, "moved": moved and moved.describe()}
    return plain_one | said
