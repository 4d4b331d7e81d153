"""Writing calls: their messages, their trajectories, their rows, in one transaction of the caller's.

Promises: repeating a record changes nothing; a call that arrives after its trajectory was grouped or finished opens a
successor trajectory, and so does one of another version, purpose or key; rows are written in one piece where beginning
and end come together, and the end of a call that has begun replaces its row, so that pages do not fill with holes.
Text that an agent or an upstream chose is cut to what a column holds: no database refuses a call for it.

Locks are taken in the order of ids, so that proxies that ship the same messages and trajectories do not deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from ratchet.store.access.ownership import may_share_trajectory
from ratchet.store.calls import prompt_blocks as blocks
from ratchet.store.db import schema
from ratchet.store.db.bulk import execute_many, in_values, insert_columns, insert_or_ignore, truncate_columns
from ratchet.store.records import CallEnded, CallRecord, CallStarted, MessageNode
from ratchet.store.states import CallState, TrajectoryState

IDLE = "idle"  # why a trajectory was sealed: it was still
FINISH = "finish"  # somebody said that it is complete
MESSAGES_LOCK = 0x52414D53  # advisory lock: shared by those who ship messages, held alone by who deletes some
_TASK_MOST = 512  # characters; more does not fit an index
_NODE_COLUMNS = ("hash", "parent", "role", "body")
_START_COLUMNS = (
    "id", "started_at", "alias", "version", "dialect", "streamed", "linked_by", "prompt_node", "tools_hash",
    "parent_call", "parent_choice", "key_id", "role", "tags", "sampling",
)  # fmt: skip
_ENDED_COLUMNS = (
    "state", "ended_at", "first_byte_at", "status", "context", "prompt_ids", "prompt_tokens", "completion_tokens",
    "untrainable", "error", "upstream", "response_id",
)  # fmt: skip
_NOT_ENDED = (CallState.STARTED, None, None, None, "root", b"", 0, 0, None, None, None, None)
_CHOICE_COLUMNS = (
    "call_id", "choice", "finish_reason", "reply_node", "link_key", "tool_call_ids", "token_ids", "logprobs",
)  # fmt: skip
_RUN_COLUMNS = (
    "id", "alias", "version", "purpose", "root_node", "tools_hash", "key_id", "opened_at",
    "state", "task", "last_active_at",
)  # fmt: skip
_node_values = attrgetter(*_NODE_COLUMNS)
_start_values = attrgetter("call_id", *_START_COLUMNS[1:])
_ended_values = attrgetter(*_ENDED_COLUMNS)
_choice_values = attrgetter("index", *_CHOICE_COLUMNS[2:])
_run_values = attrgetter("alias", "version", "purpose", "prompt_node", "tools_hash", "key_id", "started_at")

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
    last_active_at: float


def ship(connection: sa.Connection, records: Sequence[CallRecord]) -> None:
    """Write a batch of beginnings and ends inside the caller's transaction."""
    lock_messages_shared(connection)
    # The first record of a kind counts; those that follow it in the batch repeat it.
    starts = {one.call_id: one for one in map(_start_of, reversed(records))}
    ended = {one.start.call_id: one for one in reversed(records) if isinstance(one, CallEnded)}
    known = _known(connection, sorted(starts))
    _add_messages(connection, starts.values(), ended.values(), known)
    new = [one for one in reversed(starts.values()) if one.call_id not in known]
    awaited = (CallState.STARTED, CallState.INTERRUPTED)
    ending = {n: end for n, end in ended.items() if n not in known or known[n].state in awaited}
    hosts = {name: row.trajectory_id for name, row in known.items()}
    also = [hosts[name] for name in ending if name in hosts]
    trajectories = _open_trajectories(connection, new, ended, also)
    hosts |= _hosts(connection, new, ended, trajectories)
    _write_calls(connection, new, ending, hosts, replaced=[name for name in ending if name in known])
    _write_choices(connection, ending.values())
    _touch(connection, _active(new, ending.values(), hosts), trajectories)


