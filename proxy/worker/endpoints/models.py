"""GET /v1/models and /v1/models/{id}: the agents, every version that can be requested by name, other models.

A key that is limited to agents or models sees these only. Cards have the fields of vLLM's: an agent's `root` is the
base model as vLLM names it, and `max_model_len` the shortest context of a replica, in tokens.
Anthropic's SDKs, recognised by their header, get Anthropic's format. Everything is on one page.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.versions.policy_cache import Access, PolicyCache
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.wire.asgi import CALLER, PATH, send_json
from ratchet.proxy.wire.error_shapes import speaks_anthropic

Card = dict[str, Any]


class ModelsEndpoint:
    """The endpoint of the list and of a single model."""

    def __init__(self, policies: PolicyCache, pool: ReplicaPool[Replica]) -> None:
        self._policies = policies
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access: Access = scope[CALLER].access
        cards = self._cards(access)
        path: str = scope[PATH]
        anthropic = speaks_anthropic(scope)
        if path == "/models":
            await send_json(send, 200, _anthropic_page(cards) if anthropic else _page(cards))
            return
        name = path.removeprefix("/models/")
        if name not in cards:
            raise self._policies.unknown_model(name, access)
        await send_json(send, 200, _anthropic(cards[name]) if anthropic else cards[name])

    def _cards(self, access: Access) -> dict[str, Card]:
        own = self._policies.list_agents(access)
        versions = [policy for policy in self._policies.list_versions() if policy.alias in own]
        lengths = [replica.max_model_len for replica in self._pool.replicas if replica.max_model_len is not None]
        served = {
            "owned_by": "ratchet",
            "root": next((replica.root for replica in self._pool.replicas if replica.root is not None), None),
            "max_model_len": min(lengths, default=None),
        }
        cards: dict[str, Card] = {}
        for alias in own:
            created = min((policy.created_at for policy in versions if policy.alias == alias), default=0.0)
            cards[alias] = _card(alias, created) | served
        for policy in versions:
            name = f"{policy.alias}@{policy.version}"
            more = {"parent": policy.alias, "state": str(policy.state)}
            cards[name] = _card(name, policy.created_at) | served | more
        return cards | {name: _card(name, 0.0) for name in self._policies.list_models(access)}


def _page(cards: Mapping[str, Card]) -> Card:
    return {"object": "list", "data": list(cards.values())}


def _anthropic_page(cards: Mapping[str, Card]) -> Card:
    names = list(cards)
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": [_anthropic(card) for card in cards.values()], "has_more": False, **ends}


def _anthropic(card: Card) -> Card:
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created, "lifecycle": "active"}


def _card(name: str, created_at: float) -> Card:
    """Return the card of a model of which nothing else is known."""
    created = int(created_at)
    permission = {
        "id": f"modelperm-{name}", "object": "model_permission", "created": created, "allow_create_engine": False,
        "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False, "allow_view": True,
        "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    return {
        "id": name, "object": "model", "created": created, "owned_by": "upstream", "root": None, "parent": None,
        "max_model_len": None, "permission": [permission],
    }  # fmt: skip
