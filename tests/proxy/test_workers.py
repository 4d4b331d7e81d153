"""A proxy with several workers and a coordinator, as processes that are stopped, killed and restarted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.store.records import UNLINKED, Call
from ratchet.store.store import open_store
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served

pytestmark = pytest.mark.slow


class Workers:
    """A proxy with two workers, its log and its store."""

    def __init__(self, folder: Path, vllm_url: str, **settings: Any) -> None:
        self._folder = folder
        self.proxy = ProxyProcess(folder, upstreams=[vllm_url], **({"workers": 2} | settings))
        self.url = self.proxy.url
        eventually(lambda: httpx.get(f"{self.url}/health/ready").status_code == 200)

    def ask(self, messages: list[dict[str, Any]], **headers: str) -> httpx.Response:
        """Send a call over a connection of its own, which any worker may take."""
        body = {"model": "agent", "messages": messages}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def trajectory(self, messages: list[dict[str, Any]], **headers: str) -> str:
        """Send a call; return its trajectory."""
        response = self.ask(messages, **headers)
        assert response.status_code == 200, response.text
        return response.headers["x-ratchet-trajectory"]

    def log(self) -> str:
        """The log of all processes."""
        return (self._folder / "proxy.log").read_text()

    def pid(self, name: str) -> int:
        """The id of the newest process of this name."""
        return int(re.findall(rf"event=process_started name={name} pid=(\d+)", self.log())[-1])

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self.pid(name), number)

    def wait_for_connections(self, number: int) -> None:
        """Wait until the workers have connected to the coordinator so many times."""
        eventually(lambda: self.log().count("event=coordinator_connected") >= number)

    def metric(self, pattern: str) -> list[float]:
        """The values of a metric, one for each process that has it."""
        return [float(value) for value in re.findall(rf"^{pattern} ([0-9.e+]+)$", self.metrics(), re.MULTILINE)]

    def metrics(self) -> str:
        """The metrics of all processes; empty while the coordinator starts."""
        response = httpx.get(f"{self.url}/metrics", timeout=60)
        return response.text if response.status_code == 200 else ""

    def calls(self) -> dict[str, Call]:
        """Every call in the store, once all are there."""
        eventually(lambda: httpx.get(f"{self.url}/health/backlog").json().get("unshipped_records") == 0)
        return stored_calls(self._folder)


def stored_calls(folder: Path) -> dict[str, Call]:
    """Every call in the store by its id."""
    store = open_store(str(folder / "store.db"))
    try:
        return {call.id: call for call in store.calls.page(1000)}
    finally:
        store.close()


@pytest.fixture
def vllm() -> Iterator[tuple[ScriptedVllm, str]]:
    scripted = ScriptedVllm()
    with served(scripted) as url:
        yield scripted, url


@pytest.fixture
def workers(tmp_path: Path, vllm: tuple[ScriptedVllm, str]) -> Iterator[Workers]:
    running = Workers(tmp_path, vllm[1])
    try:
        yield running
    finally:
        running.proxy.stop()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(workers: Workers, messages: list[dict[str, Any]], text: str) -> str:
    """Send the next question of a conversation, add the answer to it, and return the trajectory."""
    messages.append(user(text))
    response = workers.ask(messages)
    assert response.status_code == 200, response.text
    messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
    return str(response.headers["x-ratchet-trajectory"])


def test_the_workers_serve_as_one_proxy(workers: Workers) -> None:
    conversation: list[dict[str, Any]] = []
    found = {turn(workers, conversation, f"question {number}") for number in range(8)}
    assert len(found) == 1
    assert [call.linked_by for call in workers.calls().values()].count("root") == 1
    assert sum(workers.metric(r"ratchet_calls_total\{.*\}")) == 8
    assert len(workers.metric(r'ratchet_coordinator_up\{worker="worker-[12]"\}')) == 2
    finished = httpx.post(f"{workers.url}/api/trajectories/{found.pop()}/finish", timeout=60)
    assert finished.json()["state"] == "sealed", finished.text
    assert turn(workers, conversation, "another question") not in found
    assert httpx.get(f"{workers.url}/ui/").status_code == 200
    given = {"trajectory": "no-such-trajectory", "score": 1.0}
    assert httpx.post(f"{workers.url}/api/feedback", json=given, timeout=60).status_code in (202, 400, 422)


def _has_stopped(workers: Workers, count: int) -> bool:
    return sum(workers.metric(r'ratchet_calls_total\{.*state="aborted".*\}')) == count


def test_the_coordinator_finds_the_stopped_answer_of_any_worker(workers: Workers) -> None:
    for number in range(4):
        conversation = [user(f"{number} #say={'a.long.answer.' * 200} #delay=0.01")]
        body = {"model": "agent", "messages": conversation, "stream": True}
        with httpx.stream("POST", f"{workers.url}/v1/chat/completions", json=body, timeout=60) as response:
            came = ""
            for piece in response.iter_text():
                came += piece
                if came.count('"content":') > 20:
                    break
        eventually(partial(_has_stopped, workers, number + 1))
        conversation += [{"role": "assistant", "content": "a long"}, user("go on")]
        assert workers.trajectory(conversation) == response.headers["x-ratchet-trajectory"]


def test_while_the_coordinator_hangs_calls_are_served_and_nothing_is_merged_on_a_guess(
    workers: Workers, vllm: tuple[ScriptedVllm, str]
) -> None:
    conversation: list[dict[str, Any]] = []
    before = turn(workers, conversation, "question 0")
    workers.signal("coordinator", signal.SIGSTOP)
    try:
        fragments = {turn(workers, conversation, f"question {number}") for number in range(1, 5)}
    finally:
        workers.signal("coordinator", signal.SIGCONT)
    eventually(lambda: workers.metric(r"ratchet_coordinator_up\{worker=.*\}") == [1, 1])
    after = {turn(workers, conversation, f"question {number}") for number in range(5, 9)}
    assert len(after) == 1
    assert after <= fragments | {before}
    purposes = {call.trajectory_id: purpose for call, purpose in _purposes(workers)}
    assert all(purposes[one] == ("live" if one == before else UNLINKED) for one in fragments)


def test_a_last_byte_waits_until_a_coordinator_that_hangs_may_decide_no_more(
    workers: Workers, vllm: tuple[ScriptedVllm, str]
) -> None:
    lost = workers.log().count("event=coordinator_lost")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(workers.ask, [user("a question #wait=4")])
        eventually(lambda: any("#wait" in str(call) for call in vllm[0].calls))
        workers.signal("coordinator", signal.SIGSTOP)
        try:
            assert answer.result(60).status_code == 200
            assert workers.log().count("event=coordinator_lost") > lost
            assert re.search(r"event=coordinator_lost reason=.* http://\S+ ", workers.log())
        finally:
            workers.signal("coordinator", signal.SIGCONT)


def test_workers_that_start_again_without_a_coordinator_serve_what_is_stored_and_mark_the_rest(
    workers: Workers,
) -> None:
    conversation = [user("a question #tool=search")]
    first = workers.ask(conversation)
    before, message = first.headers["x-ratchet-trajectory"], first.json()["choices"][0]["message"]
    workers.calls()
    workers.signal("coordinator", signal.SIGSTOP)
    try:
        for name in ("worker-1", "worker-2"):
            killed = workers.pid(name)
            workers.signal(name, signal.SIGKILL)
            eventually(partial(_ended, killed))
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "found"}
        assert workers.trajectory([*conversation, message, result]) == before
        other = workers.trajectory([user("another question")])
    finally:
        workers.signal("coordinator", signal.SIGCONT)
    eventually(lambda: workers.metric(r"ratchet_coordinator_up\{worker=.*\}") == [1, 1])
    purposes = {call.trajectory_id: purpose for call, purpose in _purposes(workers)}
    assert (purposes[before], purposes[other]) == ("live", UNLINKED)


def _purposes(workers: Workers) -> list[tuple[Call, str]]:
    calls = workers.calls().values()
    listed = httpx.get(f"{workers.url}/api/trajectories", timeout=60).json()["data"]
    purposes = {one["id"]: one["purpose"] for one in listed}
    return [(call, purposes[call.trajectory_id]) for call in calls]


def test_a_killed_coordinator_comes_back_with_every_open_trajectory(workers: Workers) -> None:
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(6)]
    before = [turn(workers, one, f"question 0 of {number}") for number, one in enumerate(conversations)]
    connected = workers.log().count("event=coordinator_connected")
    workers.signal("coordinator", signal.SIGKILL)
    workers.wait_for_connections(connected + 2)
    after = [turn(workers, one, f"question 1 of {number}") for number, one in enumerate(conversations)]
    assert after == before
    calls = workers.calls()
    assert len(calls) == 12
    assert not [call for call in calls.values() if call.linked_by == "unlinked"]


def test_a_killed_worker_loses_no_answered_call_and_refuses_no_connection(workers: Workers) -> None:
    conversation: list[dict[str, Any]] = []
    trajectory = turn(workers, conversation, "question 0")
    for name in ("worker-1", "worker-2", "worker-1", "worker-2"):
        connected, killed = workers.log().count("event=coordinator_connected"), workers.pid(name)
        workers.signal(name, signal.SIGKILL)
        eventually(partial(_ended, killed))  # it accepts no connection any more
        assert turn(workers, conversation, f"question after {name}, and {connected}") == trajectory
        workers.wait_for_connections(connected + 1)
    answered = [call for call in workers.calls().values() if call.state == "answered"]
    assert len(answered) == 5


def test_a_rolling_restart_refuses_no_call(workers: Workers) -> None:
    stop, failures, trajectories = threading.Event(), [], set()
    conversation: list[dict[str, Any]] = []

    def talk() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                trajectories.add(turn(workers, conversation, f"question {number}"))
            except (AssertionError, httpx.HTTPError) as error:
                failures.append(error)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        connected = workers.log().count("event=coordinator_connected")
        os.kill(workers.proxy.pid, signal.SIGUSR2)
        workers.wait_for_connections(connected + 2)
    finally:
        stop.set()
        talking.join()
    assert not failures
    assert len(trajectories) == 1


def test_workers_that_finish_a_stream_before_they_stop_refuse_new_connections(workers: Workers) -> None:
    body = {"model": "agent", "stream": True, "messages": [user("#tokens=6000 #delay=0.02")]}
    with httpx.stream("POST", f"{workers.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(workers.proxy.pid, signal.SIGTERM)
        eventually(lambda: _refuses(workers.url), 20)  # less than drain_timeout_seconds
        assert any(line.startswith("data: ") for line in lines)


def test_workers_serve_new_calls_during_the_drain_delay_and_their_coordinator_adds_none(
    tmp_path: Path, vllm: tuple[ScriptedVllm, str]
) -> None:
    workers = Workers(tmp_path, vllm[1], drain_delay_seconds=3600.0)
    try:
        os.kill(workers.proxy.pid, signal.SIGTERM)
        eventually(lambda: workers.log().count("event=stopping delay=3600") == 2)
        for number in range(4):
            workers.trajectory([user(f"question {number}")])
    finally:
        assert workers.proxy.stop() == 0  # a second signal skips the delay of the workers
    assert workers.log().count("event=stopping") == 2


def _refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live", timeout=5)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # accepted by a listener that nobody reads, or one that closes
        return False
    return False


def test_the_journals_of_killed_workers_are_shipped_by_a_proxy_with_one(
    tmp_path: Path, vllm: tuple[ScriptedVllm, str]
) -> None:
    first = Workers(tmp_path, vllm[1])
    try:
        answered = {first.ask([user(f"question {number}")]).headers["x-ratchet-call"] for number in range(6)}
        children = [first.pid(name) for name in ("coordinator", "worker-1", "worker-2")]
    finally:
        first.proxy.kill()
    eventually(lambda: not any(map(_runs, children)))
    second = Workers(tmp_path, vllm[1], workers=1)
    try:
        assert answered <= second.calls().keys()
    finally:
        second.proxy.stop()


def test_processes_that_are_starting_end_with_their_supervisor(tmp_path: Path) -> None:
    arguments = ["--upstream", "http://127.0.0.1:9", "--model", "agent", "--workers", "2", "--store", "store.db"]
    arguments += ["--port", "0", "--coordinator", "http://127.0.0.1:9"]  # where nothing answers them
    environment = {**os.environ, "RATCHET_COORDINATOR_TOKEN": "a secret of all the machines"}
    log = tmp_path / "proxy.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "ratchet", "proxy", *arguments]
        supervisor = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        started = re.compile(r"event=process_started name=worker-\d pid=(\d+)")
        eventually(lambda: len(started.findall(log.read_text())) == 2)
    finally:
        supervisor.kill()
        supervisor.wait(60)
    for pid in started.findall(log.read_text()):
        eventually(partial(_ended, int(pid)), 40)  # less than they wait for the coordinator


def _ended(pid: int) -> bool:
    return not _runs(pid)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_proxy_that_cannot_start_says_why(tmp_path: Path, vllm: tuple[ScriptedVllm, str]) -> None:
    first = Workers(tmp_path, vllm[1])
    try:
        files = ["--store", str(tmp_path / "store.db"), "--journal", str(tmp_path / "journal")]
        command = [sys.executable, "-m", "ratchet", "proxy", "--upstream", vllm[1], "--model", "agent", "--port", "0"]
        second = subprocess.run([*command, *files, "--workers", "2"], capture_output=True, text=True, cwd=tmp_path)
        assert second.returncode != 0
        assert "is in use by another proxy" in second.stderr
    finally:
        first.proxy.stop()


@pytest.mark.parametrize(("trusted", "client"), [([], "127.0.0.1"), (["127.0.0.1"], "203.0.113.9")])
def test_the_audit_log_has_the_address_of_a_workers_client(
    tmp_path: Path, vllm: tuple[ScriptedVllm, str], trusted: list[str], client: str
) -> None:
    workers = Workers(tmp_path, vllm[1], trusted_proxies=trusted)
    try:
        named = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
        assert httpx.get(f"{workers.url}/api/agents", headers=named, timeout=60).status_code == 200
        store = open_store(str(tmp_path / "store.db"))
        try:
            (entry,) = eventually(store.audit.page)
        finally:
            store.close()
        assert (entry.client, entry.route, entry.status) == (client, "/agents", 200)
    finally:
        workers.proxy.stop()
