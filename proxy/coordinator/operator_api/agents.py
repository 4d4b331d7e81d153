"""GET /api/agents, /api/keys, /api/audit and /api/usage: the agents, who may call and read them, and what they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi.responses import Response

from ratchet.proxy.coordinator.operator_api.json_responses import page_response, plain
from ratchet.proxy.coordinator.operator_api.list_filters import Limit
from ratchet.store.store import Store

ReadAgents = Callable[[], Mapping[str, str]]  # state by agent: serving, waiting or left

_NOT_SERVED = "not_served"  # of an agent with records that this proxy does not serve
_MAX_USAGE_DAYS = 400

Column = Literal["day", "key_id", "alias", "purpose", "key", "agent"]
_COLUMNS: Mapping[Column, str] = {"key": "key_id", "agent": "alias"}  # as `ratchet usage` names them
_ALL_COLUMNS: list[Column] = ["day", "key_id", "alias", "purpose"]


def add_agents(api: FastAPI, store: Store, read_agents: ReadAgents) -> None:
    """Add the routes."""

    @api.get("/agents")
    def agents() -> Response:
        """The agents of this proxy and those with records, by name, each with its state and live version.

        `serving`; `waiting`: no version is live yet; `left`: only its open trajectories go on; `not_served`.
        """
        live = store.policies.live()
        states = dict.fromkeys(live, _NOT_SERVED) | dict(read_agents())
        return page_response(
            [
                {"agent": name, "state": states[name], "live_version": live[name].version if name in live else None}
                for name in sorted(states)
            ]
        )

    @api.get("/keys")
    def keys() -> Response:
        """The keys in the store with their tokens today and this month (UTC), without their hashes, oldest first.

        `agents`, `models` null: the key calls all.
        """
        found = store.keys.all()
        used = store.usage.of_keys([key.id for key in found])
        rows = [plain(key) | {"tokens_today": used[key.id].today, "tokens_this_month": used[key.id].this_month}
                for key in found]  # fmt: skip
        return page_response([{name: value for name, value in row.items() if name != "hash"} for row in rows])

    @api.get("/audit")
    def audit(
        limit: Limit = 100,
        before: str | None = None,
        key: str | None = None,
        since: float | None = None,
        changes: bool = False,
    ) -> Response:
        """What operators read and changed, newest first; `since`: Unix seconds; `changes`: without reads.

        `status` null: the outcome is not known. Requests of the last two seconds may be missing.
        """
        found = store.audit.page(limit, before, key=key, since=since, changes=changes)
        return page_response([plain(one) for one in found], limit)

    @api.get("/usage")
    def usage(
        alias: str | None = None,
        key_id: str | None = None,
        days: Annotated[int, Query(ge=1, le=_MAX_USAGE_DAYS)] = 1,
        by: Annotated[list[Column], Query()] = _ALL_COLUMNS,
    ) -> Response:
        """Calls and tokens of the last `days` (UTC, today included) by `by`: all that ended and are in the store."""
        columns = [_COLUMNS.get(name, name) for name in by]
        return page_response([plain(one) for one in store.usage.read(days, columns, alias, key_id)])
