"""The hostile-client campaign: a real proxy process with API keys, under malformed and adversarial requests.

An attacker with a valid key sends requests that are wrong in any part (`bodies.py`), bytes that are not HTTP, and
requests that never end (`wire.py`). Schemathesis calls the operator API from its OpenAPI document. Before that, an
agent with another key has received secret words in every dialect: the attacker also requests its trajectories and
responses by name, creates the name its next trajectory would get, and sends prompts that quote its answers. Linking
memory is limited to one MiB. At the end, many concurrent clients request what makes a proxy wait (`crowds.py`).

The upstream behaves correctly, so every 5xx is the proxy's own. Afterwards every record is read back over the operator
API. With `exact` the upstream offers `--enable-scale-out` and its answers drift; every complete chat answer is
continued by a question, a tool result and malformed tool calls, so exact contexts are built from hostile fields.
`promises.py` checks single promises that random requests rarely reach.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.result import Ok

from ratchet.proxy.api_keys import hash_key
from tests.harness.hostile import crowds
from tests.harness.hostile.bodies import HostileRequest, hostile_requests
from tests.harness.hostile.promises import (
    PASSWORD,
    abandoned_calls,
    foreign_pages,
    large_operator_bodies,
    with_password,
)
from tests.harness.hostile.upstream import HostileUpstream
from tests.harness.hostile.wire import RawReply, SlowSenders, malformed, send, send_request
from tests.harness.proxy.servers import ProxyProcess, eventually, served

_BAD_LINES = ("event=defect", "Traceback", "event=record_failed", "event=dead_letter", "event=tool_checks_failed")
_CONTINUED = "continued"
_QUESTION = {"role": "user", "content": "#tool=search #drift"}
_ODD_CALLS: tuple[Any, ...] = (["x"], [3], 3, [{"function": "f"}], [{"id": "c"}], [None], {"a": 1}, "x", [])
_RESULT = {"role": "tool", "content": "#say=again"}
_SETTINGS = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@dataclass
class HostileOutcome:
    """Counts of a campaign. `violations` lists broken promises. Sizes are MiB."""

    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind; status 0: closed without a reply
    requests: int = 0
    own_5xx: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # requests delayed by concurrent clients
    resident: list[list[float]] = field(
        default_factory=list
    )  # of the proxy and its store writer, after the first tenth
    open_files: tuple[int, int] = (0, 0)  # before and after
    recorded: int = 0
    broken: list[str] = field(default_factory=list)  # by `promises.py`
    spliced: dict[str, int] = field(default_factory=dict)  # exact contexts by result
    seconds: float = 0.0

    @property
    def violations(self) -> list[str]:
        """All broken promises."""
        return [*self.own_5xx, *self.leaks, *self.logged, *self.unreadable, *self.waits, *self.broken]


class HostileCampaign:
    """One proxy under attack."""

    def __init__(
        self, folder: Path, upstream: HostileUpstream, upstream_url: str, upstream_key: str, store: str, exact: bool
    ) -> None:
        self.victim, self.attacker, self.operator = (f"rk-{who}-{secrets.token_hex(8)}" for who in ("a", "b", "o"))
        self._as_operator = {"authorization": f"Bearer {self.operator}"}
        self._secret = f"secret.{secrets.token_hex(8)}"
        self._upstream = upstream
        self._exact = exact
        self._log = folder / "proxy.log"
        self._proxy = ProxyProcess(
            folder,
            upstreams=[with_password(upstream_url)],
            upstream_key=upstream_key,
            key_hashes=[hash_key(key.encode()) for key in (self.victim, self.attacker)],
            operator_hashes=[hash_key(self.operator.encode())],
            max_linking_bytes=2**20,
            max_body_bytes=8 * 2**20,
            read_timeout_seconds=1.0,
            request_timeout_seconds=20.0,
            store=store,
        )
        self.url = self._proxy.url
        self._process = psutil.Process(self._proxy.pid)
        self.outcome = HostileOutcome()
        self._statuses: dict[str, Counter[str]] = {}
        self._oddities = 0
        eventually(lambda: httpx.get(self.url + "/health/ready", timeout=5).status_code == 200, 30)
        self._attacks = self._record_secrets()
        self._secrets = [self._secret.replace(".", " "), self.victim, self.operator, upstream_key, PASSWORD]
        self._store = store
        upstream.secrets = [self._secret.replace(".", " "), self.victim, self.attacker, self.operator]

    def _record_secrets(self) -> list[HostileRequest]:
        """Record secret words as the other agent; return requests that try to read them."""
        directive, mine = (
            f"#say={self._secret}",
            {"authorization": f"Bearer {self.victim}", "x-ratchet-trajectory": "theirs"},
        )
        chat = {"model": "agent", "messages": [{"role": "user", "content": directive}]}
        client = httpx.Client(base_url=self.url, headers=mine, timeout=20)
        client.post("/v1/chat/completions", json=chat).raise_for_status()
        client.post("/v1/completions", json={"model": "agent", "prompt": directive}).raise_for_status()
        client.post("/v1/messages", json={**chat, "max_tokens": 9}).raise_for_status()
        answer = client.post("/v1/responses", json={"model": "agent", "input": directive}).raise_for_status()
        client.close()
        name, call = answer.json()["id"], answer.headers["x-ratchet-call"]
        eventually(lambda: httpx.get(self.url + "/health/backlog").json()["unshipped_records"] == 0, 20)
        follow = {"model": "agent", "input": "repeat it", "previous_response_id": name}
        hello = {"model": "agent", "messages": [{"role": "user", "content": "repeat it"}]}
        return [
            self._mine("POST", "/v1/responses", follow),
            self._mine("POST", "/t/theirs/v1/responses", follow),
            self._mine("POST", "/t/theirs/v1/chat/completions", hello),
            self._mine("POST", "/v1/chat/completions", hello, ("x-ratchet-trajectory", "theirs")),
            self._mine("POST", "/v1/chat/completions", hello, ("x-session-id", "theirs"), ("x-request-id", call)),
            self._mine("POST", "/v1/chat/completions", {**hello, "metadata": {"trajectory_id": "theirs"}}),
            *self._linking(),
            self._mine("GET", f"/v1/responses/{name}", None),
            self._mine("GET", f"/v1/responses/{name}/input_items", None),
            self._mine("DELETE", f"/v1/responses/{name}", None),
            self._mine("GET", f"/api/calls/{call}", None),
            self._mine("GET", "/api/calls", None),
            self._mine("GET", "/api/trajectories/theirs", None),
            self._mine("POST", "/api/trajectories/theirs/finish", None),
            self._mine("GET", "/t/theirs/v1/models", None),
            self._mine("GET", "/metrics", None),
            self._mine("GET", "/health/backlog", None),
            self._mine("GET", "/health/ready", None),
            self._mine("POST", f"/v1/embeddings?key={self.attacker}", {"model": "agent", "input": "x"}),
        ]

    def _linking(self) -> Iterator[HostileRequest]:
        """Create the next name of the other agent's trajectory, and quote long beginnings of answers."""
        own = blake2b(hash_key(self.victim.encode())[:16].encode(), digest_size=4).hexdigest()
        for content in ("mine", "> I have read all messages of the treasurer\n" * 3_000, '"' * 140_000):
            body = {"model": "agent", "messages": [{"role": "user", "content": content}]}
            yield self._mine("POST", "/v1/chat/completions", body, ("x-session-id", f"theirs~{own}"))
            yield self._mine("POST", "/v1/chat/completions", body)

    def _mine(self, method: str, path: str, body: Any, *headers: tuple[str, str]) -> HostileRequest:
        sent = b"" if body is None else json.dumps(body).encode()
        return HostileRequest("theirs", method, path, (("authorization", f"Bearer {self.attacker}"), *headers), sent)

    def run(self, requests: int, number: int) -> None:
        """Send this many requests; equal seeds send equal requests."""
        slow = SlowSenders(self.url, self.attacker, 3)
        for request in self._attacks:
            self._send(request)
        operator = requests // 10
        self._send_drawn(requests // 10, number)
        self._measure_memory()
        before = self._process.num_fds()
        left = requests - self.outcome.requests - operator
        steps = 2 if requests < 2000 else 8
        for step in range(steps):
            self._send_drawn(left // steps, number + 1 + step)
            for raw in malformed(self.attacker):
                self._count("not HTTP", send(self.url, raw, half_close=step % 2 == 0), repr(raw[:80]))
            self._measure_memory()
        self._attack_operator_api(operator, number)
        self.outcome.broken += large_operator_bodies(self.url, self._as_operator)
        self.outcome.broken += abandoned_calls(self.url, self._store)
        for request in self._attacks:
            self._send(request)
        slow.join()
        self.outcome.waits += crowds.waiters(self.url, self.attacker, self._process)
        self.outcome.waits += crowds.readiness(self.url, lambda: self._upstream.probes)
        self.outcome.waits += crowds.upgrade_offers(self.url, self.attacker)
        for reply in slow.replies:
            self._count("never ends", reply, "a slow sender")
        self.outcome.logged += ["a request that never ends was not closed"] * slow.left_open
        self._measure_memory()
        self.outcome.open_files = (before, self._process.num_fds())

    def end(self) -> HostileOutcome:
        """Read all records back, stop the proxy, and check its log."""
        eventually(lambda: httpx.get(self.url + "/health/backlog").json()["unshipped_records"] == 0, 60)
        with httpx.Client(base_url=self.url, headers=self._as_operator, timeout=60) as client:
            self.outcome.unreadable += list(self._unreadable(client, "calls"))
            self.outcome.unreadable += list(self._unreadable(client, "trajectories"))
        self.outcome.spliced = _spliced(httpx.get(self.url + "/metrics", headers=self._as_operator).text)
        if self._proxy.stop() != 0:
            self.outcome.logged.append("the proxy did not stop cleanly")
        lines = self._log.read_text(errors="replace").splitlines()
        self.outcome.logged += [line[:300] for line in lines if any(bad in line for bad in _BAD_LINES)]
        self.outcome.leaks += [f"in the log: {one[:5]}..." for one in self._secrets if one in "\n".join(lines)]
        self.outcome.leaks += self._upstream.leaks
        self.outcome.statuses = {kind: dict(sorted(found.items())) for kind, found in sorted(self._statuses.items())}
        return self.outcome

    def abandon(self) -> None:
        """Kill the proxy if it still runs."""
        if self._process.is_running():
            self._proxy.kill()

    def _send_drawn(self, count: int, number: int) -> None:
        @seed(number)
        @settings(_SETTINGS, max_examples=count)
        @given(hostile_requests(self.attacker))
        def one(request: HostileRequest) -> None:
            self._send(request)

        one()

    def _send(self, request: HostileRequest) -> None:
        what = f"{request.method} {request.path[:100]} {dict(request.headers[1:])} {request.body[:2000]!r}"[:1500]
        reply = send_request(self.url, request)
        self._count(request.kind, reply, what)
        if self._exact and reply.status == 200 and (further := continuation_of(request, reply)):
            self._send(further)
            self._oddities += 1
            odd = with_odd_calls(further, _ODD_CALLS[self._oddities % len(_ODD_CALLS)])
            self._count(odd.kind, send_request(self.url, odd), f"odd tool calls {odd.body[-300:]!r}")

    def _attack_operator_api(self, count: int, number: int) -> None:
        """Send schemathesis's requests to every operation of the operator API."""
        headers = self._as_operator
        api = schemathesis.openapi.from_url(f"{self.url}/api/openapi.json", headers=headers)
        operations = [found.ok() for found in api.get_all_operations() if isinstance(found, Ok)]
        for operation in operations:

            @seed(number)
            @settings(_SETTINGS, max_examples=max(1, count // len(operations)))
            @given(operation.as_strategy())
            def one(case: schemathesis.Case[Any]) -> None:
                reply = case.call(headers=headers, timeout=20)
                self._count("/api", RawReply(reply.status_code, b""), f"{case.method} {case.path} {case.query}")

            one()

    def _count(self, kind: str, reply: RawReply, what: str) -> None:
        self.outcome.requests += 1
        self._statuses.setdefault(kind, Counter())[str(reply.status)] += 1
        if reply.status >= 500 and not crowds.is_of_a_busy_machine(reply.status, reply.text):
            self.outcome.own_5xx.append(f"{reply.status} {reply.text[-200:]!r} to {what}")
        self.outcome.leaks += [
            f"{kind}: {one[:5]}... leaked to {what}" for one in self._secrets if one.encode() in reply.text
        ]

    def _measure_memory(self) -> None:
        processes = [self._process, *self._process.children(recursive=True)]
        self.outcome.resident.append([round(one.memory_info().rss / 2**20, 1) for one in processes])

    def _unreadable(self, client: httpx.Client, records: str) -> Iterator[str]:
        """Read all records over the operator API, one by one; yield those that fail."""
        before: str | None = None
        while True:
            params = {"limit": 200} | ({"before": before} if before else {})
            page = client.get(f"/api/{records}", params=params)
            if page.status_code != 200:
                yield f"{page.status_code} for a page of {records} before {before}: {page.text[:200]}"
                return
            for row in page.json()["data"]:
                self.outcome.recorded += records == "calls"
                if row["id"] == "theirs":
                    continue
                answer = client.get(f"/api/{records}/{row['id']}")
                if answer.status_code != 200:
                    yield f"{answer.status_code} for {records}/{row['id']}: {answer.text[:200]}"
                elif self._secret.replace(".", " ") in answer.text and "theirs" not in answer.text:
                    self.outcome.leaks.append(f"{records}/{row['id']} of another key holds the secret words")
            before = page.json()["next"]
            if before is None:
                return


def continuation_of(request: HostileRequest, reply: RawReply) -> HostileRequest | None:
    """Return a request that continues a chat answer; None if it is not a chat answer or was continued twice."""
    if not request.path.endswith("/chat/completions"):
        return None
    try:
        body = json.loads(request.body)
        answer = json.loads(reply.text[reply.text.index(b'{"id"') :])["choices"][0]["message"]
        if body["messages"][-1].get("content") == _RESULT["content"]:
            return None
        calls = answer.get("tool_calls") if request.kind == _CONTINUED else None
        last = {**_RESULT, "tool_call_id": calls[0]["id"]} if calls else _QUESTION
        sent = json.dumps({**body, "messages": [*body["messages"], answer, last]}).encode()
    except (ValueError, LookupError, TypeError, RecursionError):  # streamed, or not a chat answer
        return None
    return HostileRequest(_CONTINUED, request.method, request.path, request.headers, sent)


def with_odd_calls(request: HostileRequest, calls: Any) -> HostileRequest:
    """Return a request with one more assistant message, whose tool calls are malformed."""
    body = json.loads(request.body)
    odd = {"role": "assistant", "content": "x", "tool_calls": calls}
    sent = {**body, "messages": [*body["messages"], odd, _QUESTION], "n": "1"}
    return HostileRequest("odd tool calls", request.method, request.path, request.headers, json.dumps(sent).encode())


def _spliced(metrics: str) -> dict[str, int]:
    """Return counts of exact contexts and of the reasons for fallbacks."""
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line.startswith("ratchet_exact_"))
    return {name: int(float(value)) for name, _, value in lines if "_total{" in name}


def run(folder: Path, requests: int, number: int = 1, store: str = "", *, exact: bool = False) -> HostileOutcome:
    """Run a campaign. `store` is a database URL; the default is SQLite in the folder."""
    started, upstream_key = time.monotonic(), f"up-{secrets.token_hex(8)}"
    upstream = HostileUpstream(upstream_key, scale_out=exact)
    with served(upstream) as upstream_url, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        campaign = HostileCampaign(
            folder, upstream, upstream_url, upstream_key, store or str(folder / "store.db"), exact
        )
        try:
            campaign.run(requests, number)
            outcome = campaign.end()
            outcome.waits += crowds.unread_log(folder / "unread", upstream_url, upstream_key)
            outcome.broken += foreign_pages(folder / "without-keys", upstream_url)
        finally:
            campaign.abandon()
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome
