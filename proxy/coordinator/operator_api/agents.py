"""GET /api/agents, /api/keys and /api/usage: the agents, who may call them, and what they use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response

from ratchet.proxy.coordinator.operator_api.json_responses import page_response, plain
from ratchet.store.store import Store

ReadAgents = Callable[[], Mapping[str, str]]  # state by agent: serving, waiting or left

_NOT_SERVED = "not_served"  # of an agent with records that this proxy does not serve
_DAY = 86400.0
_MAX_USAGE_SECONDS = 31 * _DAY


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
        """The keys in the store, without their hashes, oldest first. `agents` null: the key calls all agents."""
        rows = [plain(key) for key in store.keys.all()]
        return page_response([{name: value for name, value in row.items() if name != "hash"} for row in rows])

    @api.get("/usage")
    def usage(
        alias: str | None = None, seconds: Annotated[float, Query(gt=0, le=_MAX_USAGE_SECONDS)] = _DAY
    ) -> Response:
        """Calls and tokens of the last `seconds`, by agent, key and purpose; most tokens first."""
        return page_response([plain(one) for one in store.calls.usage(time.time() - seconds, alias)])
