"""GET /v1/models and /v1/models/{id}: the aliases, every version that can be asked for by name, other models."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from proxy.asgi import PATH, send_json
from proxy.errors import NotFound
from proxy.policy import PolicyBook


class Models:
    """The endpoint for the list and for one model."""

    def __init__(self, book: PolicyBook) -> None:
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards = self._cards()
        path: str = scope[PATH]
        if path == "/models":
            await send_json(send, 200, {"object": "list", "data": list(cards.values())})
            return
        name = unquote(path.removeprefix("/models/"))
        if name not in cards:
            raise NotFound(
                f"the model {name!r} does not exist; there are: {', '.join(cards)}",
                param="model",
                code="model_not_found",
            )
        await send_json(send, 200, cards[name])

    def _cards(self) -> dict[str, dict[str, Any]]:
        versions = list(self._book.known())
        cards: dict[str, dict[str, Any]] = {}
        for alias in self._book.aliases:
            born = min((policy.created_at for policy in versions if policy.alias == alias), default=0.0)
            cards[alias] = _card(alias, born, None)
        for policy in versions:
            name = f"{policy.alias}@{policy.version}"
            cards[name] = _card(name, policy.created_at, policy.alias) | {"state": str(policy.state)}
        return cards | {name: _card(name, 0.0, None) | {"owned_by": "upstream"} for name in sorted(self._book.others)}


def _card(name: str, created_at: float, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "ratchet", "parent": parent}
