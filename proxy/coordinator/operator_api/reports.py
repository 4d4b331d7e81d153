"""GET /api/overview, /training, /tools, /behavior, /waits and /alarms: what the console's pages show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response

from ratchet.proxy.coordinator.operator_api.json_responses import json_response, page_response, plain
from ratchet.proxy.coordinator.operator_api.list_filters import Limit
from ratchet.proxy.coordinator.operator_api.overview import Overview, concerns
from ratchet.store.db.verbs import CachedCount
from ratchet.store.records import Record
from ratchet.store.store import Store

_R = TypeVar("_R", bound=Record)


class _ByAlias:
    """A list of records per alias, cached by its cost."""

    def __init__(self, read: Callable[[str], list[_R]]) -> None:
        self._read = read
        self._cached: dict[str, CachedCount[list[Any]]] = {}

    def __call__(self, alias: str) -> list[dict[str, Any]]:
        if alias not in self._cached:
            self._cached[alias] = CachedCount(lambda: self._read(alias))
        return [plain(one) for one in self._cached[alias]()]


def add_reports(api: FastAPI, store: Store) -> None:
    """Add the routes."""
    reader = Overview(store)
    _add_by_version(api, store)

    @api.get("/overview")
    def overview(alias: str | None = None) -> Response:
        """By alias: scores by version, before and after, ramp, job progress; rounds and alarms."""
        return json_response(reader.read(alias))

    @api.get("/training")
    def training(alias: str | None = None, limit: Limit = 100, before: str | None = None) -> Response:
        """Training rounds, newest first, and the number of trajectories by state."""
        found = store.rounds.page(alias, limit, before)
        return json_response(
            {
                "rounds": [plain(one) for one in found],
                "next": found[-1].id if len(found) == limit else None,
                "trajectories": store.trajectories.counts(alias),
                "dropped": store.trajectories.drop_counts(alias),
                "dropped_groups": store.groups.drop_counts(alias),
            }
        )

    @api.get("/tools")
    def tools(alias: str | None = None, version: int | None = None) -> Response:
        """Tool calls by tool and policy version, with outcomes and results; most called first."""
        return page_response([plain(tally) for tally in store.tools.counts_by_version(alias, version)])

    @api.get("/alarms")
    def alarms(active: bool = False, alias: str | None = None) -> Response:
        """Alarms, latest first; with `active`, only those that are not cleared; of one agent: those of all, too."""
        found = store.alarms.active() if active else store.alarms.all()
        known = store.policies.counts() if alias else {}
        return page_response([plain(alarm) for alarm in found if concerns(alarm.name, alias, known)])


def _add_by_version(api: FastAPI, store: Store) -> None:
    """Behavior by version, and waiting times."""
    behavior = _ByAlias(lambda alias: store.behavior.by_version(alias))
    waiting = _ByAlias(lambda alias: store.waiting_times.stages(alias))

    def of_agents(alias: str | None, read: _ByAlias) -> Response:
        names = sorted(store.policies.counts())
        return page_response([{"alias": name, "rows": read(name)} for name in names if alias in (None, name)])

    @api.get("/behavior")
    def behaviors(alias: str | None = None) -> Response:
        """By alias and version: calls, tool calls, tokens and seconds per trajectory; use and time of each tool."""
        return of_agents(alias, behavior)

    @api.get("/waits")
    def waits(alias: str | None = None) -> Response:
        """By alias: how long trajectories and rounds wait in each stage, as percentiles in seconds."""
        return of_agents(alias, waiting)