def lock_messages_shared(connection: sa.Connection) -> None:
    """Keep messages from being deleted until this transaction ends. SQLite has one writer at a time anyway."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({MESSAGES_LOCK})")


def _start_of(record: CallRecord) -> CallStarted:
    return record if isinstance(record, CallStarted) else record.start


def _add_messages(
    connection: sa.Connection, starts: Iterable[CallStarted], ended: Iterable[CallEnded], known: Collection[str]
) -> None:
    """Write messages and tool lists. Those of a beginning that is stored came with it, and its call keeps them."""
    nodes: dict[str, MessageNode] = {}
    toolsets: dict[str, bytes] = {}
    for one in starts:
        if one.call_id not in known:
            nodes |= {node.hash: node for node in one.nodes}
            toolsets |= {one.tools_hash: one.tools} if one.tools else {}
    for end in ended:
        nodes |= {node.hash: node for node in end.nodes}
    _insert(connection, schema.messages, _NODE_COLUMNS, [_node_values(nodes[n]) for n in sorted(nodes)], new_only=True)
    insert_or_ignore(connection, schema.toolsets, [{"hash": name, "body": toolsets[name]} for name in sorted(toolsets)])


def _insert(
    connection: sa.Connection, table: sa.Table, names: Sequence[str], rows: Iterable[Any], *, new_only: bool = False
) -> int:
    """Insert rows that are tuples of these columns, each text cut to its column; return how many."""
    columns = truncate_columns(table, dict(zip(names, zip(*rows, strict=True), strict=False)))
    return insert_columns(connection, table, columns, new_only=new_only)


def _known(connection: sa.Connection, names: Sequence[str]) -> dict[str, Any]:
    """Return state and trajectory of each of these calls that is there."""
    table = schema.calls
    columns = sa.select(table.c.id, table.c.state, table.c.trajectory_id)
    rows = connection.execute(columns.where(in_values(connection, table.c.id, names))) if names else ()
    return {row.id: row for row in rows}


def _write_calls(
    connection: sa.Connection,
    new: Sequence[CallStarted],
    ending: Mapping[str, CallEnded],
    hosts: Mapping[str, str],
    replaced: Sequence[str],
) -> None:
    """Insert the rows of new calls, with their ends where those are here; replace those of calls that end now."""
    table = schema.calls
    if replaced:
        connection.execute(sa.delete(table).where(in_values(connection, table.c.id, replaced)))
    rows = [*new, *(ending[name].start for name in replaced)]
    if rows:
        ends = [ending.get(start.call_id) for start in rows]
        said = zip(_START_COLUMNS, zip(*map(_start_values, rows), strict=True), strict=True)
        came = zip(*(_ended_values(end) if end else _NOT_ENDED for end in ends), strict=True)
        columns: dict[str, Sequence[Any]] = dict(said) | dict(zip(_ENDED_COLUMNS, came, strict=True))
        columns |= {
            "trajectory_id": [hosts[start.call_id] for start in rows],
            "retained_node": list(map(_held, rows, ends)),
        }
        insert_columns(connection, table, truncate_columns(table, _cut_prompts(connection, columns)))
    _add_tags(connection, new, hosts)


def _held(start: CallStarted, end: CallEnded | None) -> str | None:
    """Return the prompt's last message, unless an answer that is stored with the call stands under it."""
    below = {node.hash for node in end.nodes if node.parent == start.prompt_node} if end else set()
    answered = end is not None and any(choice.reply_node in below for choice in end.choices)
    return None if answered else start.prompt_node or None


