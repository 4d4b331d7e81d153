"""Groups of two processes of which one is killed in a verb, and groups that go on from what they committed.

    python -m tests.harness.trainer.killed_groups MODEL FOLDER

The libraries are imported once; every process is forked from this one, and all groups run side by side. `ends.json` has
the time of each process's end, `kill` in a case's folder that of the kill, `next-*.json` what the next groups found. In
one more group the leader hangs (SIGSTOP), and its follower gets SIGTERM at the time in `stopped`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import WorkerProcessLost
from ratchet.trainer.learner import distributed
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.ports import free_port
from tests.harness.trainer.several_processes import forked
from tests.harness.trainer.tiny import build_rows

AGENT = LearnerSettings(learning_rate=1e-3, seed=3)
SHARDINGS = ("none", "fsdp2")
VERBS = ("train", "score", "save")
ROLES = ("leader", "follower")
MOST_SECONDS = 120


@dataclass(frozen=True, slots=True)
class KillCase:
    """Which process gets which signal in which verb."""

    sharding: str
    verb: str
    role: str
    signal: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.sharding}-{self.verb}-{self.role}" + ("-hangs" if self.signal == signal.SIGSTOP else "")


CASES = [KillCase(sharding, verb, role) for sharding in SHARDINGS for verb in VERBS for role in ROLES]


HANGING = KillCase("fsdp2", "train", "leader", signal.SIGSTOP)


def process_settings(sharding: str) -> LearnerProcessSettings:
    return LearnerProcessSettings(threads=1, token_budget=64, sharding=sharding, num_processes=2)


class KilledHost(LearnerHost):
    """Kills its process in a verb, once the agent has a commit."""

    verb = ""
    note = Path()
    signal: signal.Signals = signal.SIGKILL

    def train_round(self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        if self.verb == "train" and self.step(agent):
            self.on_rows = lambda count: self._signal_itself("train")  # after the first of its micro-batches
        return super().train_round(agent, rows, rate_scale)

    def score(self, agent: str, *arguments: Any, **named: Any) -> list[tuple[float, ...]]:
        if (self.note.parent / "expected.json").exists():
            self._signal_itself("score")
        return super().score(agent, *arguments, **named)

    def save(self, agent: str, folder: Path) -> None:
        if self.step(agent) > 1:
            self._signal_itself("save")
        super().save(agent, folder)

    def _signal_itself(self, verb: str) -> None:
        if self.verb == verb:
            self.note.write_text(str(time.time()))
            os.kill(os.getpid(), self.signal)


class KilledLeader(distributed.LeadingHost, KilledHost):
    """The leader of a case."""


def run_case(case: KillCase, model: str, folder: Path) -> int:
    """Be one process of a group; the one that is not killed returns 1."""
    channel = distributed.FollowerChannel()
    unlucky = distributed.is_leader() == (case.role == "leader")
    KilledHost.verb, KilledHost.note = case.verb if unlucky else "", folder / "kill"
    KilledHost.signal = case.signal
    if not distributed.is_leader():
        return distributed.follow(channel, KilledHost)
    host = KilledLeader(channel, model, process_settings(case.sharding))
    try:
        host.open("mail", AGENT, None)
        host.train_round("mail", build_rows(6))
        host.save("mail", folder / "0001")
        scores = host.score("mail", build_rows(3, seed=9))
        (folder / "expected.json").write_text(json.dumps(scores))
        host.train_round("mail", build_rows(6, seed=1))
        host.score("mail", build_rows(3, seed=9))
        host.save("mail", folder / "0002")
    except WorkerProcessLost:
        return 1
    return 0


def go_on(sharding: str, model: str, folder: Path) -> int:
    """Be one process of the group that starts next: open each commit, and train on."""
    channel = distributed.FollowerChannel()
    if not distributed.is_leader():
        return distributed.follow(channel)
    host = distributed.LeadingHost(channel, model, process_settings(sharding))
    found = {}
    for case in [case for case in CASES if case.sharding == sharding]:
        home = folder / str(case)
        commits = [name for name in ("0001", "0002") if checkpoint.complete(home / name)]
        step = host.open("mail", AGENT, home / commits[-1])
        expected = [tuple(row) for row in json.loads((home / "expected.json").read_text())]
        same = host.score("mail", build_rows(3, seed=9)) == expected
        report = host.train_round("mail", build_rows(6, seed=1))
        found[str(case)] = {"commits": commits, "step": step, "same": same, "loss": report.loss, "next": report.step}
    channel.close()
    (folder / f"next-{sharding}.json").write_text(json.dumps(found))
    return 0


def start(name: str, does: Callable[[], int], folder: Path) -> dict[int, str]:
    """Fork two processes; return their names by their ids."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = {}
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        started[forked(does, folder / f"{name}-{rank}.log", meeting | own, MOST_SECONDS)] = f"{name}-{rank}"
    return started


def ends_of(started: dict[int, str]) -> dict[str, float]:
    """Wait for processes; return when each ended."""
    ends = {}
    while started:
        child, _ = os.wait()
        ends[started.pop(child)] = time.time()
    return ends


def hang(model: str, folder: Path) -> dict[str, float]:
    """Let a leader hang and stop its follower; return when the follower ended."""
    home = folder / str(HANGING)
    home.mkdir()
    started = start(str(HANGING), partial(run_case, HANGING, model, home), folder)
    leader, follower = started
    until = time.monotonic() + MOST_SECONDS
    while not (home / "kill").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (home / "stopped").write_text(str(time.time()))
    os.kill(follower, signal.SIGTERM)
    ends = ends_of({follower: started[follower]})
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    return ends


def main(model: str, folder: Path) -> None:
    started: dict[int, str] = {}
    for case in CASES:
        (folder / str(case)).mkdir()
        started |= start(str(case), partial(run_case, case, model, folder / str(case)), folder)
    ends = ends_of(started) | hang(model, folder)
    (folder / "ends.json").write_text(json.dumps(ends))
    for sharding in SHARDINGS:
        ends_of(start(f"next-{sharding}", partial(go_on, sharding, model, folder), folder))


if __name__ == "__main__":
    from ratchet.trainer.learner import lora  # noqa: F401 - with all that it imports, before the forks

    main(sys.argv[1], Path(sys.argv[2]))
