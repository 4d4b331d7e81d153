"""An answered call is a recorded call: `kill -9` under load, again and again, with the database dying as well.

A scripted vLLM, the proxy and its clients run as in production, each in processes or threads of their own. In turns the
proxy alone is killed, the proxy with the process that ships for it, and that process alone; the proxy starts again on
the same journal. Outages: the database is killed (PostgreSQL) or locked and then moved away (SQLite) for a while.

Then the store is read: every call whose end a client has seen is there as answered, with the very tokens of the words
that it saw; no prompt is stored twice; nothing is left as begun; no call failed for the database; every hash is right.

    python -m benchmarks.durability [--kills 200] [--store sqlite|postgresql] [--outages 2] [--seconds 20] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import sqlalchemy as sa

from benchmarks.campaign import tell
from benchmarks.databases import Postgres, postgres_server
from benchmarks.load import Load
from ratchet.store.db import schema
from ratchet.store.db.engine import connect, read
from ratchet.store.records import unpack_ids
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from ratchet.store.verify import verify
from tests.harness.proxy.servers import ProxyProcess, VllmProcess, eventually

_HOW = ("the proxy alone", "the proxy and its shipper", "the shipper alone")


@dataclass
class Outcome:
    """What a campaign came to; `violations` is empty where every promise held."""

    store: str
    kills: dict[str, int] = field(default_factory=dict)
    outages: dict[str, int] = field(default_factory=dict)
    answered: int = 0
    left: int = 0  # by their clients
    broken: int = 0  # by a kill
    stored: dict[str, int] = field(default_factory=dict)  # by state
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class Campaign:
    """One proxy at one address, killed and started again on one journal; clients that do not care."""

    def __init__(self, folder: Path, vllm_url: str, server: Postgres | None = None, seed: int = 1) -> None:
        self._database = folder / "database"
        self._database.mkdir()
        self._server = server
        self._folder = folder
        self._random = random.Random(seed)
        self._values = {"upstreams": [vllm_url], "port": _free_port(), "journal_segment_bytes": 2**18}
        self._values["store"] = self.url = server.url if server else str(self._database / "store.db")
        self.outcome = Outcome("postgresql" if server else "sqlite")
        self.load = Load(f"http://127.0.0.1:{self._values['port']}", seed=seed)
        self._proxy = self._start()

    def kill(self, number: int) -> None:
        """Kill something at a random moment, and start again what does not start by itself."""
        time.sleep(self._random.uniform(0.05, 0.6))
        how = _HOW[number % 3]
        children = psutil.Process(self._proxy.pid).children(recursive=True)
        if how != _HOW[0]:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if how != _HOW[2]:
            self._proxy.kill()
            self._proxy = self._start()
        _count(self.outcome.kills, how)

    def outage(self, number: int, seconds: float) -> None:
        """Take the database away for a while; calls must not notice."""
        refused = len(self.load.refused)
        broken = self.load.broken
        how, away = (
            ("killed", self._killed) if self._server else (("locked", self._locked), ("moved", self._moved))[number % 2]
        )
        with away():
            before = len(self.load.answered)
            time.sleep(seconds)
            during = len(self.load.answered) - before
        _count(self.outcome.outages, how)
        if not during:
            self.outcome.violations.append(f"no call was answered while the database was {how}")
        if len(self.load.refused) > refused or self.load.broken > broken:
            self.outcome.violations.append(
                f"calls failed while the database was {how}: {self.load.refused[refused:][:3]}"
            )

    def end(self) -> Outcome:
        """Stop the clients and the proxy, and look at the store."""
        self.load.stop()
        client = httpx.Client(base_url=self._proxy.url)
        eventually(lambda: client.get("/health/backlog").json()["unshipped_records"] == 0, 60)
        client.close()
        if self._proxy.stop() != 0:
            self.outcome.violations.append("the proxy did not stop cleanly")
        outcome, load = self.outcome, self.load
        outcome.answered, outcome.left, outcome.broken = len(load.answered), len(load.left), load.broken
        outcome.violations += [*self._missing(), *self._doubled(), *self._left_behind()]
        return outcome

    def abandon(self) -> None:
        """End what still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._proxy.kill()

    def _start(self) -> ProxyProcess:
        proxy = ProxyProcess(self._folder, **self._values)
        eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=5).status_code == 200, 30)
        return proxy

    def _missing(self) -> Iterator[str]:
        """Compare what clients saw with what is stored, word for word."""
        store = open_store(self.url)
        wanted, last = dict(self.load.answered), None
        while page := store.calls.page(1000, before=last):
            last = page[-1].id
            for call in page:
                _count(self.outcome.stored, str(call.state))
                words = wanted.pop(call.id, None)
                if words is not None and call.state is not CallState.ANSWERED:
                    yield f"{call.id} was answered and is stored as {call.state}"
                elif words is not None and bytes(unpack_ids(call.choices[0].ids)[:-1]).decode() != words:
                    yield f"{call.id} is stored with other tokens than its client saw"
                elif call.id in self.load.left and call.state is CallState.FAILED:
                    yield f"{call.id} was left by its client and is stored as failed"
                elif call.state is CallState.BEGUN:
                    yield f"{call.id} is still stored as begun"
        store.close()
        yield from (f"{name} was answered and is not stored" for name in wanted)

    def _doubled(self) -> Iterator[str]:
        table, engine = schema.calls, connect(self.url)
        count = sa.func.count()
        with read(engine) as connection:
            rows = connection.execute(
                sa.select(table.c.prompt_node, count).group_by(table.c.prompt_node).having(count > 1)
            )
            yield from (f"the prompt {row[0]} is stored {row[1]} times" for row in rows)
        engine.dispose()
        if not verify(self.url).sound:
            yield "the store does not verify"

    def _left_behind(self) -> Iterator[str]:
        journal = self._folder / "journal"
        yield from (f"{path.name} is left in the journal" for path in journal.glob("*.damaged"))
        if (journal / "dead-letters.jsonl").exists():
            yield "records were put aside as dead letters"

    @contextlib.contextmanager
    def _killed(self) -> Iterator[None]:
        assert self._server is not None
        self._server.kill()
        yield
        self._server.start()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        blocker = sqlite3.connect(self.url, isolation_level=None, timeout=30)
        blocker.execute("BEGIN EXCLUSIVE")
        yield
        blocker.rollback()
        blocker.close()

    @contextlib.contextmanager
    def _moved(self) -> Iterator[None]:
        aside = self._database.rename(self._database.with_name("aside"))
        yield
        aside.rename(self._database)


def run(
    folder: Path, kills: int, outages: int, seconds: float, server: Postgres | None = None, seed: int = 1
) -> Outcome:
    """Run a campaign in an empty folder; outages are spread among the kills."""
    began, vllm = time.perf_counter(), VllmProcess()
    try:
        campaign = Campaign(folder, vllm.url, server, seed)
        try:
            campaign.load.start()
            spread = max(1, kills // max(1, outages))
            for number in range(max(kills, outages * spread)):
                if number < kills:
                    campaign.kill(number)
                if number % spread == 0 and number // spread < outages:
                    campaign.outage(number // spread, seconds)
            outcome = campaign.end()
        except BaseException:
            campaign.abandon()
            raise
    finally:
        vllm.kill()
    outcome.seconds = time.perf_counter() - began
    return outcome


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Print what happened; fail where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--outages", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long an outage lasts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres_server()) if options.store == "postgresql" else None
        outcome = run(Path(folder), options.kills, options.outages, options.seconds, server, options.seed)
    tell(outcome, as_json=options.json)


if __name__ == "__main__":
    main()
