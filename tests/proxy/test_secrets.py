"""Secrets: no API key is stored or logged, no URL of a client is opened, no key sees data of another key."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.proxy.api_keys import hash_key
from ratchet.proxy.settings import ProxySettings
from ratchet.store.states import KeyScope
from ratchet.store.store import open_store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served

KEYS = {who: f"rk-{who}-{hashlib.sha256(who.encode()).hexdigest()}" for who in ("agent", "stored", "operator", "wrong")}
UPSTREAM_KEY = "sk-upstream-" + hashlib.sha256(b"upstream").hexdigest()
USER: Any = {"role": "user", "content": "hi"}
DIALECTS: dict[str, Any] = {
    "/v1/chat/completions": {"model": "agent", "messages": [USER]},
    "/v1/completions": {"model": "agent", "prompt": "hi"},
    "/v1/responses": {"model": "agent", "input": "hi"},
    "/v1/messages": {"model": "agent", "max_tokens": 5, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "agent", "messages": [USER]},
    "/v1/embeddings": {"model": "agent", "input": "hi"},
}


def forms(secret: str) -> list[bytes]:
    """Return the encodings in which a secret may be written to a file."""
    plain = secret.encode()
    return [plain, base64.b64encode(plain).rstrip(b"=")[:-1], plain.hex().encode(), secret[::-1].encode()]


def make_calls(url: str, key: str, headers: dict[str, str]) -> list[int]:
    """Make calls that are answered, fail and are refused, in every dialect; return their statuses."""
    statuses = []
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        for path, body in DIALECTS.items():
            for words in ("hi", "#status=500", "#html", "#fault=2"):
                request = msgs(body, words)
                for extra in ({}, {"stream": True}):
                    with contextlib.suppress(httpx.RemoteProtocolError):
                        statuses.append(client.post(path, json={**request, **extra}).status_code)
            statuses.append(client.post(f"{path}?key={key}&api_key={key}", content=b"{").status_code)
        statuses.append(client.get(f"/v1/nowhere?key={key}").status_code)
        statuses.append(client.get("/api/calls").status_code)
    return statuses


def msgs(body: Any, words: str) -> Any:
    """Return the body with another user message."""
    name = next(name for name in ("messages", "prompt", "input") if name in body)
    return {**body, name: [{"role": "user", "content": words}] if name == "messages" else words}


def ready(url: str) -> None:
    eventually(lambda: httpx.get(url + "/health/ready").status_code == 200)


@pytest.mark.slow
def test_journal_store_logs_and_metrics_contain_no_key(vllm_url: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store.db"))
    store.keys.create("stored", hash_key(KEYS["stored"].encode()), KeyScope.AGENT)
    store.close()
    settings: Any = {
        "upstreams": [vllm_url],
        "upstream_key": UPSTREAM_KEY,
        "key_hashes": [hash_key(KEYS["agent"].encode())],
        "operator_hashes": [hash_key(KEYS["operator"].encode())],
    }
    output = b""
    for ending in ("kill", "stop"):
        proxy = ProxyProcess(tmp_path, **settings)
        ready(proxy.url)
        statuses: set[int] = set()
        for key in KEYS.values():
            statuses |= set(make_calls(proxy.url, key, {"authorization": f"Bearer {key}:run-1"}))
            statuses.add(httpx.get(proxy.url + "/api/calls", headers={"x-api-key": key}).status_code)
        assert {200, 400, 401, 403, 500, 502} <= statuses
        output += httpx.get(proxy.url + "/metrics").content + httpx.get(proxy.url + "/health/backlog").content
        if ending == "kill":
            proxy.kill()
            output += b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        else:
            assert proxy.stop() == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"store.db", "proxy.log"} <= {path.name for path in files}
    assert any(path.parent.name == "journal" for path in files)
    assert sum(b"run-1" in data for data in files.values()) >= 1  # the files do contain the recorded content
    for secret in (*KEYS.values(), UPSTREAM_KEY):
        for form in forms(secret):
            assert [str(path) for path, data in files.items() if form in data] == []
            assert form not in output


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server that records each connection, and its URL."""
    opened: list[str] = []

    class ConnectionRecorder(BaseHTTPRequestHandler):
        def handle(self) -> None:
            opened.append(str(self.client_address))

    server = ThreadingHTTPServer(("127.0.0.1", 0), ConnectionRecorder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", opened
    server.shutdown()
    thread.join()
    server.server_close()


def test_no_url_of_a_client_is_opened(proxy: Proxy, listener: tuple[str, list[str]]) -> None:
    url, opened = listener
    picture = {"type": "image_url", "image_url": {"url": url + "/x.png"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": url + "/schema.json"}}}
    webhook = {"webhook_url": url, "callback": url, "metadata": {"webhook": url}, "file_id": url, "user": url}
    part = {"type": "input_image", "image_url": url}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}], "tools": [tool], **webhook}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "#tool=f"}], "tools": [tool]}),
        ("/v1/completions", {"prompt": url, **webhook}),
        ("/v1/responses", {"input": [{"role": "user", "content": [part]}], **webhook}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": url, "server_label": "x"}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [source]}], **webhook}),
        ("/v1/embeddings", {"input": url, **webhook}),
        ("/v1/files", {"file": url, "purpose": "batch"}),
    ]  # fmt: skip
    headers = {"x-webhook-url": url, "x-forwarded-host": url[7:], "forwarded": f"host={url[7:]}", "referer": url}
    for path, body in bodies:
        answer = proxy.http.post(path, json={"model": "agent", **body}, headers=headers)
        assert answer.status_code in (200, 400, 404), answer.text
    proxy.http.get("/v1/models", headers=headers)
    proxy.settled()
    assert opened == []
    httpx.Client().close()
    with pytest.raises(httpx.HTTPError):
        httpx.get(url)
    assert len(opened) == 1  # the listener works


