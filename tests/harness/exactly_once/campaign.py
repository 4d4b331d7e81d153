"""The exactly-once campaign: `kill -9` of every process of a training loop, at random moments.

A real proxy, a real store, two trainer processes of which one holds the lease, a learner service with a scripted host,
and a scripted grader and vLLM (`tests/harness/trainer/scripted_processes.py`), each in a process of its own. Versions
are kept in object storage (moto's S3 server). Agents call continuously. Killed in turn: a trainer, the grader, vLLM,
the learner, what serves the object storage, the database (PostgreSQL), and a trainer that is stopped for longer than
its lease and then resumed.

Checked afterwards in the store and the newest checkpoint: every answered trajectory is trained; the weights contain
each trained trajectory exactly once; every version that is kept can be read and has the checksums of its manifest; each
version descends from the one before it; the live version never goes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ratchet.store.errors import StoreUnavailable
from ratchet.store.records import Group, Round, Trajectory
from ratchet.store.states import GroupState, PolicyState, RoundState, TrajectoryState
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.errors import CheckpointError
from tests.harness.exactly_once.processes import AGENTS, ALIAS, PairingAgents, RestartableProcess
from tests.harness.ports import free_port
from tests.harness.postgres import Postgres
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.s3 import BUCKET, S3Server
from tests.harness.trainer.scripted_learner import read_weights

_LEASE_SECONDS = 5.0  # shorter ones run out on a busy machine
_KEPT = 3  # newest versions kept on disk
_BEST = 2  # best versions kept besides
_SETTLE_SECONDS = 60.0  # without progress


@dataclass
class ExactlyOnceOutcome:
    """Counts of a campaign. `violations` lists broken promises."""

    store: str
    kills: dict[str, int] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)  # processes that exited by themselves, by their last log line
    answered: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    read_back: int = 0  # versions that were fetched and verified at the end
    judged_again: int = 0  # trajectories with more than one verdict
    takeovers: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class ExactlyOnceCampaign:
    """One training loop whose processes are killed and restarted."""

    def __init__(self, folder: Path, server: Postgres | None, objects: S3Server, seed: int) -> None:
        self._folder = folder
        self._objects = objects
        self._server = server
        self._random = random.Random(seed)
        self.url = server.url if server else str(folder / "store.db")
        self.outcome = ExactlyOnceOutcome("postgresql" if server else "sqlite")
        self._store = open_store(self.url)
        ports = {name: free_port() for name in ("gateway", "grader", "vllm", "learner")}
        arguments = {name: str(port) for name, port in ports.items()} | {
            "gateway": f"{ports['gateway']}:{objects.port}"
        }
        self._versions = f"s3://{BUCKET}/{folder.name}"
        self._environment = objects.environment | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['gateway']}", "RATCHET_ADAPTER_STORE": self._versions,
        }  # fmt: skip
        self._processes = {
            name: RestartableProcess(name, argument, folder / f"{name}.log", self._environment_of(name))
            for name, argument in arguments.items()
        }
        vllm = f"http://127.0.0.1:{ports['vllm']}"
        eventually(lambda: all(map(_answers, ports.values())), 60)
        self._proxy = ProxyProcess(
            folder, upstreams=[vllm], store=self.url, port=free_port(), breaker_reset_seconds=0.5
        )
        eventually(lambda: httpx.get(self._proxy.url + "/health/ready", timeout=60).status_code == 200)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        trainer = json.dumps([self._trainer_settings(vllm, urls["grader"], urls["learner"])])
        self._processes |= {
            name: RestartableProcess("trainer", trainer, folder / f"{name}.log", self._environment_of(name))
            for name in ("first", "second")
        }
        self._agents = PairingAgents(self._proxy.url, pause=1.0)
        self._live = 0
        self._killed = ""  # the process that is down on purpose

    def _environment_of(self, process: str) -> dict[str, str]:
        return self._environment | {"RATCHET_ADAPTER_CACHE": str(self._folder / "cache" / process)}

    def _trainer_settings(self, vllm: str, grader: str, learner: str) -> dict[str, object]:
        return {
            "learner_process": {"url": learner},
            "store": self.url, "model": ALIAS, "base_model": "scripted", "vllm": [vllm],
            "checkpoints": str(self._folder / "state" / "checkpoints"), "adapters": {"store": self._versions},
            "judge": {"kind": "http", "url": grader, "timeout_seconds": 5.0},
            "judge_retry_seconds": 0.5, "seal_after_idle_seconds": 0.5, "num_generations": 2, "groups_per_round": 8,
            "group_wait_seconds": 3600.0, "round_wait_seconds": 1.0, "max_staleness": 10**6,
            "lease_seconds": _LEASE_SECONDS, "poll_interval_seconds": 0.05, "keep_checkpoints": _KEPT,
            "release": {"policy": "immediate"},
        }  # fmt: skip

    def has_started(self) -> bool:
        """Return whether a first version is trained and live."""
        self._watch(0.1)
        return self._live > 0

    def kill(self, number: int) -> None:
        """Kill one process at a random moment and restart it after a short pause."""
        self._watch(self._random.uniform(0.05, 1.2))
        victims: list[tuple[str, Callable[[], None]]] = [
            ("trainer", self._kill_a_trainer),
            ("grader", lambda: self._kill_temporarily("grader")),
            ("vLLM", lambda: self._kill_temporarily("vllm")),
            ("learner", lambda: self._kill_temporarily("learner")),
            ("object storage", lambda: self._kill_temporarily("gateway")),
            ("trainer, stopped past its lease", self._pause_a_trainer),
        ]
        if self._server is not None:
            victims.append(("database", self._kill_database))
        name, act = victims[number % len(victims)]
        act()
        _count(self.outcome.kills, name)

    def end(self) -> ExactlyOnceOutcome:
        """Let the training loop finish its backlog, stop it and check the result."""
        self._agents.stop()
        trained, until = -1, time.monotonic() + _SETTLE_SECONDS
        while (unsettled := self._unsettled()) and time.monotonic() < until:
            self._watch(0.2)
            now_trained = self._store.trajectories.counts()["trained"]
            if now_trained > trained:  # wait as long as there is progress: machines may be slow
                trained, until = now_trained, time.monotonic() + _SETTLE_SECONDS
        if unsettled:
            self.outcome.violations.append(f"not settled: {unsettled}")
            for name in ("first", "second"):
                os.kill(self._processes[name].process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        for process in self._processes.values():
            process.kill()
        if self._proxy.stop() != 0:
            self.outcome.violations.append("the proxy did not stop cleanly")
        self._read()
        self._store.close()
        return self.outcome

    def abandon(self) -> None:
        """Kill every process that still runs."""
        for process in self._processes.values():
            process.kill()
        with contextlib.suppress(ProcessLookupError):
            self._proxy.kill()

    def _kill_a_trainer(self) -> None:
        process = self._processes[self._random.choice(["first", "second"])]
        process.kill()
        process.start()

    def _kill_temporarily(self, name: str) -> None:
        self._killed = name
        self._processes[name].kill()
        self._watch(self._random.uniform(0.0, 1.5))
        self._processes[name].start()
        self._killed = ""

    def _kill_database(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._watch(self._random.uniform(0.0, 1.5))
        self._server.start()

    def _pause_a_trainer(self) -> None:
        """Stop a trainer for longer than its lease, then resume it; the other may hold the lease by then."""
        process = self._processes[self._random.choice(["first", "second"])]
        os.kill(process.process.pid, signal.SIGSTOP)
        self._watch(_LEASE_SECONDS * 1.5)
        os.kill(process.process.pid, signal.SIGCONT)

    def _watch(self, seconds: float) -> None:
        """Wait; restart processes that exited by themselves, and check that the live version never goes back."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, process in self._processes.items():
                if process.exited and name != self._killed:
                    _count(self.outcome.exits, _last_line(process.log))
                    process.start()
            with contextlib.suppress(StoreUnavailable):
                live = self._store.policies.live()[ALIAS].version
                if live < self._live:
                    self.outcome.violations.append(f"version {live} became live after {self._live}")
                self._live = live
            time.sleep(0.05)

    def _unsettled(self) -> str:
        """Say what the training loop still has to do; empty if nothing."""
        try:
            counts = self._store.trajectories.counts()
            versions = self._store.policies.all(ALIAS)
            left, shipped = self._stored() ^ self._kept(), sum(counts.values())
        except StoreUnavailable as error:
            return str(error)
        if shipped < len(self._agents.answered):
            return f"{shipped} of {len(self._agents.answered)} trajectories are shipped"
        if counts["open"] or counts["grouped"] or counts["sealed"] > AGENTS:
            return f"trajectories: {counts}"
        candidates = [one.version for one in versions if one.state is PolicyState.CANDIDATE]
        if candidates:
            return f"candidates that are not released: {candidates}"
        return f"either stored or named by the store, not both: {sorted(left)}" if left else ""

    def _kept(self) -> set[str]:
        """The references of the versions that the store names."""
        versions = self._store.policies.all(ALIAS)
        return {policy.adapter for policy in versions if policy.adapter and policy.pruned_at is None}

    def _stored(self) -> set[str]:
        """The references of the complete versions in the object storage."""
        end = f"/{checkpoint.MANIFEST}"
        return {f"s3://{BUCKET}/{name.removesuffix(end)}" for name in self._objects.names() if name.endswith(end)}

    def _read(self) -> None:
        outcome = self.outcome
        runs = list(_all_trajectories(self._store))
        rounds = [round_ for round_ in _all_rounds(self._store) if round_.state is RoundState.COMMITTED]
        outcome.answered = len(self._agents.answered)
        outcome.trained = sum(run.state is TrajectoryState.TRAINED for run in runs)
        outcome.dropped = dict(self._store.trajectories.drop_counts())
        outcome.rounds = dict(Counter(str(round_.state) for round_ in _all_rounds(self._store)))
        outcome.versions = dict(Counter(str(policy.state) for policy in self._store.policies.all(ALIAS)))
        outcome.judged_again = self._judged_again()
        ready = [path.read_text().count("event=trainer_ready") for path in self._folder.glob("*.log")]
        outcome.takeovers = max(0, sum(ready) - 1)
        outcome.violations += [*self._lost(runs), *self._trained_wrongly(runs, rounds), *self._lineage(rounds)]

    def _judged_again(self) -> int:
        judged: Counter[str] = Counter()
        for group in _all_groups(self._store):
            judged.update(verdict.trajectory_id for verdict in self._store.groups.verdict_history(group.id))
        return sum(count > 1 for count in judged.values())

    def _lost(self, runs: Sequence[Trajectory]) -> Iterator[str]:
        """Every answered trajectory with a second one of its task must be trained."""
        by_name = {run.id: run for run in runs}
        for name in self._agents.answered:
            run = by_name.get(name)
            if run is None:
                yield f"{name} was answered and is not stored"
            elif run.state is TrajectoryState.DROPPED or run.state is TrajectoryState.GROUPED:
                yield f"{name} was answered and is {run.state}: {run.drop_reason}"
        for group in _all_groups(self._store):
            if group.state is not GroupState.TRAINED:
                yield f"group {group.id} is {group.state}: {group.drop_reason}"

    def _trained_wrongly(self, runs: Sequence[Trajectory], rounds: Sequence[Round]) -> Iterator[str]:
        """The weights contain exactly the trajectories that the store marks as trained, each once."""
        newest = rounds[0] if rounds else None
        if newest is None or newest.checkpoint is None:
            yield "nothing was trained"
            return
        adapters = AdapterStore(self._folder / "read_back")
        kept, there = self._kept(), self._stored()
        if there != kept:
            yield f"the object storage holds {sorted(there)}, the store names {sorted(kept)}"
        if len(rounds) > 2 * (_KEPT + _BEST) and len(kept) == len(rounds):
            yield "unneeded versions are still there"
        for reference in sorted(kept):
            try:
                adapters.fetch(reference, state=False)
                self.outcome.read_back += 1
            except CheckpointError as error:
                yield f"{reference} cannot be loaded: {error}"
        folder = adapters.fetch(newest.checkpoint)
        counts = Counter(read_weights(folder))
        trained = {run.id for run in runs if run.state is TrajectoryState.TRAINED}
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            yield f"{len(twice)} trajectories were trained twice, e.g. {twice[0]}"
        if missing := trained - set(counts):
            yield f"{len(missing)} trajectories were consumed and are not in the weights, e.g. {min(missing)}"
        if surplus := set(counts) - trained:
            yield f"{len(surplus)} trajectories are in the weights and were not consumed, e.g. {min(surplus)}"

    def _lineage(self, rounds: Sequence[Round]) -> Iterator[str]:
        """Each committed round continues from the one before; versions increase; the newest one is live."""
        before = 0
        for round_ in reversed(rounds):
            if round_.from_version != before:
                yield f"version {round_.to_version} was trained from {round_.from_version}, not from {before}"
            if (round_.to_version or 0) <= before:
                yield f"version {round_.to_version} came after {before}"
            before = round_.to_version or 0
        live = self._store.policies.live()[ALIAS].version
        if live != before:
            yield f"version {live} is live, the newest one is {before}"


def run(folder: Path, kills: int, server: Postgres | None = None, seed: int = 1) -> ExactlyOnceOutcome:
    """Run a campaign in an empty folder."""
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(S3Server(folder)) as objects, pytest.MonkeyPatch.context() as patch:
        for name, value in objects.environment.items():
            patch.setenv(name, value)
        campaign = ExactlyOnceCampaign(folder, server, objects, seed)
        try:
            eventually(campaign.has_started, 300)
            for number in range(kills):
                campaign.kill(number)
            outcome = campaign.end()
        except BaseException:
            campaign.abandon()
            raise
    outcome.seconds = time.perf_counter() - started
    return outcome


def _all_trajectories(store: Store) -> Iterator[Trajectory]:
    last = None
    while page := store.trajectories.page(1000, before=last):
        last = page[-1].id
        yield from page


def _all_rounds(store: Store) -> Iterator[Round]:
    """Newest first."""
    last = None
    while page := store.rounds.page(ALIAS, 1000, before=last):
        last = page[-1].id
        yield from page


def _all_groups(store: Store) -> Iterator[Group]:
    last = None
    while page := store.groups.page(1000, before=last):
        last = page[-1].id
        yield from page


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1].split(" ", 3)[-1][:160] if lines else "nothing"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
