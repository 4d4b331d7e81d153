"""Promises that random requests rarely reach: requests by foreign web pages, large operator bodies, abandoned calls.

Each function yields broken promises as sentences.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx

from ratchet.proxy.api_keys import hash_key
from ratchet.store.states import KeyScope
from ratchet.store.store import open_store
from tests.harness.proxy.servers import ProxyProcess, eventually

PASSWORD = f"pw-{secrets.token_hex(8)}"  # in the upstream's URL
_PAGES = (
    {"origin": "http://localhost:3000"}, {"origin": "http://127.0.0.1:1"}, {"origin": "null"},
    {"origin": "https://evil.example"}, {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"},
)  # fmt: skip
_KINDS = ("application/json", "text/plain", "application/x-www-form-urlencoded")
_AGENTS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings")
_TOKENS = 20_000  # per minute, of the key that abandons its calls
_MINUTE = 61.0  # seconds, with a margin


def with_password(url: str) -> str:
    """Return an upstream's URL with a user name and the password."""
    return url.replace("//", f"//agent:{PASSWORD}@")


def operations(url: str, headers: dict[str, str]) -> list[tuple[str, str]]:
    """Return every method and path of the operator API."""
    paths = httpx.get(f"{url}/api/openapi.json", headers=headers, timeout=20).json()["paths"]
    return [
        (method.upper(), f"/api{path}".replace("{version}", "1")) for path, found in paths.items() for method in found
    ]


def foreign_pages(folder: Path, upstream_url: str) -> Iterator[str]:
    """Call a proxy without keys as web pages of other origins do: every reply must be 403."""
    folder.mkdir()
    proxy = ProxyProcess(folder, upstreams=[upstream_url])
    try:
        eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=5).status_code == 200, 30)
        tried = [("POST", f"/v1/{path}") for path in _AGENTS] + [("GET", "/v1/models")] + operations(proxy.url, {})
        with httpx.Client(base_url=proxy.url, timeout=20) as client:
            for page in _PAGES:
                for place, (method, path) in enumerate(tried):
                    headers = {**page, "content-type": _KINDS[place % len(_KINDS)]}
                    status = client.request(method, path, headers=headers, content=b"{}").status_code
                    if status != 403:
                        yield f"{status} to {method} {path} of a page with {page}"
    finally:
        proxy.kill()


def large_operator_bodies(url: str, headers: dict[str, str]) -> Iterator[str]:
    """Send a body of 9 MiB to every operation of the operator API: the reply must be a 413 error object."""
    for method, path in operations(url, headers):
        answer = httpx.request(
            method, url + path, headers=headers, content=b" " * (9 * 2**20), params={"alias": "agent"}, timeout=20
        )
        if answer.status_code != 413 or set(answer.json()) != {"error"}:
            yield f"{answer.status_code} to 9 MiB for {method} {path}: {answer.text[:100]}"


def abandoned_calls(url: str, store: str) -> Iterator[str]:
    """Abandon a call for 100 choices of 10^9 tokens: its key must wait at most a minute."""
    key = f"rk-{secrets.token_hex(8)}"
    opened = open_store(store)
    opened.keys.create("abandons", hash_key(key.encode()), KeyScope.AGENT, tokens_per_minute=_TOKENS)
    opened.close()
    huge = {
        "model": "agent",
        "messages": [{"role": "user", "content": "#say=on.and.on #delay=1"}],
        "max_tokens": 10**9,
        "n": 100,
    }
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
        client.get("/v1/models").raise_for_status()  # the proxy loads the key
        with contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/chat/completions", json={**huge, "stream": True}, timeout=0.5)
        wait = client.get("/v1/models").headers["x-ratelimit-reset-tokens"]
        if _seconds(wait) > _MINUTE:
            yield f"a key that abandoned one call waits {wait} for its tokens"


def _seconds(span: str) -> float:
    if span.endswith("ms"):
        return float(span[:-2]) / 1000
    minutes, _, rest = span.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))
