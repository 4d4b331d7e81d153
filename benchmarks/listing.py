"""How long lists take in a store of a million trajectories: every filter, at its first, a middle and its last page.

The rows are made in the database by one statement per table, with the spread of a real store: few open runs, many
tasks, some tags and keys, one rare of each. Each page of 50 is read as `GET /api/trajectories` reads it; the time is
the median of five. The aim is 50 ms for each.

    python -m benchmarks.listing [--trajectories 1000000] [--store URL] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.db import schema
from ratchet.store.db.engine import connect, write
from ratchet.store.store import Store, open_store
from tests.harness.postgres import postgres

_AIM = 0.05  # seconds
_PAGE = 50
_BEGAN = 1.7e9


@dataclass(frozen=True)
class Timing:
    """Seconds for the three pages of one list."""

    store: str
    filter: str
    first: float
    middle: float
    last: float


def filters(count: int) -> dict[str, TrajectoryFilter]:
    """Return the lists to read, by name."""
    middle = _BEGAN + count / 2
    return {
        "all": TrajectoryFilter(),
        "state=trained": TrajectoryFilter(state="trained"),
        "state=open": TrajectoryFilter(state="open"),
        "alias=mail": TrajectoryFilter(alias="mail"),
        "alias=rare": TrajectoryFilter(alias="rare"),
        "alias=mail&state=dropped": TrajectoryFilter(alias="mail", state="dropped"),
        "alias=mail&version=7": TrajectoryFilter(alias="mail", version=7),
        "task=find/17": TrajectoryFilter(task="find/17"),
        "key=key_3": TrajectoryFilter(key="key_3"),
        "key=rare": TrajectoryFilter(key="key_rare"),
        "tag=nightly": TrajectoryFilter(tag="nightly"),
        "tag=rare": TrajectoryFilter(tag="rare"),
        "tag=nightly&state=open": TrajectoryFilter(tag="nightly", state="open"),
        "tag=nightly&alias=rare": TrajectoryFilter(tag="nightly", alias="rare"),
        "tag=nightly&state=dropped": TrajectoryFilter(tag="nightly", state="dropped"),
        "tag=nightly&task=find/17": TrajectoryFilter(tag="nightly", task="find/17"),
        "tag=nightly&until": TrajectoryFilter(tag="nightly", until=_BEGAN + 1000),
        "since&until": TrajectoryFilter(since=middle, until=middle + 1000),
        "since&state=open": TrajectoryFilter(since=middle, state="open"),
        "search=traj_0000012": TrajectoryFilter(search="traj_0000012"),
        "search=traj_": TrajectoryFilter(search="traj_"),
    }


def fill(url: str, count: int) -> None:
    """Make the rows: one call each."""
    engine = connect(url)
    lite = engine.dialect.name == "sqlite"
    if lite:
        source = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {count - 1})"
        padded, empty = "printf('%010d', i)", "x''"
    else:
        source, padded, empty = (
            f"WITH n AS (SELECT generate_series(0, {count - 1}) AS i)",
            "lpad(i::text, 10, '0')",
            "''::bytea",
        )
    with write(engine) as connection:

        def run(statement: str) -> None:
            connection.exec_driver_sql(statement if lite else statement.replace("%", "%%"))

        run(
            "INSERT INTO rounds (id, alias, state, from_version, to_version, started_at, checkpoint, metrics) "
            "VALUES ('rnd_1', 'mail', 'committed', 0, 1, 1, '/c', '{}')"
        )
        run(
            "INSERT INTO trajectories (id, alias, version, state, purpose, task, root_node, tools_hash, key_id, "
            "opened_at, last_active_at, sealed_at, sealed_by, round_id, drop_reason) "
            f"{source} SELECT 'traj_' || {padded}, CASE WHEN i % 100003 = 7 THEN 'rare' ELSE 'mail' END, i % 20, "
            "CASE WHEN i % 10007 = 1 THEN 'open' WHEN i % 5 = 0 THEN 'dropped' ELSE 'trained' END, 'live', "
            f"'find/' || (i % 1000), {empty}, {empty}, "
            "CASE WHEN i % 100003 = 9 THEN 'key_rare' ELSE 'key_' || (i % 50) END, "
            f"{_BEGAN} + i, {_BEGAN} + i, {_BEGAN} + i, 'idle', "
            "CASE WHEN i % 10007 = 1 OR i % 5 = 0 THEN NULL ELSE 'rnd_1' END, "
            "CASE WHEN i % 10007 <> 1 AND i % 5 = 0 THEN 'no_variance' END FROM n"
        )
        run(
            "INSERT INTO calls (id, trajectory_id, state, alias, version, dialect, streamed, linked_by, parent_choice, "
            "tags, sampling, prompt_node, tools_hash, context, prompt_ids, prompt_tokens, completion_tokens, "
            "started_at) "
            f"{source} SELECT 'call_' || {padded}, 'traj_' || {padded}, "
            "CASE WHEN i % 10007 = 1 THEN 'failed' ELSE 'answered' END, 'mail', i % 20, 'chat', "
            f"{'1' if lite else 'true'}, 'root', 0, '[]', '{{}}', {empty}, {empty}, 'root', {empty}, 0, 0, "
            f"{_BEGAN} + i FROM n"
        )
        run(
            f"INSERT INTO trajectory_tags (tag, opened_at, trajectory_id) {source} SELECT "
            "CASE WHEN i % 100003 = 3 THEN 'rare' ELSE 'nightly' END, "
            f"{_BEGAN} + i, 'traj_' || {padded} FROM n WHERE i % 3 = 0"
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if not lite:  # autovacuum does it in production within a minute; SQLite is measured as it is
            connection.exec_driver_sql("VACUUM ANALYZE")
    engine.dispose()


def seconds(ask: Callable[[], object]) -> float:
    """Return the median of five askings."""
    took = []
    for _ in range(5):
        started = time.perf_counter()
        ask()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def places(url: str, chosen: TrajectoryFilter) -> tuple[str | None, str | None]:
    """Return the ids before a list's middle and last page."""
    engine, runs = connect(url), schema.trajectories
    order = (runs.c.id.desc(),) if chosen.search else (runs.c.opened_at.desc(), runs.c.id.desc())
    with engine.connect() as connection:
        total = connection.scalar(sa.select(sa.func.count()).select_from(runs).where(chosen.where())) or 0
        query = sa.select(runs.c.id).where(chosen.where()).order_by(*order)
        found = [connection.scalar(query.offset(at).limit(1)) for at in (total // 2, max(0, total - _PAGE - 1))]
    engine.dispose()
    return found[0], found[1]


def measure(url: str, count: int) -> list[Timing]:
    """Fill an empty store and time its lists."""
    store = open_store(url)
    fill(url, count)
    kind = sa.make_url(url).get_backend_name()
    timings = []
    for name, chosen in filters(count).items():
        marks = (None, *places(url, chosen))
        took = [seconds(partial(store.trajectories.page, _PAGE, mark, chosen=chosen)) for mark in marks]
        timings.append(Timing(kind, name, *took))
    timings += _others(store, kind, count)
    store.close()
    return timings


def _others(store: Store, kind: str, count: int) -> list[Timing]:
    """Time the lists of calls, and the counts of /api/training: first asked, asked again, and asked again."""
    found = []
    for name, state in (("calls", None), ("calls, state=failed", "failed"), ("calls, state=answered", "answered")):
        marks = [None, f"call_{count // 2:010d}", f"call_{100 if state != 'failed' else 10008:010d}"]
        took = [seconds(partial(store.calls.page, _PAGE, mark, state=state)) for mark in marks]
        found.append(Timing(kind, name, *took))
    middle = f"traj_{count // 2:010d}"
    found.append(Timing(kind, "calls of a run", *[seconds(lambda: store.calls.page(_PAGE, trajectory=middle))] * 3))
    took = []
    for _ in range(3):
        started = time.perf_counter()
        store.trajectories.counts()
        store.trajectories.drop_counts()
        took.append(time.perf_counter() - started)
    return [*found, Timing(kind, "counts, again, again", *took)]


def main() -> None:
    """Print the table; fail where a page takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--store", help="an empty database; without it, SQLite and a PostgreSQL of its own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.store:
            timings = measure(options.store, options.trajectories)
        else:
            timings = measure(f"sqlite:///{Path(folder) / 'store.db'}", options.trajectories)
            with postgres() as url:
                timings += measure(url, options.trajectories)
    if options.json:
        print(json.dumps([asdict(timing) for timing in timings]))
    else:
        print(f"{'ms a page':36} {'first':>8} {'middle':>8} {'last':>8}")
        for one in timings:
            cells = " ".join(f"{1000 * part:8.1f}" for part in (one.first, one.middle, one.last))
            print(f"{one.store:11} {one.filter:24} {cells}")
    slow = [one for one in timings if "counts" not in one.filter and max(one.first, one.middle, one.last) > _AIM]
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
