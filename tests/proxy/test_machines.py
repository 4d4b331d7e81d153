"""Proxies on several machines with a coordinator in common: as processes with journals of their own and one store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.proxy.machines import Machines, has_shipped, running_machines
from tests.harness.proxy.servers import eventually

pytestmark = pytest.mark.slow

TOKEN = "a secret of all the machines"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with running_machines(tmp_path) as running:
        yield running


def test_calls_without_ids_are_linked_across_machines(machines: Machines) -> None:
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(3)]
    found = [{machines.turn(one, f"question {turn} of {n}") for turn in range(5)}
             for n, one in enumerate(conversations)]  # fmt: skip
    assert [len(one) for one in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
    assert set(machines.purposes().values()) == {"live"}
    for proxy in machines.proxies:  # each machine reports its own workers
        metrics = httpx.get(f"{proxy.url}/metrics", timeout=60).text
        assert set(re.findall(r'ratchet_coordinator_up\{worker="([^"]+)"\} 1', metrics)) == {"worker-1", "worker-2"}
    (finished, *_), url = found[0], machines.proxies[1].url
    assert httpx.post(f"{url}/api/trajectories/{finished}/finish", timeout=60).json()["state"] == "sealed"
    assert machines.turn(conversations[0], "another question") != finished


def test_across_a_kill_of_the_coordinator_calls_are_linked_right_or_marked(machines: Machines) -> None:
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    owners: dict[str, set[int]] = {}

    def talk(text: str) -> None:
        for n, one in enumerate(conversations):
            owners.setdefault(machines.turn(one, f"{text} of {n}"), set()).add(n)

    talk("question 0")
    connections = machines.connections()
    machines.signal_coordinator(signal.SIGKILL)
    talk("question 1")  # the coordinator may be away
    eventually(lambda: machines.connections() >= connections + 4)
    talk("question 2")
    talk("question 3")
    assert all(len(numbers) == 1 for numbers in owners.values())  # nothing was merged
    purposes = machines.purposes()
    whole = [trajectory for trajectory in owners if purposes[trajectory] == "live"]
    assert len(whole) == 4  # the trajectories that began before; all others are marked
    assert {purposes[one] for one in owners} <= {"live", "unlinked"}


# A call after a long answer continues it also while calls may be missing; a short answer might be another's.
_LONG = "question {} of {} #say=this.is.a.long.answer.to.the.question.{}.of.number.{}"


# With a standby, a coordinator that gets no CPU for some seconds is replaced: nothing else may run beside these tests.
@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Machines]:
    with running_machines(tmp_path, standby=True) as running:
        yield running


@pytest.mark.alone
def test_a_standby_takes_over_from_a_coordinator_that_hangs(standby: Machines) -> None:
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    before = [standby.turn(one, _LONG.format(0, n, 0, n)) for n, one in enumerate(conversations)]
    first = standby.deciding()
    other, restarts = 3 - first, standby.log(first).count("name=coordinator pid=")
    standby.signal_coordinator(signal.SIGSTOP, first)
    try:
        assert [standby.turn(one, _LONG.format(1, n, 1, n)) for n, one in enumerate(conversations)] == before
        eventually(lambda: standby.log(other).count("event=linking_restored") == 1, 60)
        eventually(lambda: all(standby.log(one).count("event=coordinator_connected") >= 4 for one in (1, 2)), 60)
    finally:
        standby.signal_coordinator(signal.SIGCONT, first)
    # The first one does not decide again: it starts again, and stands by.
    eventually(lambda: standby.log(first).count("name=coordinator pid=") == restarts + 1, 60)
    eventually(lambda: "event=standing_by" in standby.log(first), 60)
    assert [standby.turn(one, _LONG.format(2, n, 2, n)) for n, one in enumerate(conversations)] == before
    assert standby.log(first).count("event=linking_restored") == 1


@pytest.mark.alone
def test_another_machine_takes_over_from_one_that_dies(standby: Machines) -> None:
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    before = [standby.turn(one, _LONG.format(0, n, 0, n)) for n, one in enumerate(conversations)]
    for proxy in standby.proxies:
        eventually(partial(has_shipped, proxy.url))
    first = standby.deciding()
    other = 3 - first
    standby.proxies[first - 1].kill()
    standby.proxies[first - 1] = standby.proxies[other - 1]
    assert [standby.turn(one, _LONG.format(1, n, 1, n)) for n, one in enumerate(conversations)] == before
    eventually(lambda: standby.log(other).count("event=coordinator_connected") >= 4, 90)


def test_a_coordinator_refuses_workers_and_operators_without_its_token(machines: Machines) -> None:
    url = re.findall(r"http://127\.0\.0\.1:\d+", " ".join(_command(machines.proxies[1].pid)))[-1]
    assert httpx.get(f"{url}/health/live").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong", "x-ratchet-worker": "wrong"}):
        assert httpx.post(f"{url}/coordinator", content=b"", headers=headers).status_code == 403
        assert httpx.get(f"{url}/api/trajectories", headers=headers).status_code == 403


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize(
    ("arguments", "token", "reason"),
    [
        (["--coordinator", "http://127.0.0.1:9"], "", "coordinator needs RATCHET_COORDINATOR_TOKEN"),
        (["--coordinator-listen", "0.0.0.0:0"], "short", "coordinator_listen needs RATCHET_COORDINATOR_TOKEN"),
        (["--coordinator-listen", "8009"], TOKEN, "is not an address and a port"),
        (["--workers", "0"], TOKEN, "set coordinator_listen"),
    ],
)
def test_settings_of_coordinators_that_cannot_work_are_refused(
    tmp_path: Path, arguments: list[str], token: str, reason: str
) -> None:
    command = [sys.executable, "-m", "ratchet", "proxy", "--upstream", "http://127.0.0.1:9", "--model", "agent"]
    environment = {**os.environ, "RATCHET_COORDINATOR_TOKEN": token}
    done = subprocess.run(
        [*command, "--store", "store.db", *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode != 0
    assert reason in done.stderr


@pytest.mark.alone
def test_while_workers_of_a_dead_machine_are_missing_alike_agents_are_marked_and_not_merged(machines: Machines) -> None:
    text = "hello #say=hello"  # to all, with equal answers
    alike: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    before = [machines.turn(one, text) for one in alike]
    first, second = machines.proxies
    command = _command(second.pid)
    second.kill()
    machines.proxies[1] = first
    machines.signal_coordinator(signal.SIGKILL)
    eventually(lambda: "event=workers_missing" in machines.log(1), 120)
    eventually(lambda: machines.connections() >= 6, 120)
    after = [machines.turn(one, text) for one in alike]
    assert len({*before, *after}) == 8
    machines.proxies[1] = machines.start_again(command)
    found = re.compile(r"event=missing_calls_read .*/(worker-\d)")
    eventually(lambda: len(set(found.findall(machines.log(1)))) == 2, 120)
    fresh: list[dict[str, Any]] = []
    linked = {machines.turn(fresh, f"question {number}") for number in range(3)}
    purposes = machines.purposes()
    assert {purposes[one] for one in after} == {"unlinked"}
    assert [purposes[one] for one in (*before, *linked)] == ["live"] * 5
