"""How old a sample may be: counted in versions that served since. Pure.

A prompt changes no weights; a rejected version is no part of what came after it; what unproven ones changed is too
little to be told from rounding, and together they are the step of the version that was proven after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from store.records import BASE_VERSION, Policy
from store.states import PolicyState

_NO_STEPS = (PolicyState.REJECTED, PolicyState.UNPROVEN)


def oldest_fresh(policies: Sequence[Policy], most: int) -> int:
    """Return the oldest version of an alias whose samples are trained: `most` trained versions before the live one."""
    live = max((policy.version for policy in policies if policy.state is PolicyState.LIVE), default=BASE_VERSION)
    steps = {policy.version for policy in policies if policy.round_id is not None and policy.state not in _NO_STEPS}
    version = live
    while version > BASE_VERSION and (most > 0 or version not in steps):
        most -= version in steps
        version -= 1
    return version
