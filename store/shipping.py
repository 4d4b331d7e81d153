"""Writing calls: their messages, their trajectories, their rows, in one transaction of the caller's.

Promises: repeating a record changes nothing; a call that arrives after its trajectory was grouped or finished opens a
successor trajectory, and so does one of another version, purpose or key; rows are written in one piece where beginning
and end come together, and the end of a call that has begun replaces its row, so that pages do not fill with holes.
Text that an agent or an upstream chose is cut to what a column holds: no database refuses a call for it.

Locks are taken in the order of ids, so that proxies that ship the same messages and trajectories do not deadlock.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from store import blocks, schema
from store.inserting import among, change, insert
from store.owners import may_share
from store.records import CallBegun, CallEnded, CallRecord, MessageNode
from store.states import CallState, TrajectoryState

IDLE = "idle"  # why a trajectory was sealed: it was still
FINISH = "finish"  # somebody said that it is complete
IN_MOST = 500  # values in one IN (...)
MESSAGES_LOCK = 0x52414D53  # advisory lock: shared by those who ship messages, held alone by who deletes some
_TASK_MOST = 512  # characters; more does not fit an index
_BEGUN_COLUMNS = (
    "started_at", "alias", "version", "dialect", "streamed", "linked_by", "prompt_node", "tools_hash",
    "parent_call", "parent_choice", "key_id", "role",
)  # fmt: skip
_ENDED_COLUMNS = (
    "state", "ended_at", "first_byte_at", "status", "context", "prompt_ids", "prompt_tokens", "completion_tokens",
    "untrainable", "error", "upstream", "answer_id",
)  # fmt: skip
_begun_values, _ended_values = attrgetter(*_BEGUN_COLUMNS), attrgetter(*_ENDED_COLUMNS)
_NOT_ENDED: Mapping[str, Any] = {
    "state": CallState.BEGUN, "ended_at": None, "first_byte_at": None, "status": None, "context": "root",
    "prompt_ids": b"", "prompt_tokens": 0, "completion_tokens": 0, "untrainable": None, "error": None,
    "upstream": None, "answer_id": None,
}  # fmt: skip

_ACTIVE = (
    sa.update(schema.trajectories)
    .where(schema.trajectories.c.id == sa.bindparam("run"), schema.trajectories.c.last_active_at < sa.bindparam("at"))
    .values(last_active_at=sa.bindparam("at"))
)  # fmt: skip


class _Run(NamedTuple):
    """A trajectory's row, as far as it says which calls it takes."""

    state: str
    sealed_by: str | None
    version: int
    purpose: str
    key_id: str | None
    successors: int


def ship(connection: sa.Connection, records: Sequence[CallRecord]) -> None:
    """Write a batch of beginnings and ends inside the caller's transaction."""
    share_messages(connection)
    _add_messages(connection, records)
    # The first record of a kind counts; those that follow it in the batch repeat it.
    begun = {one.call_id: one for one in map(_begun_of, reversed(records))}
    ended = {one.begun.call_id: one for one in reversed(records) if isinstance(one, CallEnded)}
    known = _known(connection, sorted(begun))
    new = [one for one in reversed(begun.values()) if one.call_id not in known]
    awaited = (CallState.BEGUN, CallState.INTERRUPTED)
    ending = {n: end for n, end in ended.items() if n not in known or known[n].state in awaited}
    hosts = {name: row.trajectory_id for name, row in known.items()}
    hosts |= _host_trajectories(connection, new, ended, also=(hosts[name] for name in ending if name in hosts))
    _write_calls(connection, new, ending, hosts, replaced=[name for name in ending if name in known])
    _write_choices(connection, ending.values())
    _touch(connection, _active(new, ending.values(), hosts))