def test_no_key_sees_data_of_another_key(start: Start, vllm: ScriptedVllm) -> None:
    proxy = start(key_hashes=[hash_key(KEYS[who].encode()) for who in ("agent", "stored")])
    ours, theirs = ({"authorization": f"Bearer {KEYS[who]}"} for who in ("agent", "stored"))
    secret = "the code is forty two thousand and seventeen"
    prompt = f"#say={secret.replace(' ', '.')}"
    made = proxy.http.post("/v1/responses", json={"model": "agent", "input": prompt}, headers=ours)
    named = proxy.http.post(
        "/t/job/v1/chat/completions", json=msgs(DIALECTS["/v1/chat/completions"], prompt), headers=ours
    )
    assert secret in made.text
    proxy.settled()
    vllm.calls.clear()
    name, call, run = made.json()["id"], made.headers["x-ratchet-call"], made.headers["x-ratchet-trajectory"]
    hello = DIALECTS["/v1/chat/completions"]
    follow = {"model": "agent", "input": "repeat it", "previous_response_id": name}
    tries: list[tuple[str, str, Any, dict[str, str]]] = [
        ("POST", "/v1/responses", follow, {}),
        ("POST", "/t/job/v1/responses", follow, {}),
        ("POST", "/v1/responses", follow, {"x-ratchet-trajectory": run}),
        ("POST", "/t/job/v1/chat/completions", hello, {}),
        ("POST", f"/t/{run}/v1/chat/completions", hello, {}),
        ("POST", "/v1/chat/completions", hello, {"x-ratchet-trajectory": "job", "x-request-id": call}),
        ("POST", "/v1/chat/completions", hello, {"x-session-id": run}),
        ("POST", "/v1/chat/completions", {**hello, "metadata": {"trajectory_id": run}}, {}),
        ("POST", "/v1/chat/completions", hello, {"authorization": f"Bearer {KEYS['stored']}:job"}),
        *(("GET", f"/v1/responses/{name}{end}", None, {}) for end in ("", "/input_items")),
        *(("DELETE", f"/v1/responses/{name}", None, {}), ("POST", f"/v1/responses/{name}/cancel", None, {})),
        *(("GET", f"/api/{path}", None, {}) for path in ("calls", f"calls/{call}", f"trajectories/{run}")),
        ("POST", f"/api/trajectories/{run}/finish", None, {}),
        ("POST", "/api/feedback", {"trajectory_id": run, "value": 0}, {}),
        ("GET", f"/v1/models/{run}", None, {}),
        ("GET", f"/t/{run}/v1/models", None, {}),
        ("GET", "/metrics", None, {}),
        ("GET", "/health/backlog", None, {}),
    ]  # fmt: skip
    for method, path, body, headers in tries:
        answer = proxy.http.request(method, path, json=body, headers={**theirs, **headers})
        assert answer.status_code in (200, 403, 404), (path, answer.text)
        assert secret not in answer.text
        assert answer.headers.get("x-ratchet-trajectory") not in (run, "job")
        if path.startswith("/api"):
            assert answer.status_code == (404 if "feedback" in path else 403)
        elif "responses" in path:
            assert answer.status_code == 404
    assert secret not in str(vllm.calls)
    proxy.settled()
    for owned in (run, named.headers["x-ratchet-trajectory"]):
        assert len(proxy.store.trajectories.read(owned).calls) == 1


