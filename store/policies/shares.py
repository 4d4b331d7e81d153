"""The versions of an alias that serve new trajectories, and their shares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.errors import InvalidTransition
from ratchet.store.records import Policy
from ratchet.store.records.base import row_to
from ratchet.store.states import SERVING, PolicyState

HOLDBACK_SHARE = 0.1  # of the anchor, unless a decision says otherwise


class ServingVersions(NamedTuple):
    """The versions of an alias that serve new trajectories."""

    holdback: Policy | None
    live: Policy | None
    ramp: Policy | None

    @property
    def anchor(self) -> Policy | None:
        """The version that newer ones are compared with."""
        return self.holdback or self.live


def shares_in_force(serving: Iterable[Policy]) -> dict[int, float]:
    """Return the share of each serving version of one alias, by version; the live version has what the others leave."""
    serving = sorted(serving, key=lambda policy: policy.version)
    shares = {policy.version: policy.share or 0.0 for policy in serving}
    rest = round(1.0 - sum(shares.values()), 12)
    return shares | {policy.version: rest for policy in serving if policy.state is PolicyState.LIVE}


def check_shares(connection: sa.Connection, alias: str) -> None:
    """Raise InvalidTransition unless each share is between 0 and 1 and the live version has some of them."""
    shares = shares_in_force(filter(None, locked(connection, alias)))
    if wrong := [f"{alias}@{version}: {share:g}" for version, share in shares.items() if not 0.0 < share <= 1.0]:
        raise InvalidTransition(f"shares lie between 0 and 1 and leave some for the live version: {', '.join(wrong)}")


def locked(connection: sa.Connection, alias: str) -> ServingVersions:
    """Return the versions that serve, locked until the transaction ends."""
    table = schema.policies
    query = (
        sa.select(table)
        .where(table.c.alias == alias, table.c.state.in_(SERVING))
        .order_by(table.c.version)
        .with_for_update()
    )
    found = {row.state: row_to(Policy, row) for row in connection.execute(query)}
    return ServingVersions(*(found.get(state) for state in SERVING))
