"""How old a sample may be: counted in versions that served since. Pure.

A prompt changes no weights; a rejected version is no part of what came after it; what unproven ones changed is too
little to be told from rounding, and together they are the step of the version that was proven after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import PolicyState

_NO_STEPS = (PolicyState.REJECTED, PolicyState.UNPROVEN)


def oldest_fresh(policies: Sequence[Policy], most: int) -> int:
    """Return the oldest version of an alias whose samples are trained: `most` trained versions before the live one."""
    live = max((policy.version for policy in policies if policy.state is PolicyState.LIVE), default=BASE_VERSION)
    steps = _steps(policies)
    version = live
    while version > BASE_VERSION and (most > 0 or version not in steps):
        most -= version in steps
        version -= 1
    return version


def age(policies: Sequence[Policy], sampled: int, version: int) -> int:
    """Return how many trained versions `version` is ahead of the one that something was sampled from."""
    return sum(sampled < step <= version for step in _steps(policies))


def _steps(policies: Sequence[Policy]) -> set[int]:
    """Return the versions that moved the weights, and are part of what came after."""
    return {policy.version for policy in policies if policy.round_id is not None and policy.state not in _NO_STEPS}
