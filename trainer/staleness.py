"""How old a sample may be: counted in versions that were trained since. A prompt changes no weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from store.records import BASE_VERSION, Policy
from store.states import PolicyState


def oldest_fresh(policies: Sequence[Policy], most: int) -> int:
    """Return the oldest version of an alias whose samples are trained: `most` trained versions before the live one."""
    live = max((policy.version for policy in policies if policy.state is PolicyState.LIVE), default=BASE_VERSION)
    prompts = {policy.version for policy in policies if policy.version and policy.round_id is None}
    version = live
    while version > BASE_VERSION and (most > 0 or version in prompts):
        most -= version not in prompts
        version -= 1
    return version
