"""Kills and cuts at random, from a seed: what is taken away comes back after a while."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.harness.partitions.machines import FailingMachine
from tests.harness.partitions.network import DATABASE, Network

_PAUSE = (0.3, 3.0)  # seconds between two faults
_CUT = (0.5, 25.0)  # seconds: below and above the time-outs between worker and coordinator
_DATABASE_CUT = (0.5, 15.0)
_AWAY = (0.0, 30.0)  # seconds that a machine stays away: the coordinator waits 15 for its workers
_START_ATTEMPTS = 8
_BURST = (1, 5)  # faults, which overlap; then everything comes back
_CALM = (1.0, 5.0)  # seconds without a fault, once every worker has a coordinator
_RECOVERY_SECONDS = 300.0  # of a busy machine
_KILLS = {"worker": 6, "coordinator": 4, "machine": 1, "both-sides": 1}  # how often each is chosen
_CUTS = {"cut": 3, "database-cut": 2}
KINDS = (*_KILLS, *_CUTS)


class Faults:
    """Applies faults to the machines and the links between them, and undoes them."""

    def __init__(
        self,
        network: Network,
        machines: list[FailingMachine],
        seed: int,
        scale: float,
        kind: str | None = None,
        calm_seconds: float | None = None,
    ) -> None:
        """`scale` shortens every duration. `kind`: only these faults, one at a time. `calm_seconds`: after each."""
        self._kind = kind
        self._calm = _CALM if calm_seconds is None else (calm_seconds / scale,) * 2
        self._network = network
        self._machines = machines
        self._random = random.Random(seed)
        self._scale = scale
        self._pending: dict[str, tuple[float, Callable[[], None]]] = {}  # by what is away: when it comes back, and how
        self._starting: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(2)
        self.kills: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.recovery_seconds: list[float] = []

    def run(self, kills: int, seconds: float) -> None:
        """Apply faults until there were that many kills (of one kind: faults), and for at least some seconds."""
        until = time.monotonic() + seconds
        while self._count() < kills or time.monotonic() < until:
            for _ in range(1 if self._kind else self._random.randint(*_BURST)):
                self._choose()()
                self._sleep(self._random.uniform(*_PAUSE) * self._scale)
            self._recover()
        self.undo()

    def _count(self) -> int:
        return self.kills.total() + (self.cuts.total() if self._kind else 0)

    def _recover(self) -> None:
        """Wait until everything is back, and a while longer. Raises AssertionError if the machines do not recover."""
        started = time.monotonic()
        while self._pending or not all(machine.is_whole() for machine in self._machines):
            self._sleep(0.1)
            assert time.monotonic() < started + _RECOVERY_SECONDS, "the machines did not recover"
        self.recovery_seconds.append(time.monotonic() - started)
        self._sleep(self._random.uniform(*self._calm) * self._scale)

    def undo(self) -> None:
        """Bring everything back now."""
        for _, bring_back in list(self._pending.values()):
            bring_back()
        self._pending.clear()
        for future in self._starting.values():
            future.result()
        self._threads.shutdown()

    def _choose(self) -> Callable[[], None]:
        kinds = _KILLS | _CUTS if self._network.has_links else _KILLS
        kind = self._kind or self._random.choices(list(kinds), list(kinds.values()))[0]
        assert kind in kinds, f"{kind}: without network namespaces nothing can be cut; run it as root"
        return {
            "worker": self._kill_worker,
            "coordinator": self._kill_coordinator,
            "machine": self._kill_machine,
            "both-sides": self._kill_both_sides,
            "cut": self._cut_machines,
            "database-cut": self._cut_database,
        }[kind]

    def _kill_worker(self) -> None:
        machine = self._random.choice(self._machines)
        names = sorted(name for name in machine.processes() if name != "coordinator")
        if names and machine.kill_process(self._random.choice(names)):
            self.kills["worker"] += 1

    def _kill_coordinator(self) -> None:
        """Mostly the one that decides."""
        deciding = [machine for machine in self._machines if machine.decides()]
        machine = self._random.choice(deciding if deciding and self._random.random() < 0.7 else self._machines)
        if machine.kill_process("coordinator"):
            self.kills["coordinator"] += 1

    def _kill_machine(self) -> None:
        self._kill(self._random.choice(self._machines))

    def _kill_both_sides(self) -> None:
        """The coordinator that decides, and every process of the other machine: its workers cannot tell what they know.

        Which coordinator decides is read in a log, and may be the other machine's, which then dies whole.
        """
        machine, other = self._random.sample(self._machines, 2)
        if machine.kill_process("coordinator"):
            self.kills["coordinator"] += 1
        self._kill(other)

    def _kill(self, machine: FailingMachine) -> None:
        if machine.is_running and machine.name not in self._pending and self._is_started(machine):
            machine.kill()
            self.kills["machine"] += 1
            self._come_back(machine.name, _AWAY, lambda: self._start(machine))

    def _cut_machines(self) -> None:
        one, other = (machine.name for machine in self._machines)
        self._cut(one, other, _CUT, "between machines")

    def _cut_database(self) -> None:
        self._cut(self._random.choice(self._machines).name, DATABASE, _DATABASE_CUT, "to the database")

    def _cut(self, one: str, other: str, seconds: tuple[float, float], what: str) -> None:
        name = f"{one}-{other}"
        if name not in self._pending:
            self._network.cut(one, other)
            self.cuts[what] += 1
            self._come_back(name, seconds, lambda: self._network.heal(one, other))

    def _come_back(self, name: str, seconds: tuple[float, float], how: Callable[[], None]) -> None:
        self._pending[name] = (time.monotonic() + self._random.uniform(*seconds) * self._scale, how)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, (at, bring_back) in list(self._pending.items()):
                if at <= time.monotonic():
                    del self._pending[name]
                    bring_back()
            time.sleep(0.02)

    def _is_started(self, machine: FailingMachine) -> bool:
        future = self._starting.get(machine.name)
        return future is None or future.done()

    def _start(self, machine: FailingMachine) -> None:
        self._starting[machine.name] = self._threads.submit(_start, machine)


def _start(machine: FailingMachine) -> None:
    """Start a machine; again while the database or the coordinator cannot be reached."""
    for attempt in range(_START_ATTEMPTS):
        try:
            machine.start()
        except AssertionError:
            if attempt == _START_ATTEMPTS - 1:
                raise
        else:
            return
        time.sleep(1.0)
