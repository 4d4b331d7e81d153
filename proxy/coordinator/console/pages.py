"""Serves the console: static files under /ui, read once.

Promises: a page loads and runs only these files, whatever the records that it shows contain; no other site can frame
it. The files contain no data and need no key; the data comes from /api.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from starlette.types import Receive, Scope, Send

from ratchet.proxy.errors import NotFound, method_not_allowed
from ratchet.proxy.wire.asgi import Headers, header, send_bytes, unknown_route_error

MOUNT = "/ui"
_FOLDER = Path(__file__).parent / "static"
_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_GUARD: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"cache-control", b"no-cache"),  # always revalidate: a new release shows at once; the ETag saves the bytes
]


class _File:
    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.tag = b'"' + sha256(self.body).hexdigest()[:20].encode() + b'"'
        self.kind = _KINDS[path.suffix]


class Console:
    """GET /ui and everything under it."""

    def __init__(self) -> None:
        self._files = dict(_files())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise method_not_allowed(f"{scope['path'][:200]} takes GET, HEAD, not {scope['method']}", "GET, HEAD")
        path: str = scope["path"]
        if path == MOUNT:
            await send_bytes(send, 307, b"", [(b"location", b"ui/"), *_GUARD])
            return
        found = self._files.get(path.removeprefix(MOUNT + "/"))
        if found is None:
            raise NotFound(f"no page {path[:200]}; the console is at {MOUNT}/")
        headers: Headers = [(b"etag", found.tag), *_GUARD]
        if header(scope, b"if-none-match") == found.tag.decode():
            await send_bytes(send, 304, b"", headers)
        else:
            await send_bytes(send, 200, found.body, [(b"content-type", found.kind), *headers])


def _files() -> Iterator[tuple[str, _File]]:
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _KINDS:
            file = _File(path)
            yield path.name, file
            if path.name == "index.html":
                yield "", file


async def front(scope: Scope, receive: Receive, send: Send) -> None:
    """GET / redirects browsers to the console; other clients get the error for an unknown route."""
    if scope["path"] != "/" or "text/html" not in (header(scope, b"accept") or ""):
        raise unknown_route_error(scope)
    await send_bytes(send, 307, b"", [(b"location", b"ui/"), *_GUARD])
