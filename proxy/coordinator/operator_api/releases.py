"""GET /api/releases: which versions serve, with which shares and evidence, and how that came about."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from ratchet.proxy.coordinator.operator_api.json_responses import page_response
from ratchet.store.reports.version_reports import read_release
from ratchet.store.store import Store

_DECISIONS = 200  # the newest ones


def add_releases(api: FastAPI, store: Store) -> None:
    """Add the route."""

    @api.get("/releases")
    def releases(alias: str | None = None) -> Response:
        """By alias: the versions that serve with role and share, anchor, pin, evidence; and the newest decisions."""
        names = [alias] if alias else sorted(store.policies.live())
        found = [(name, read_release(store, name)) for name in names]
        return page_response([one | _history(store, name) for name, one in found if one is not None])


def _history(store: Store, alias: str) -> dict[str, Any]:
    return {
        "evidence": [
            dict(one.evidence) | {"version": one.version, "at": one.updated_at}
            for one in store.releases.evidence(alias)
        ],
        "decisions": [
            {
                "version": one.version, "action": one.action, "by": one.decided_by, "reason": one.reason,
                "at": one.decided_at, "shares": one.evidence.get("shares"),
            }
            for one in reversed(store.decisions.decisions_of(alias, limit=_DECISIONS))
        ],
    }  # fmt: skip
