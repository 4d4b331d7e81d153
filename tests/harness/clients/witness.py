"""Records the requests that clients send to the proxy, and the statuses of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class SeenRequest:
    """One request as received, and the status of its answer."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes = b""
    status: int = 0


@dataclass
class Witness:
    """An ASGI application that wraps another one."""

    app: ASGIApp | None = None
    seen: list[SeenRequest] = field(default_factory=list)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app`."""
        self.app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = SeenRequest(scope["method"], scope["path"], dict(scope["headers"]))
        self.seen.append(seen)

        async def receive_seen() -> Message:
            message = await receive()
            seen.body += message.get("body", b"")
            return message

        async def send_seen(message: Message) -> None:
            seen.status = message.get("status", seen.status)
            await send(message)

        await self.app(scope, receive_seen, send_seen)
