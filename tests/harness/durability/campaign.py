"""The durability campaign: `kill -9` under load, with database outages.

A scripted vLLM, the proxy and its clients each run in a process or thread of their own. In turn, the campaign kills the
proxy alone, the proxy with its store writer, and the store writer alone; the proxy restarts on the same journal. During
an outage the database is killed (PostgreSQL), or locked or moved away (SQLite).

Checked afterwards in the store: every call that a client saw completed is stored as answered, with exactly the tokens
the client received; no prompt is stored twice; no call is left unfinished; no call failed because of the database; all
hashes verify.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import connect, read
from ratchet.store.records import unpack_ids
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from ratchet.store.verify import verify
from tests.harness.durability.load import DurabilityLoad
from tests.harness.ports import free_port
from tests.harness.postgres import Postgres
from tests.harness.proxy.servers import ProxyProcess, VllmProcess, eventually

_TARGETS = ("proxy", "proxy and store writer", "store writer")


@dataclass
class DurabilityOutcome:
    """Counts of a campaign. `violations` lists broken promises."""

    store: str
    kills: dict[str, int] = field(default_factory=dict)
    outages: dict[str, int] = field(default_factory=dict)
    answered: int = 0
    abandoned: int = 0  # the client disconnected on purpose
    broken: int = 0  # the connection broke: a kill
    stored: dict[str, int] = field(default_factory=dict)  # by state
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class DurabilityCampaign:
    """A proxy at a fixed address, killed and restarted on one journal while clients keep calling."""

    def __init__(self, folder: Path, vllm_url: str, server: Postgres | None = None, seed: int = 1) -> None:
        self._database = folder / "database"
        self._database.mkdir()
        self._server = server
        self._folder = folder
        self._random = random.Random(seed)
        self._values = {"upstreams": [vllm_url], "port": free_port(), "journal_segment_bytes": 2**18}
        self._values["store"] = self.url = server.url if server else str(self._database / "store.db")
        self.outcome = DurabilityOutcome("postgresql" if server else "sqlite")
        self.load = DurabilityLoad(f"http://127.0.0.1:{self._values['port']}", seed=seed)
        self._proxy = self._start()

    def kill(self, number: int) -> None:
        """Kill a target at a random moment. The store writer restarts by itself, the proxy is restarted here."""
        time.sleep(self._random.uniform(0.05, 0.6))
        target = _TARGETS[number % 3]
        children = psutil.Process(self._proxy.pid).children(recursive=True)
        if target != _TARGETS[0]:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if target != _TARGETS[2]:
            self._proxy.kill()
            self._proxy = self._start()
        _count(self.outcome.kills, target)

    def outage(self, number: int, seconds: float) -> None:
        """Make the database unavailable for some seconds; no call may fail."""
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

    def end(self) -> DurabilityOutcome:
        """Stop the clients and the proxy, and check the store."""
        self.load.stop()
        client = httpx.Client(base_url=self._proxy.url)
        eventually(lambda: client.get("/health/backlog").json()["unshipped_records"] == 0, 60)
        client.close()
        if self._proxy.stop() != 0:
            self.outcome.violations.append("the proxy did not stop cleanly")
        outcome, load = self.outcome, self.load
        outcome.answered, outcome.abandoned, outcome.broken = len(load.answered), len(load.abandoned), load.broken
        outcome.violations += [*self._missing(), *self._duplicates(), *self._journal_leftovers()]
        return outcome

    def abandon(self) -> None:
        """Kill the proxy if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._proxy.kill()

    def _start(self) -> ProxyProcess:
        proxy = ProxyProcess(self._folder, **self._values)
        eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=60).status_code == 200)
        return proxy

    def _missing(self) -> Iterator[str]:
        """Compare what the clients received with what is stored."""
        store = open_store(self.url)
        expected, last = dict(self.load.answered), None
        while page := store.calls.page(1000, before=last):
            last = page[-1].id
            for call in page:
                _count(self.outcome.stored, str(call.state))
                text = expected.pop(call.id, None)
                if text is not None and call.state is not CallState.ANSWERED:
                    yield f"{call.id} was answered and is stored as {call.state}"
                elif text is not None and bytes(unpack_ids(call.choices[0].token_ids)[:-1]).decode() != text:
                    yield f"{call.id} is stored with tokens other than those its client received"
                elif call.id in self.load.abandoned and call.state is CallState.FAILED:
                    yield f"{call.id} was abandoned by its client and is stored as failed"
                elif call.state is CallState.STARTED:
                    yield f"{call.id} is stored as unfinished"
        store.close()
        yield from (f"{name} was answered and is not stored" for name in expected)

    def _duplicates(self) -> Iterator[str]:
        table, engine = schema.calls, connect(self.url)
        count = sa.func.count()
        with read(engine) as connection:
            rows = connection.execute(
                sa.select(table.c.prompt_node, count).group_by(table.c.prompt_node).having(count > 1)
            )
            yield from (f"the prompt {row[0]} is stored {row[1]} times" for row in rows)
        engine.dispose()
        if not verify(self.url).sound:
            yield "store verification failed"

    def _journal_leftovers(self) -> Iterator[str]:
        journal = self._folder / "journal"
        yield from (f"{path.name} remains in the journal" for path in journal.glob("*.damaged"))
        if (journal / "dead-letters.jsonl").exists():
            yield "there are dead letters"

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
) -> DurabilityOutcome:
    """Run a campaign in an empty folder, with the outages spread among the kills."""
    started, vllm = time.perf_counter(), VllmProcess()
    try:
        campaign = DurabilityCampaign(folder, vllm.url, server, seed)
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
    outcome.seconds = time.perf_counter() - started
    return outcome


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