class Guarded:
    """A scripted vLLM behind a user name and a password."""

    def __init__(self, model: ScriptedVllm) -> None:
        self._model = model
        self.refused = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pair = b"Basic " + base64.b64encode(b"alice:" + PASSWORD.encode())
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != pair:
            self.refused += 1
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._model(scope, receive, send)


PASSWORD = "s3cret/@:word"  # has characters that a URL must percent-encode
IN_A_URL = "alice:s3cret%2F%40%3Aword@"


@pytest.mark.slow
def test_a_password_in_an_upstreams_url_reaches_the_upstream_and_appears_nowhere(
    start: Start, vllm: ScriptedVllm, store_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded, shown = Guarded(vllm), []
    with served(guarded) as url:
        proxy = start(upstreams=(url.replace("//", f"//{IN_A_URL}"),), request_timeout_seconds=2.0, log_level="debug")
        for path, body in DIALECTS.items():
            for words in ("hi", "#status=500", "#html", "#fault=2", "#cut=1", "#wait=3"):
                with contextlib.suppress(httpx.RemoteProtocolError):
                    shown.append(proxy.http.post(path, json=msgs(body, words), headers={"x-ratchet-task": "t"}).text)
                if words != "#wait=3":
                    with contextlib.suppress(httpx.RemoteProtocolError):
                        shown.append(proxy.http.post(path, json={**msgs(body, words), "stream": True}).text)
        assert (guarded.refused, len(vllm.calls) > 30) == (0, True)
    shown += [proxy.http.post(path, json=body).text for path, body in DIALECTS.items()]
    assert not any(url.removeprefix("http://") in text for text in shown), "agents do not learn where the upstream is"
    assert f"upstream {url}" in caplog.text
    proxy.settled()
    for path in ("/metrics", "/health/ready", "/api/calls?limit=1000", "/api/alarms", "/api/overview"):
        shown.append(proxy.http.get(path).text)
    assert f'upstream="{url}"' in shown[-5]
    with contextlib.closing(sqlite3.connect(store_file)) as rows:
        assert rows.execute("SELECT DISTINCT upstream FROM calls WHERE upstream IS NOT NULL").fetchall() == [(url,)]
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    pair = base64.b64encode(f"alice:{PASSWORD}".encode())
    for output in (*map(str.encode, shown), caplog.text.encode(), *files):
        for secret in (b"s3cret", b"alice", pair):
            assert secret not in output


@pytest.mark.parametrize("wrong", ["alice:s3cret@host:8000", "http://alice:s3/cret@host", "http://alice:s3cret@"])
def test_the_error_about_an_invalid_upstream_contains_no_password(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write it like http://") as error:
        ProxySettings(upstreams=(wrong,), model="m", store="-", journal=tmp_path)
    assert "cret" not in str(error.value)
    right = ProxySettings(upstreams=(f"http://{IN_A_URL}host/v1",), model="m", store="-", journal=tmp_path)
    assert (right.upstreams, "s3cret" in repr(right)) == ((f"http://{IN_A_URL}host",), False)
