"""Which new trajectories start on a canary: its share of them, chosen by their ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import Policy

log = logging.getLogger("ratchet.proxy")


class CanaryChoice:
    """The canary of each alias, and the version of each new trajectory."""

    def __init__(self, aliases: Sequence[str], metrics: ProxyMetrics) -> None:
        self._aliases = aliases
        self._metrics = metrics
        self._canaries: dict[str, Policy] = {}
        for alias in aliases:
            metrics.canary_share.labels(alias).set(0.0)

    def choose_version(self, alias: str, trajectory_id: str, live_version: int) -> int:
        """Return the canary's version for its share of the new trajectories, else the live version.

        The choice depends on the trajectory's id only: a larger share keeps the trajectories of a smaller one.
        """
        canary = self._canaries.get(alias)
        if canary is None:
            return live_version
        is_canary = _fraction(canary, trajectory_id) < (canary.canary_share or 0.0)
        self._metrics.canary_trajectories.labels(alias, "canary" if is_canary else "live").inc()
        return canary.version if is_canary else live_version

    def replace(self, policies: Iterable[Policy]) -> None:
        """Replace the canaries."""
        canaries = {policy.alias: policy for policy in policies if policy.alias in self._aliases}
        for alias in self._aliases:
            policy, before = canaries.get(alias), self._canaries.get(alias)
            if (policy and (policy.version, policy.canary_share)) == (before and (before.version, before.canary_share)):
                continue
            share = (policy.canary_share if policy else None) or 0.0
            version = policy.version if policy else None
            log.info("event=canary alias=%s version=%s share=%g", alias, version, share)
            self._metrics.canary_share.labels(alias).set(share)
        self._canaries = canaries


def _fraction(canary: Policy, trajectory_id: str) -> float:
    """Return a trajectory's fixed number from 0 to 1; it differs between canaries."""
    name = f"{canary.alias}@{canary.version}\0{trajectory_id}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64