def insert_new(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> int:
    """Insert rows, leaving those whose primary key exists as they are; return how many are new."""
    return insert(connection, table, rows, new_only=True)


def share_messages(connection: sa.Connection) -> None:
    """Keep messages from being deleted until this transaction ends. SQLite has one writer at a time anyway."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({MESSAGES_LOCK})")


def _begun_of(record: CallRecord) -> CallBegun:
    return record if isinstance(record, CallBegun) else record.begun


def _add_messages(connection: sa.Connection, records: Sequence[CallRecord]) -> None:
    nodes: dict[str, MessageNode] = {}
    toolsets: dict[str, bytes] = {}
    for record in records:
        begun = _begun_of(record)
        for node in (*begun.nodes, *(record.nodes if isinstance(record, CallEnded) else ())):
            nodes[node.hash] = node
        if begun.tools:
            toolsets[begun.tools_hash] = begun.tools
    rows = [msgspec.structs.asdict(nodes[name]) for name in sorted(nodes)]
    insert_new(connection, schema.messages, all_fitting(schema.messages, rows))
    insert_new(connection, schema.toolsets, [{"hash": name, "body": toolsets[name]} for name in sorted(toolsets)])


def _known(connection: sa.Connection, names: Sequence[str]) -> dict[str, Any]:
    """Return state and trajectory of each of these calls that is there."""
    table = schema.calls
    columns = sa.select(table.c.id, table.c.state, table.c.trajectory_id)
    rows = connection.execute(columns.where(among(connection, table.c.id, names))) if names else ()
    return {row.id: row for row in rows}


def fitting(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with every text cut to its column, and without what PostgreSQL's texts cannot hold."""
    return all_fitting(table, [row])[0]


def all_fitting(table: sa.Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows so that each fits; all say the same columns. A column whose texts all fit is not gone through."""
    for name, length in _texts(table):
        if rows and name in rows[0]:
            said = [value for row in rows if (value := row[name]) is not None]
            if said and (max(map(len, said)) > length or "\0" in "".join(said)):
                for row in rows:
                    row[name] = None if row[name] is None else row[name].replace("\0", "\ufffd")[:length]
    return rows


@cache
def _texts(table: sa.Table) -> tuple[tuple[str, int], ...]:
    """Return the columns that hold text, each with the most characters that it takes."""
    return tuple((c.name, c.type.length or sys.maxsize) for c in table.c if isinstance(c.type, sa.String))


def _write_calls(
    connection: sa.Connection,
    new: Sequence[CallBegun],
    ending: Mapping[str, CallEnded],
    hosts: Mapping[str, str],
    replaced: Sequence[str],
) -> None:
    """Insert the rows of new calls, with their ends where those are here; replace those of calls that end now."""
    table = schema.calls
    if replaced:
        connection.execute(sa.delete(table).where(among(connection, table.c.id, replaced)))
    rows = []
    for begun in (*new, *(ending[name].begun for name in replaced)):
        end = ending.get(begun.call_id)
        row = dict(zip(_BEGUN_COLUMNS, _begun_values(begun), strict=True))
        row |= zip(_ENDED_COLUMNS, _ended_values(end), strict=True) if end else _NOT_ENDED
        row |= {"id": begun.call_id, "trajectory_id": hosts[begun.call_id], "prompt_blocks": None}
        row |= {"tags": list(begun.tags), "sampling": dict(begun.sampling)}
        rows.append(row)
    _cut_prompts(connection, all_fitting(table, rows))
    insert(connection, table, rows)
    _add_tags(connection, new, hosts)


def _cut_prompts(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Put the blocks of forked prompts where they are stored once."""
    stored: dict[tuple[str, bytes], bytes] = {}
    for row in rows:
        pieces, rest = blocks.cut(row["context"], row["prompt_ids"])
        if pieces:
            names = [blocks.digest(piece) for piece in pieces]
            row |= {"prompt_ids": rest, "prompt_blocks": b"".join(names)}
            stored |= {(row["trajectory_id"], name): piece for name, piece in zip(names, pieces, strict=True)}
    ordered = [{"trajectory_id": run, "digest": name, "ids": stored[run, name]} for run, name in sorted(stored)]
    insert_new(connection, schema.blocks, ordered)


def _add_tags(connection: sa.Connection, calls: Sequence[CallBegun], hosts: Mapping[str, str]) -> None:
    """Note the tags of calls at their trajectories."""
    tagged = {hosts[begun.call_id] for begun in calls if begun.tags}
    if not tagged:
        return
    runs = schema.trajectories
    found = connection.execute(sa.select(runs.c.id, runs.c.opened_at).where(runs.c.id.in_(tagged)))
    opened = {row.id: row.opened_at for row in found}
    pairs = sorted({(hosts[begun.call_id], tag) for begun in calls for tag in begun.tags})
    rows = [{"tag": tag, "opened_at": opened[name], "trajectory_id": name} for name, tag in pairs]
    insert_new(connection, schema.tags, all_fitting(schema.tags, rows))


def _write_choices(connection: sa.Connection, ends: Collection[CallEnded]) -> None:
    table = schema.choices
    rows = [
        {
            "call_id": end.begun.call_id,
            "choice": choice.index,
            "finish_reason": choice.finish_reason,
            "reply_node": choice.reply_node,
            "link_key": choice.link_key,
            "tool_call_ids": list(choice.tool_call_ids),
            "ids": choice.ids,
            "logprobs": choice.logprobs,
        }
        for end in ends
        for choice in end.choices
    ]
    insert(connection, table, all_fitting(table, rows))


def _active(new: Iterable[CallBegun], ends: Iterable[CallEnded], hosts: Mapping[str, str]) -> dict[str, float]:
    """Return when each trajectory of these calls was active last."""
    times: dict[str, float] = {}
    moments = [(one.call_id, one.started_at) for one in new] + [(end.begun.call_id, end.ended_at) for end in ends]
    for name, moment in moments:
        times[hosts[name]] = max(moment, times.get(hosts[name], 0.0))
    return times


def _host_trajectories(
    connection: sa.Connection, calls: Sequence[CallBegun], ended: Mapping[str, CallEnded], also: Iterable[str]
) -> dict[str, str]:
    """Return, by call id, the open trajectory that takes the call; make those that are new; lock those of `also`."""
    firsts = {begun.trajectory_id: begun for begun in reversed(calls)}
    runs = _runs(connection, sorted({*firsts, *also}))
    if new := {name: begun for name, begun in firsts.items() if name not in runs}:
        runs |= _add_trajectories(connection, new, ended)
    hosts: dict[str, str] = {}
    taken: set[str] = set()
    for begun in calls:
        name = begun.trajectory_id
        if _takes(runs[name], begun):
            hosts[begun.call_id] = name
            taken.add(name)
        else:
            hosts[begun.call_id] = _successor(connection, begun, ended)
    _reopen(connection, [name for name in sorted(taken) if runs[name].state == TrajectoryState.SEALED])
    return hosts


def _runs(connection: sa.Connection, names: Sequence[str]) -> dict[str, _Run]:
    """Return the rows of trajectories by id, locked where the database locks rows: nobody may seal one meanwhile."""
    runs = schema.trajectories
    if not names:
        return {}
    columns = [runs.c[name] for name in ("id", *_Run._fields)]
    query = sa.select(*columns).where(among(connection, runs.c.id, names)).order_by(runs.c.id).with_for_update()
    return {row.id: _Run(*row[1:]) for row in connection.execute(query)}


def _takes(run: _Run, begun: CallBegun) -> bool:
    """Return whether a trajectory may take a further call.

    It must be open, or sealed only for being still; and of the call's version, purpose and key, since a trajectory has
    one of each.
    """
    still = run.state == TrajectoryState.SEALED and run.sealed_by == IDLE
    same = (run.version, run.purpose) == (begun.version, begun.purpose) and may_share(run.key_id, begun.key_id)
    return bool(same and (run.state == TrajectoryState.OPEN or still))


def _successor(connection: sa.Connection, begun: CallBegun, ended: Mapping[str, CallEnded]) -> str:
    """Return the successor of a closed trajectory that takes the call: the latest one, or a new one.

    A client may have given the name that a successor would get to a run of its own: then the next number is taken.
    """
    runs, origin = schema.trajectories, begun.trajectory_id
    count = int(connection.scalar(sa.select(runs.c.successors).where(runs.c.id == origin)) or 0)
    number = max(1, count)
    while True:
        name = f"{origin}~{number}"
        known = _runs(connection, [name]) or _add_trajectories(connection, {name: begun}, ended)
        if _takes(known[name], begun):
            break
        number += 1
    if number != count:
        connection.execute(sa.update(runs).where(runs.c.id == origin).values(successors=number))
    _reopen(connection, [name])
    return name


def _reopen(connection: sa.Connection, names: Sequence[str]) -> None:
    runs = schema.trajectories
    if names:
        connection.execute(
            sa.update(runs)
            .where(runs.c.id.in_(names), runs.c.state == TrajectoryState.SEALED)
            .values(state=TrajectoryState.OPEN, sealed_at=None, sealed_by=None)
        )


def _add_trajectories(
    connection: sa.Connection, new: Mapping[str, CallBegun], ended: Mapping[str, CallEnded]
) -> dict[str, _Run]:
    """Make trajectories that are not there, each with the values of its first call; return their rows."""
    rows: list[dict[str, Any]] = [
        {
            "id": name,
            "alias": begun.alias,
            "version": begun.version,
            "state": TrajectoryState.OPEN,
            "task": short_task(begun.task),
            "purpose": begun.purpose,
            "root_node": begun.prompt_node,
            "tools_hash": begun.tools_hash,
            "key_id": begun.key_id,
            "opened_at": begun.started_at,
            "last_active_at": ended[begun.call_id].ended_at if begun.call_id in ended else begun.started_at,
        }
        for name, begun in sorted(new.items())
    ]
    if insert_new(connection, schema.trajectories, all_fitting(schema.trajectories, rows)) < len(rows):
        return _runs(connection, sorted(new))  # another proxy was quicker, with other values
    return {row["id"]: _Run(row["state"], None, row["version"], row["purpose"], row["key_id"], 0) for row in rows}


def _touch(connection: sa.Connection, times: Mapping[str, float]) -> None:
    """Note that trajectories were active at these times."""
    change(connection, _ACTIVE, [{"run": name, "at": times[name]} for name in sorted(times)])


def short_task(task: str | None) -> str | None:
    """Return a task as it is stored: a very long one as its beginning and a hash of the whole."""
    if task is None or len(task) <= _TASK_MOST:
        return task
    return f"{task[: _TASK_MOST - 40]}~{blake2b(task.encode(), digest_size=16).hexdigest()}"
