"""What many open trajectories cost: memory of each process, and the time until a killed coordinator links again.

Agents with tools fill a proxy of two workers by calls, all answers stay open, then the coordinator is killed. Calls of
the agents that were active last follow at once, those of the first agents once it links again.

    python -m benchmarks.coordinator_restart [--trajectories 10000] [--answers 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import sqlalchemy as sa

from benchmarks import contenders, wire_load
from benchmarks.wire_load import Target
from ratchet.output import progress_bars
from ratchet.store.db import schema
from ratchet.store.db.engine import connect
from tests.harness.proxy.servers import ProxyProcess, eventually

_AT_ONCE = 50  # agents
_AFTER = 1_000  # calls at once after the kill, and as many once the coordinator links again
_LIMIT = 2**30  # bytes of linking: nothing is dropped


@dataclass(frozen=True)
class Restart:
    """Memory in MB by process before the kill, seconds after it, and calls after it by `linked_by`."""

    trajectories: int
    answers: int
    fill_seconds: float
    memory: dict[str, int]
    slowest_seconds: float  # of the calls that followed at once
    serving_seconds: float  # until the coordinator links again
    restored: int  # trajectories
    linked_by: dict[str, int]


class _Log:
    """The proxy's log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pid(self, name: str) -> int:
        """Return the id of a process that the supervisor started."""
        return self._last(rf"event=process_started name={name} pid=(\d+)")

    def restored(self) -> int:
        """Return how many trajectories were restored last."""
        return self._last(r"event=linking_restored trajectories=(\d+)")

    def time_of(self, event: str, since: float) -> float:
        """Return when an event was logged after a moment, 0 if it was not (Unix seconds)."""
        times = re.findall(rf"^(\S+ \S+) .*event={event} ", self._path.read_text(), re.MULTILINE)
        moments = [datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f").timestamp() for one in times]
        return next((moment for moment in moments if moment >= since), 0.0)

    def _last(self, pattern: str) -> int:
        return int(re.findall(pattern, self._path.read_text())[-1])


def measure(trajectories: int, answers: int, folder: Path, upstream: int) -> Restart:
    """Fill a proxy, kill its coordinator, and return what that cost."""
    proxy = ProxyProcess(
        folder, upstreams=[f"http://127.0.0.1:{upstream}"], workers=2, max_linking_bytes=2 * _LIMIT,
        trajectory_idle_seconds=86_400,
    )  # fmt: skip
    log = _Log(folder / "proxy.log")
    try:
        contenders.wait_for(f"{proxy.url}/health/ready", 30)
        target, began = Target(urlsplit(proxy.url).port or 0, "agent"), time.time()
        groups = _fill(target, trajectories, answers)
        filled = time.time()
        time.sleep(5.0)  # until everything is stored
        memory = {name: _megabytes(log.pid(name)) for name in ("coordinator", "worker-1", "worker-2")}
        killed = time.time()
        os.kill(log.pid("coordinator"), signal.SIGKILL)
        few = _AFTER // _AT_ONCE
        slowest = max(seconds for group in reversed(groups[-few:]) for seconds in group.turns(1))
        serving = eventually(lambda: log.time_of("linking_restored", killed), 120)
        for group in groups[:few]:
            group.turns(1)
    finally:
        proxy.stop()
    return Restart(
        trajectories, trajectories * answers, filled - began, memory, slowest, serving - killed, log.restored(),
        _linked_by(folder / "store.db", killed),
    )  # fmt: skip


def _fill(target: Target, trajectories: int, answers: int) -> list[wire_load.Agents]:
    groups = []
    with progress_bars() as report_progress:
        report_progress("trajectories", 0, trajectories)
        for begin in range(0, trajectories, _AT_ONCE):
            count = min(_AT_ONCE, trajectories - begin)
            groups.append(wire_load.Agents(target, count))
            groups[-1].turns(answers)
            report_progress("trajectories", count, trajectories)
    return groups


def _megabytes(pid: int) -> int:
    return round(psutil.Process(pid).memory_info().rss / 2**20)


def _linked_by(store: Path, since: float) -> dict[str, int]:
    calls = schema.calls
    with connect(f"sqlite:///{store}").connect() as connection:
        return dict(Counter(connection.scalars(sa.select(calls.c.linked_by).where(calls.c.started_at > since))))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=20, help="of each trajectory, with one tool call each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with contenders.upstream(contenders.cores()[1]) as port, tempfile.TemporaryDirectory() as folder:
        found = measure(options.trajectories, options.answers, Path(folder), port)
    if options.json:
        print(json.dumps(asdict(found)))
        return
    for name, value in asdict(found).items():
        print(f"{name:<16} {value:.1f}" if isinstance(value, float) else f"{name:<16} {value}")


if __name__ == "__main__":
    main()
