"""Hostile clients against a real proxy process with keys: no 5xx of its own making, no growth, nothing of another key.

An agent with a key sends requests with something wrong in any place (`hostile_bodies`), what is no HTTP at all, and
requests that never end (`hostile_wire`); schemathesis asks the operator API from its own OpenAPI document. Before, an
agent with another key has said secret words in every dialect; its runs and responses are asked for by name as well, the
name is begun that its next run would get, and prompts repeat how answers begin. Memory is bounded to a megabyte.
At the end crowds ask at once for what makes a proxy wait (`hostile_crowds`).
The upstream behaves, so every 5xx is the proxy's own. Then everything recorded is read back over the operator API.

With --exact-context the upstream offers `--enable-scale-out`, and its answers drift; every whole chat answer is
gone on from, by a question, by a tool's result, and with tool calls of an odd form: hostile fields come with contexts
that are spliced. Single promises (pages of other servers, large bodies to operators, abandoned calls, the password in
the upstream's URL) are tried by `hostile_promises`.

    python -m benchmarks.hostile [--requests 10000] [--seed 1] [--store sqlite|postgresql] [--exact-context] [--json]
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.result import Ok

from benchmarks import hostile_crowds
from benchmarks.databases import postgres_server
from benchmarks.hostile_bodies import Asking, askings
from benchmarks.hostile_promises import PASSWORD, abandoned_calls, foreign_pages, large_operator_bodies, with_password
from benchmarks.hostile_upstream import Upstream
from benchmarks.hostile_wire import Reply, SlowSenders, ask, malformed, send
from ratchet.proxy.api_keys import hash_key
from tests.harness.proxy.servers import ProxyProcess, eventually, served

_BAD_LINES = ("event=defect", "Traceback", "event=record_failed", "event=dead_letter", "event=tool_checks_failed")
_CONTINUED = "continued"
_QUESTION = {"role": "user", "content": "#tool=search #drift"}
_ODD_CALLS: tuple[Any, ...] = (["x"], [3], 3, [{"function": "f"}], [{"id": "c"}], [None], {"a": 1}, "x", [])
_RESULT = {"role": "tool", "content": "#say=again"}
_CALM = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@dataclass
class Outcome:
    """What a campaign came to; `violations` is empty where every promise held. Sizes are MiB."""

    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind; 0: closed without a reply
    requests: int = 0
    own_5xx: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # what a crowd held up
    resident: list[list[float]] = field(default_factory=list)  # of the proxy and its shipper, from the first tenth on
    open_files: tuple[int, int] = (0, 0)  # before and after
    recorded: int = 0
    broken: list[str] = field(default_factory=list)  # single promises
    spliced: dict[str, int] = field(default_factory=dict)  # of exact_context, by how it came out
    seconds: float = 0.0

    @property
    def violations(self) -> list[str]:
        """Return what must not be."""
        return [*self.own_5xx, *self.leaks, *self.logged, *self.unreadable, *self.waits, *self.broken]


class Campaign:
    """One proxy and what is done to it."""

    def __init__(
        self, folder: Path, upstream: Upstream, upstream_url: str, upstream_key: str, store: str, exact: bool
    ) -> None:
        self.victim, self.attacker, self.operator = (f"rk-{who}-{secrets.token_hex(8)}" for who in ("a", "b", "o"))
        self._as_operator = {"authorization": f"Bearer {self.operator}"}
        self._word = f"secret.{secrets.token_hex(8)}"
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
            max_linking_bytes_per_key=2**19,
            max_body_bytes=8 * 2**20,
            read_timeout_seconds=1.0,
            request_timeout_seconds=20.0,
            store=store,
        )
        self.url = self._proxy.url
        self._process = psutil.Process(self._proxy.pid)
        self.outcome = Outcome()
        self._statuses: dict[str, Counter[str]] = {}
        self._oddities = 0
        eventually(lambda: httpx.get(self.url + "/health/ready", timeout=5).status_code == 200, 30)
        self._theirs = self._speak()
        self._hidden = [self._word.replace(".", " "), self.victim, self.operator, upstream_key, PASSWORD]
        self._store = store
        upstream.secrets = [self._word.replace(".", " "), self.victim, self.attacker, self.operator]

    def _speak(self) -> list[Asking]:
        """Say secret words as the other agent; return the requests that try to get at them."""
        said, mine = f"#say={self._word}", {"authorization": f"Bearer {self.victim}", "x-ratchet-trajectory": "theirs"}
        chat = {"model": "agent", "messages": [{"role": "user", "content": said}]}
        client = httpx.Client(base_url=self.url, headers=mine, timeout=20)
        client.post("/v1/chat/completions", json=chat).raise_for_status()
        client.post("/v1/completions", json={"model": "agent", "prompt": said}).raise_for_status()
        client.post("/v1/messages", json={**chat, "max_tokens": 9}).raise_for_status()
        answer = client.post("/v1/responses", json={"model": "agent", "input": said}).raise_for_status()
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

    def _linking(self) -> Iterator[Asking]:
        """Begin what the other agent's trajectory would be named next, and quote beginnings without end."""
        own = blake2b(hash_key(self.victim.encode())[:16].encode(), digest_size=4).hexdigest()
        for content in ("mine", "> I have read all messages of the treasurer\n" * 3_000, '"' * 140_000):
            body = {"model": "agent", "messages": [{"role": "user", "content": content}]}
            yield self._mine("POST", "/v1/chat/completions", body, ("x-session-id", f"theirs~{own}"))
            yield self._mine("POST", "/v1/chat/completions", body)

    def _mine(self, method: str, path: str, body: Any, *headers: tuple[str, str]) -> Asking:
        sent = b"" if body is None else json.dumps(body).encode()
        return Asking("theirs", method, path, (("authorization", f"Bearer {self.attacker}"), *headers), sent)

    def run(self, requests: int, number: int) -> None:
        """Send so many requests, in the order of their seed."""
        slow = SlowSenders(self.url, self.attacker, 3)
        for asking in self._theirs:
            self._ask(asking)
        operator = requests // 10
        self._given(requests // 10, number)
        self._look()
        before = self._process.num_fds()
        left = requests - self.outcome.requests - operator
        steps = 2 if requests < 2000 else 8
        for step in range(steps):
            self._given(left // steps, number + 1 + step)
            for raw in malformed(self.attacker):
                self._count("not HTTP", send(self.url, raw, half_close=step % 2 == 0), repr(raw[:80]))
            self._look()
        self._ask_operator(operator, number)
        self.outcome.broken += large_operator_bodies(self.url, self._as_operator)
        self.outcome.broken += abandoned_calls(self.url, self._store)
        for asking in self._theirs:
            self._ask(asking)
        slow.join()
        self.outcome.waits += hostile_crowds.waiters(self.url, self.attacker, self._process)
        self.outcome.waits += hostile_crowds.readiness(self.url, lambda: self._upstream.looks)
        self.outcome.waits += hostile_crowds.offers(self.url, self.attacker)
        for reply in slow.replies:
            self._count("never ends", reply, "a slow sender")
        self.outcome.logged += ["a request that never ends was held open"] * slow.left_open
        self._look()
        self.outcome.open_files = (before, self._process.num_fds())

    def end(self) -> Outcome:
        """Read everything back, stop the proxy, and look at its log."""
        eventually(lambda: httpx.get(self.url + "/health/backlog").json()["unshipped_records"] == 0, 60)
        with httpx.Client(base_url=self.url, headers=self._as_operator, timeout=60) as client:
            self.outcome.unreadable += list(self._unreadable(client, "calls"))
            self.outcome.unreadable += list(self._unreadable(client, "trajectories"))
        self.outcome.spliced = _spliced(httpx.get(self.url + "/metrics", headers=self._as_operator).text)
        if self._proxy.stop() != 0:
            self.outcome.logged.append("the proxy did not stop cleanly")
        lines = self._log.read_text(errors="replace").splitlines()
        self.outcome.logged += [line[:300] for line in lines if any(bad in line for bad in _BAD_LINES)]
        self.outcome.leaks += [f"in the log: {one[:5]}..." for one in self._hidden if one in "\n".join(lines)]
        self.outcome.leaks += self._upstream.leaks
        self.outcome.statuses = {kind: dict(sorted(found.items())) for kind, found in sorted(self._statuses.items())}
        return self.outcome

    def abandon(self) -> None:
        """End what still runs."""
        if self._process.is_running():
            self._proxy.kill()

    def _given(self, count: int, number: int) -> None:
        @seed(number)
        @settings(_CALM, max_examples=count)
        @given(askings(self.attacker))
        def one(asking: Asking) -> None:
            self._ask(asking)

        one()

    def _ask(self, asking: Asking) -> None:
        what = f"{asking.method} {asking.path[:100]} {dict(asking.headers[1:])} {asking.body[:2000]!r}"[:1500]
        reply = ask(self.url, asking)
        self._count(asking.kind, reply, what)
        if self._exact and reply.status == 200 and (further := continued(asking, reply)):
            self._ask(further)
            self._oddities += 1
            odd = with_odd_calls(further, _ODD_CALLS[self._oddities % len(_ODD_CALLS)])
            self._count(odd.kind, ask(self.url, odd), f"odd tool calls {odd.body[-300:]!r}")

    def _ask_operator(self, count: int, number: int) -> None:
        """Ask every operation of the operator API what schemathesis finds likely to hurt."""
        headers = self._as_operator
        api = schemathesis.openapi.from_url(f"{self.url}/api/openapi.json", headers=headers)
        operations = [found.ok() for found in api.get_all_operations() if isinstance(found, Ok)]
        for operation in operations:

            @seed(number)
            @settings(_CALM, max_examples=max(1, count // len(operations)))
            @given(operation.as_strategy())
            def one(case: schemathesis.Case[Any]) -> None:
                reply = case.call(headers=headers, timeout=20)
                self._count("/api", Reply(reply.status_code, b""), f"{case.method} {case.path} {case.query}")

            one()

    def _count(self, kind: str, reply: Reply, what: str) -> None:
        self.outcome.requests += 1
        self._statuses.setdefault(kind, Counter())[str(reply.status)] += 1
        if reply.status >= 500:
            self.outcome.own_5xx.append(f"{reply.status} {reply.text[-200:]!r} to {what}")
        self.outcome.leaks += [
            f"{kind}: {one[:5]}... told to {what}" for one in self._hidden if one.encode() in reply.text
        ]

    def _look(self) -> None:
        processes = [self._process, *self._process.children(recursive=True)]
        self.outcome.resident.append([round(one.memory_info().rss / 2**20, 1) for one in processes])

    def _unreadable(self, client: httpx.Client, records: str) -> Iterator[str]:
        """Read all records over the operator API, each by itself; yield those that cannot be."""
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
                elif self._word.replace(".", " ") in answer.text and "theirs" not in answer.text:
                    self.outcome.leaks.append(f"{records}/{row['id']} of another key holds the secret words")
            before = page.json()["next"]
            if before is None:
                return


def continued(asking: Asking, reply: Reply) -> Asking | None:
    """Return the request that goes on from a chat answer, or None where it is none, or has been gone on from twice."""
    if not asking.path.endswith("/chat/completions"):
        return None
    try:
        body = json.loads(asking.body)
        answer = json.loads(reply.text[reply.text.index(b'{"id"') :])["choices"][0]["message"]
        if body["messages"][-1].get("content") == _RESULT["content"]:
            return None
        calls = answer.get("tool_calls") if asking.kind == _CONTINUED else None
        last = {**_RESULT, "tool_call_id": calls[0]["id"]} if calls else _QUESTION
        sent = json.dumps({**body, "messages": [*body["messages"], answer, last]}).encode()
    except (ValueError, LookupError, TypeError, RecursionError):  # streamed, or no chat
        return None
    return Asking(_CONTINUED, asking.method, asking.path, asking.headers, sent)


def with_odd_calls(asking: Asking, calls: Any) -> Asking:
    """Return a request that goes on from an answer with an answer more, whose tool calls are none."""
    body = json.loads(asking.body)
    odd = {"role": "assistant", "content": "x", "tool_calls": calls}
    sent = {**body, "messages": [*body["messages"], odd, _QUESTION], "n": "1"}
    return Asking("odd tool calls", asking.method, asking.path, asking.headers, json.dumps(sent).encode())


def _spliced(metrics: str) -> dict[str, int]:
    """Return how contexts were made exact, or why they were not."""
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line.startswith("ratchet_exact_"))
    return {name: int(float(value)) for name, _, value in lines if "_total{" in name}


def run(folder: Path, requests: int, number: int = 1, store: str = "", *, exact: bool = False) -> Outcome:
    """Run a campaign on a store's URL; SQLite in the folder without one."""
    began, upstream_key = time.monotonic(), f"up-{secrets.token_hex(8)}"
    upstream = Upstream(upstream_key, scale_out=exact)
    with served(upstream) as upstream_url, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        campaign = Campaign(folder, upstream, upstream_url, upstream_key, store or str(folder / "store.db"), exact)
        try:
            campaign.run(requests, number)
            outcome = campaign.end()
            outcome.waits += hostile_crowds.unread_log(folder / "unread", upstream_url, upstream_key)
            outcome.broken += foreign_pages(folder / "without-keys", upstream_url)
        finally:
            campaign.abandon()
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what became of hostile requests; 1 where a promise did not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--exact-context", action="store_true", help="the upstream offers --enable-scale-out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    asked = (options.requests, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.store == "postgresql":
            with postgres_server() as server:
                outcome = run(Path(folder), *asked, server.url, exact=options.exact_context)
        else:
            outcome = run(Path(folder), *asked, exact=options.exact_context)
    if options.json:
        print(json.dumps(asdict(outcome)))
        return bool(outcome.violations)
    for kind, found in outcome.statuses.items():
        print(f"{kind:24} {sum(found.values()):6}  {'  '.join(f'{name}: {count}' for name, count in found.items())}")
    print(f"{outcome.requests} requests in {outcome.seconds:.0f} s; {outcome.recorded} calls recorded and read back")
    print(f"5xx of our own making: {len(outcome.own_5xx)}; leaks: {len(outcome.leaks)}; defects: {len(outcome.logged)}")
    print(f"single promises that did not hold: {len(outcome.broken)}")
    print(f"exact contexts: {outcome.spliced or 'not offered'}")
    print(f"resident MiB: {outcome.resident}; open files: {outcome.open_files}")
    for violation in dict.fromkeys(outcome.violations):
        print("VIOLATION", violation)
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