def _cut_prompts(connection: sa.Connection, columns: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Put the blocks of forked prompts where they are stored once."""
    if "fork" not in columns["context"]:
        return {**columns, "prompt_blocks": [None] * len(columns["context"])}
    named: list[bytes | None] = []
    left: list[bytes] = []
    stored: dict[tuple[str, bytes], bytes] = {}
    for run, context, prompt in zip(columns["trajectory_id"], columns["context"], columns["prompt_ids"], strict=True):
        pieces, rest = blocks.split_prompt(context, prompt)
        names = [blocks.digest(piece) for piece in pieces]
        stored |= {(run, name): piece for name, piece in zip(names, pieces, strict=True)}
        named.append(b"".join(names) or None)
        left.append(rest)
    ordered = [{"trajectory_id": run, "digest": name, "token_ids": stored[run, name]} for run, name in sorted(stored)]
    insert_or_ignore(connection, schema.prompt_blocks, ordered)
    return {**columns, "prompt_ids": left, "prompt_blocks": named}


def _add_tags(connection: sa.Connection, calls: Sequence[CallStarted], hosts: Mapping[str, str]) -> None:
    """Note the tags of calls at their trajectories."""
    tagged = {hosts[start.call_id] for start in calls if start.tags}
    if not tagged:
        return
    trajectories = schema.trajectories
    found = connection.execute(
        sa.select(trajectories.c.id, trajectories.c.opened_at).where(trajectories.c.id.in_(tagged))
    )
    opened = {row.id: row.opened_at for row in found}
    pairs = sorted({(hosts[start.call_id], tag) for start in calls for tag in start.tags})
    rows = [(tag, opened[name], name) for name, tag in pairs]
    _insert(connection, schema.trajectory_tags, ("tag", "opened_at", "trajectory_id"), rows, new_only=True)


def _write_choices(connection: sa.Connection, ends: Collection[CallEnded]) -> None:
    rows = [(end.start.call_id, *_choice_values(choice)) for end in ends for choice in end.choices]
    _insert(connection, schema.choices, _CHOICE_COLUMNS, rows)


def _active(new: Iterable[CallStarted], ends: Iterable[CallEnded], hosts: Mapping[str, str]) -> dict[str, float]:
    """Return when each trajectory of these calls was active last."""
    times: dict[str, float] = {}
    moments = [(one.call_id, one.started_at) for one in new] + [(end.start.call_id, end.ended_at) for end in ends]
    for name, moment in moments:
        times[hosts[name]] = max(moment, times.get(hosts[name], 0.0))
    return times


def _open_trajectories(
    connection: sa.Connection, calls: Sequence[CallStarted], ended: Mapping[str, CallEnded], also: Iterable[str]
) -> dict[str, _Run]:
    """Return the trajectories that calls name, with those of `also`, by id; make those that are new."""
    firsts = {start.trajectory_id: start for start in reversed(calls)}
    trajectories = _runs(connection, sorted({*firsts, *also}))
    if new := {name: start for name, start in firsts.items() if name not in trajectories}:
        trajectories |= _add_trajectories(connection, new, ended)
    return trajectories


def _hosts(
    connection: sa.Connection,
    calls: Sequence[CallStarted],
    ended: Mapping[str, CallEnded],
    trajectories: Mapping[str, _Run],
) -> dict[str, str]:
    """Return, by call id, the open trajectory that takes the call: the one that it names, or a successor."""
    hosts: dict[str, str] = {}
    taken: set[str] = set()
    for start in calls:
        name = start.trajectory_id
        if _takes(trajectories[name], start):
            hosts[start.call_id] = name
            taken.add(name)
        else:
            hosts[start.call_id] = _successor(connection, start, ended)
    _reopen(connection, [name for name in sorted(taken) if trajectories[name].state == TrajectoryState.SEALED])
    return hosts


def _runs(connection: sa.Connection, names: Sequence[str]) -> dict[str, _Run]:
    """Return the rows of trajectories by id, locked where the database locks rows: nobody may seal one meanwhile."""
    trajectories = schema.trajectories
    if not names:
        return {}
    columns = [trajectories.c[name] for name in ("id", *_Run._fields)]
    query = (
        sa.select(*columns)
        .where(in_values(connection, trajectories.c.id, names))
        .order_by(trajectories.c.id)
        .with_for_update()
    )
    return {row.id: _Run(*row[1:]) for row in connection.execute(query)}


def _takes(run: _Run, start: CallStarted) -> bool:
    """Return whether a trajectory may take a further call.

    It must be open, or sealed only for being still; and of the call's version, purpose and key, since a trajectory has
    one of each.
    """
    still = run.state == TrajectoryState.SEALED and run.sealed_by == IDLE
    same = (run.version, run.purpose) == (start.version, start.purpose) and may_share_trajectory(
        run.key_id, start.key_id
    )
    return bool(same and (run.state == TrajectoryState.OPEN or still))


def _successor(connection: sa.Connection, start: CallStarted, ended: Mapping[str, CallEnded]) -> str:
    """Return the successor of a closed trajectory that takes the call: the latest one, or a new one.

    A client may have given the name that a successor would get to a run of its own: then the next number is taken.
    """
    trajectories, origin = schema.trajectories, start.trajectory_id
    count = int(connection.scalar(sa.select(trajectories.c.successors).where(trajectories.c.id == origin)) or 0)
    number = max(1, count)
    while True:
        name = f"{origin}~{number}"
        known = _runs(connection, [name]) or _add_trajectories(connection, {name: start}, ended)
        if _takes(known[name], start):
            break
        number += 1
    if number != count:
        connection.execute(sa.update(trajectories).where(trajectories.c.id == origin).values(successors=number))
    _reopen(connection, [name])
    return name


def _reopen(connection: sa.Connection, names: Sequence[str]) -> None:
    trajectories = schema.trajectories
    if names:
        connection.execute(
            sa.update(trajectories)
            .where(trajectories.c.id.in_(names), trajectories.c.state == TrajectoryState.SEALED)
            .values(state=TrajectoryState.OPEN, sealed_at=None, sealed_by=None)
        )


def _add_trajectories(
    connection: sa.Connection, new: Mapping[str, CallStarted], ended: Mapping[str, CallEnded]
) -> dict[str, _Run]:
    """Make trajectories that are not there, each with the values of its first call; return their rows."""
    rows = [(name, *_run_values(start), TrajectoryState.OPEN, short_task(start.task), _last_active(start, ended))
            for name, start in sorted(new.items())]  # fmt: skip
    if _insert(connection, schema.trajectories, _RUN_COLUMNS, rows, new_only=True) < len(rows):
        return _runs(connection, sorted(new))  # another proxy was quicker, with other values
    return {
        name: _Run(TrajectoryState.OPEN, None, b.version, b.purpose, b.key_id, _last_active(b, ended))
        for name, b in new.items()
    }


def _last_active(start: CallStarted, ended: Mapping[str, CallEnded]) -> float:
    return ended[start.call_id].ended_at if start.call_id in ended else start.started_at


def _touch(connection: sa.Connection, times: Mapping[str, float], trajectories: Mapping[str, _Run]) -> None:
    """Note that trajectories were active at these times, where their rows say less."""
    later = sorted(
        name for name in times if name not in trajectories or trajectories[name].last_active_at < times[name]
    )
    execute_many(connection, _ACTIVE, [{"run": name, "at": times[name]} for name in later])


def short_task(task: str | None) -> str | None:
    """Return a task as it is stored: a very long one as its beginning and a hash of the whole."""
    if task is None or len(task) <= _TASK_MOST:
        return task
    return f"{task[: _TASK_MOST - 40]}~{blake2b(task.encode(), digest_size=16).hexdigest()}"
