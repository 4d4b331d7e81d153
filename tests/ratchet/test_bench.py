"""`ratchet bench`: a real proxy before a scripted vLLM, measured by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Send

from ratchet.bench.latency_statistics import added, figures, interval
from ratchet.bench.timed_calls import CallBlock, TimedCall
from ratchet.cli import run
from ratchet.output.terminal import ProgressLines
from ratchet.store.store import Store, open_store
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served


class FailingOnce(ScriptedVllm):
    """Refuses the call of one number."""

    refused: int | None = None

    async def _chat(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        if len(self.calls) == self.refused:
            self.failures_left, self.failure = 1, 400
        await super()._chat(body, receive, send)


class BenchCommand:
    """`ratchet bench` with a proxy and its scripted vLLM."""

    def __init__(self, proxy: str, upstream: str, vllm: FailingOnce, store: Store) -> None:
        self.vllm, self.store = vllm, store
        self._where = ["--proxy", proxy, "--upstream", upstream, "--model", "agent"]

    def run(self, *arguments: str) -> int:
        return run(["bench", *self._where, *arguments])


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchCommand]:
    folder, vllm = tmp_path_factory.mktemp("bench"), FailingOnce()
    store = open_store(str(folder / "s.db"))
    with served(vllm) as upstream, running(upstream, store, folder) as proxy:
        yield BenchCommand(proxy.url, upstream, vllm, store)
    store.close()


@pytest.fixture
def bench(circle: BenchCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchCommand:
    """The circle, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    circle.vllm.failures_left, circle.vllm.refused = 0, None
    circle.vllm.calls.clear()
    return circle


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_direct_and_proxied_calls_are_reported_with_what_the_proxy_adds(
    bench: BenchCommand, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    assert bench.run("--concurrency", "2", "--blocks", "6", "--json", how) == 0
    report = json.loads(capsys.readouterr().out)
    names = ["direct", "direct, ids and logprobs", "through the proxy"]
    assert [(way["name"], way["calls"], way["failed"]) for way in report["ways"]] == [(name, 24, 0) for name in names]
    assert all(
        way["tokens_per_second"] > 0 and way["whole"]["p50"] >= way["first_byte"]["p50"] for way in report["ways"]
    )
    assert [one["turns"] for one in report["added"]] == [6] * (6 if how == "--stream" else 3)
    assert all(one["low"] <= one["value"] <= one["high"] for one in report["added"])
    proxied = report["ways"][2]
    assert proxied["overhead"]["p50"] > 0
    assert proxied["cpu_us"] is not None
    streamed = [body for body in bench.vllm.calls if body.get("stream")]
    assert len(streamed) == (len(bench.vllm.calls) if how == "--stream" else 0)


def test_every_prompt_is_another_one_and_nothing_of_it_is_ever_trained(
    bench: BenchCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("--concurrency", "2", "--blocks", "1", "--prompt-words", "5") == 0
    assert "the proxy and all it asks for add" in capsys.readouterr().out
    prompts = [body["messages"][0]["content"] for body in bench.vllm.calls]
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts) == 3 * (2 + 4)  # a warm-up each
    eventually(lambda: len(bench.store.trajectories.page(limit=1000)) >= 6)
    assert {run.purpose for run in bench.store.trajectories.page(limit=1000)} == {"eval"}


def test_failed_calls_are_counted_with_their_reason_and_end_the_command_with_1(
    bench: BenchCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.vllm.failures_left, bench.vllm.failure = 4, 400
    assert bench.run("--concurrency", "4", "--blocks", "1") == 1
    assert "direct (http://127.0.0.1" in (output := capsys.readouterr().err)
    assert "no call succeeds: 400" in output
    bench.vllm.calls.clear()
    bench.vllm.refused = 3  # after a warm-up of each way
    assert bench.run("--concurrency", "1", "--blocks", "1", "--calls", "1") == 1
    assert "direct: 1 of 1 calls failed: 400: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "mial"], 1, "--model mial: the proxy knows no such model; it knows agent"),
        (["--proxy", "http://127.0.0.1:9"], 1, "is it running (`ratchet up`)"),
        (["--proxy", "no url"], 1, "does not list its models"),
        (["--upstream", "http://127.0.0.1:9"], 1, "is --upstream its URL"),
        (["--upstream-model", "unheard"], 1, "no call succeeds: 404"),
        (["--calls", "3"], 2, "need 80 or more"),
    ],
)
def test_an_impossible_measurement_fails_with_the_remedy(
    bench: BenchCommand, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert bench.run(*arguments) == code
    assert message in capsys.readouterr().err


def test_the_interval_covers_the_median_in_95_of_100_and_needs_six_turns() -> None:
    assert interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (None, None)
    assert interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (1.0, 6.0)  # 1 - 2/64 = 96.9%
    assert interval([float(one) for one in range(1, 11)]) == (2.0, 9.0)  # 97.9%; (3, 8) would hold it in 89.1%


def test_without_a_terminal_progress_is_printed_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    report_progress = ProgressLines(lambda: now[0])
    for _ in range(30):
        now[0] += 1.0
        report_progress("measuring", 1, 30)
    assert capsys.readouterr().err.splitlines() == [
        "measuring 10 of 30, 20 s left",
        "measuring 20 of 30, 10 s left",
    ]


def test_a_failed_call_is_no_time_and_a_turn_without_an_answer_no_difference() -> None:
    good, bad = TimedCall(0.1, 0.2, 5), TimedCall(failure="400: no")
    ours, theirs = (
        [CallBlock((good, bad), 1.0, 0.5, 0.1), CallBlock((bad,), 1.0, None, 0.1)],
        [_block(0.15), _block(0.1)],
    )
    found = figures("x", ours)
    assert (found.calls, found.failed, found.commonest_failure) == (3, 2, "400: no")
    assert found.whole is not None
    assert found.whole.p99 == 200
    assert found.tokens_per_second == 2.5
    gain = added("x", "y", "whole call", ours, theirs)
    assert gain is not None
    assert gain.value == pytest.approx(50)
    assert (gain.low, gain.turns) == (None, 1)


def _block(seconds: float) -> CallBlock:
    return CallBlock((TimedCall(seconds, seconds, 5),), 1.0, None, 0.0)
