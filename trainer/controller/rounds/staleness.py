"""How old a sample may be, counted in trained versions. Pure.

A prompt version changes no weights, and a rejected version is not part of later ones: neither makes a sample older. An
unproven version does: it serves nobody, but training continues from it, so each one leads further away from the version
that sampled. What was trained decides here, not what a proof could tell from rounding: without them, the learner would
hold what an old version sampled to the limit for fresh rows, and reject it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import PolicyState


def oldest_fresh(policies: Sequence[Policy], max_staleness: int) -> int:
    """Return the oldest version whose samples are trained: `max_staleness` trained versions before the newest one."""
    steps, left = _steps(policies), max_staleness
    version = max(steps, default=BASE_VERSION)
    while version > BASE_VERSION and (left > 0 or version not in steps):
        left -= version in steps
        version -= 1
    return version


def versions_ahead(policies: Sequence[Policy]) -> int:
    """Return the number of trained versions after the live one."""
    live = max((policy.version for policy in policies if policy.state is PolicyState.LIVE), default=BASE_VERSION)
    return sum(step > live for step in _steps(policies))


def age(policies: Sequence[Policy], sampled: int, version: int) -> int:
    """Return the number of trained versions between the version that sampled something and `version`."""
    return sum(sampled < step <= version for step in _steps(policies))


def _steps(policies: Sequence[Policy]) -> set[int]:
    """Return the versions that changed the weights and are part of later ones."""
    trained = (policy for policy in policies if policy.round_id is not None)
    return {policy.version for policy in trained if policy.state is not PolicyState.REJECTED}
