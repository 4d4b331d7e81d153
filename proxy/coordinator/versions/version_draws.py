"""Draws the versions of new trajectories, by the shares in force.

Each trajectory draws by its own coin, a hash of its id and of the shares: draws under other shares, and so those of
another release, are independent. A known user or session draws once under the same shares. Costs one hash, and nothing
where only one version serves.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Counter

from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.policies.serving import shares_in_force
from ratchet.store.records import Policy, VersionDraw
from ratchet.store.states import SERVING

log = logging.getLogger("ratchet.proxy")


class _Shares(NamedTuple):
    """The shares of one alias, prepared for draws."""

    versions: tuple[int, ...]
    bounds: tuple[float, ...]  # cumulated shares, without the last
    salt: bytes
    counters: tuple[Counter, ...]
    counted: VersionDraw
    uncounted: VersionDraw


class VersionDraws:
    """The shares in force of each alias, and the version of each new trajectory."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._aliases: Sequence[str] = ()
        self._metrics = metrics
        self._shares: dict[str, _Shares] = {}

    def set_aliases(self, aliases: Sequence[str]) -> None:
        """Draw for these aliases from now on."""
        self._aliases = aliases
        self._shares = {alias: shares for alias, shares in self._shares.items() if alias in aliases}

    def draw(
        self, alias: str, trajectory_id: str, unit: str | None = None, *, counted: bool = True
    ) -> tuple[int, VersionDraw]:
        """Return the version of a new trajectory, with its draw. Raises KeyError if no version of the alias serves.

        Args:
            unit: the user or session that draws, as a digest; None: the trajectory alone.
            counted: whether it is evidence about its version.
        """
        shares = self._shares[alias]
        place = bisect_right(shares.bounds, _coin(shares.salt, unit or trajectory_id)) if shares.bounds else 0
        shares.counters[place].inc()
        if unit is None:
            return shares.versions[place], shares.counted if counted else shares.uncounted
        return shares.versions[place], VersionDraw(shares=shares.counted.shares, unit=unit, counted=counted)

    def replace(self, serving: Iterable[Policy]) -> None:
        """Replace the versions that serve; those of other aliases are ignored."""
        by_alias: dict[str, list[Policy]] = {alias: [] for alias in self._aliases}
        for policy in serving:
            by_alias.get(policy.alias, []).append(policy)
        for alias, policies in by_alias.items():
            shares, before = shares_in_force(policies), self._shares.get(alias)
            if before is not None and (not shares or shares == before.counted.shares):
                continue  # without a live version the last copy stays in use
            if shares:
                self._shares[alias] = self._prepared(alias, policies, shares)
                log.info("event=shares alias=%s shares=%r", alias, shares)

    def _prepared(self, alias: str, policies: Sequence[Policy], shares: dict[int, float]) -> _Shares:
        """Return the shares of an alias prepared for draws, and expose them."""
        roles = {policy.version: policy.state for policy in policies}
        for role in SERVING:
            served = sum(share for version, share in shares.items() if roles[version] is role)
            self._metrics.version_share.labels(alias, role).set(served)
        name = "\0".join((alias, *(f"{version}:{share!r}" for version, share in shares.items())))
        return _Shares(
            versions=tuple(shares),
            bounds=tuple(accumulate(shares.values()))[:-1],
            salt=name.encode(),
            counters=tuple(self._metrics.version_trajectories.labels(alias, roles[version]) for version in shares),
            counted=VersionDraw(shares=shares),
            uncounted=VersionDraw(shares=shares, counted=False),
        )


def unit_of(kind: str, key_id: str | None, name: str) -> str:
    """Return the digest of a user or session of one key: names of people are not stored."""
    return blake2b(f"{kind}\0{key_id or ''}\0{name}".encode(), digest_size=16).hexdigest()


def _coin(salt: bytes, name: str) -> float:
    """Return a fixed number from 0 to 1, independent for each name and each salt."""
    return int.from_bytes(blake2b(b"\0".join((salt, name.encode())), digest_size=8).digest()) / 2**64
