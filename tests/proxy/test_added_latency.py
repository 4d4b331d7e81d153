"""`python -m benchmarks.added_latency`: a real proxy before a scripted vLLM, measured by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Send

from ratchet.store.store import Store, open_store
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served

ROOT = Path(__file__).parents[2]
NAMES = ["direct", "direct, ids and logprobs", "through the proxy"]


class FailingOnce(ScriptedVllm):
    """Refuses the call of one number."""

    refused: int | None = None

    async def _chat(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        if len(self.calls) == self.refused:
            self.failures_left, self.failure = 1, 400
        await super()._chat(body, receive, send)


class Bench:
    """The benchmark with a proxy and its scripted vLLM."""

    def __init__(self, proxy: str, upstream: str, vllm: FailingOnce, store: Store) -> None:
        self.vllm, self.store = vllm, store
        self._where = ["--proxy", proxy, "--upstream", f"{upstream}/v1", "--model", "agent"]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and the output."""
        command = [sys.executable, "-m", "benchmarks.added_latency", *self._where, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    vllm, store = FailingOnce(), open_store(str(tmp_path / "s.db"))
    with served(vllm) as upstream, running(upstream, store, tmp_path) as proxy:
        yield Bench(proxy.url, upstream, vllm, store)
    store.close()


@pytest.mark.parametrize(("how", "metrics"), [("--stream", 2), ("--no-stream", 1)])
def test_direct_and_proxied_calls_are_reported_with_what_the_proxy_adds(bench: Bench, how: str, metrics: int) -> None:
    code, output = bench.run("--concurrency", "2", "--blocks", "6", "--json", how)
    report = json.loads(output)
    rows = report["targets"]
    assert code == 0
    assert [(row["name"], row["calls"], row["failed"]) for row in rows] == [(name, 24, 0) for name in NAMES]
    assert all(row["tokens_per_second"] > 0 and row["whole"]["p50"] >= row["first_byte"]["p50"] for row in rows)
    assert [one["turns"] for one in report["added"]] == [6] * 3 * metrics
    assert all(one["low"] <= one["value"] <= one["high"] for one in report["added"])
    assert rows[2]["overhead"]["p50"] > 0
    assert rows[2]["cpu_us"] > 0
    prompts = [body["messages"][0]["content"] for body in bench.vllm.calls]
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts) == 3 * (2 + 24)  # a warm-up each
    assert {bool(body.get("stream")) for body in bench.vllm.calls} == {how == "--stream"}
    eventually(lambda: len(bench.store.trajectories.page(limit=1000)) >= 26)
    assert {run.purpose for run in bench.store.trajectories.page(limit=1000)} == {"eval"}, "never trained"


def test_a_failed_call_is_counted_with_its_reason_and_five_turns_have_no_interval(bench: Bench) -> None:
    bench.vllm.refused = 4  # after a warm-up of each target
    code, output = bench.run("--concurrency", "1", "--blocks", "5", "--calls", "10")
    assert code == 1
    assert "direct: 10 calls, 1 failed" in output
    assert "commonest failure: 400: " in output
    assert output.count("too few turns for an interval") == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mial"], "--model mial: the proxy knows agent"),
        (["--proxy", "http://127.0.0.1:9"], "--proxy http://127.0.0.1:9 "),
        (["--upstream", "http://127.0.0.1:9"], "--upstream http://127.0.0.1:9 "),
        (["--upstream-model", "unheard"], "no call succeeds: 404"),
    ],
)
def test_an_impossible_measurement_fails_with_the_remedy(bench: Bench, arguments: list[str], message: str) -> None:
    code, output = bench.run(*arguments)
    assert code == 1
    assert message in output
