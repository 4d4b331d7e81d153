"""Writes calls with their messages, prompts and trajectories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import (
    execute_many,
    in_values,
    insert_columns,
    insert_or_ignore,
    select_in,
    truncate_columns,
)
from ratchet.store.db.verbs import chunks
from ratchet.store.errors import RecordDamaged
from ratchet.store.ids import may_share_trajectory
from ratchet.store.records import UNLINKED, CallEnded, CallRecord, CallStarted, Choice, MessageNode, Record
from ratchet.store.states import IDLE, CallState, TrajectoryState

# Stores forked prompts in blocks, so that an agent that re-renders its context each turn needs linear space.
#
# A forked prompt repeats nearly all of an earlier prompt, but does not begin with its parent's whole sequence. It is
# cut into blocks of 256 tokens. Each block is stored once per trajectory, by its hash; the call keeps the hashes and
# the tokens after the last full block. Blocks are deleted with their trajectory.

_BLOCK = 256 * 4  # bytes of int32 ids
_DIGEST = 16


def split_prompt(context: str, prompt_ids: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Return (full blocks, rest) of a call's prompt; only forks are cut."""
    if context != "fork":
        return (), prompt_ids
    end = len(prompt_ids) - len(prompt_ids) % _BLOCK
    return tuple(prompt_ids[at : at + _BLOCK] for at in range(0, end, _BLOCK)), prompt_ids[end:]


def digest(block: bytes) -> bytes:
    """Return the hash of a block."""
    return blake2b(block, digest_size=_DIGEST).digest()


def block_digests(named: bytes | None) -> list[bytes]:
    """Return the hashes of a call's blocks, in order."""
    return [named[at : at + _DIGEST] for at in range(0, len(named), _DIGEST)] if named else []


class Blocks:
    """The blocks of some calls, loaded together."""

    def __init__(self, connection: sa.Connection, rows: Iterable[Any]) -> None:
        wanted = {(row.trajectory_id, name) for row in rows for name in block_digests(row.prompt_blocks)}
        table = schema.prompt_blocks
        self._ids: dict[tuple[str, bytes], bytes] = {}
        trajectories = sorted({run for run, _ in wanted})
        for names in chunks(trajectories):
            for row in connection.execute(sa.select(table).where(table.c.trajectory_id.in_(names))):
                if (row.trajectory_id, row.digest) in wanted:
                    self._ids[row.trajectory_id, row.digest] = row.token_ids

    def full_prompt(self, row: Any) -> bytes:
        """Return the whole prompt of a call. Raises RecordDamaged if a block is missing."""
        if not row.prompt_blocks:
            ids: bytes = row.prompt_ids
            return ids
        try:
            blocks = [self._ids[row.trajectory_id, name] for name in block_digests(row.prompt_blocks)]
        except KeyError as error:
            raise RecordDamaged(f"a block of the prompt of call {row.id} is missing") from error
        return b"".join([*blocks, row.prompt_ids])


# Recognizes the rest of an `unlinked` trajectory that its proxy has forgotten: idle, evicted, or before a restart.
#
# Only calls that name the trajectory get here: for others, what an unlinked trajectory is continued by is decided where
# it is known. Parts of a trajectory are itself and its successors.

_MAX_PARTS = 16  # the latest that are read


def mark_rest(connection: sa.Connection, start: CallStarted) -> CallStarted:
    """Return the start of a call, `unlinked` if it goes on with an unlinked part of the trajectory that it names.

    It does if it has a history, and this agent's latest part is unlinked, or an unlinked one gave an answer of that
    history. A call without one begins again: clients also use a name for one run after the other.
    """
    is_rest = start.purpose == "live" and _is_rest(connection, start)
    return msgspec.structs.replace(start, purpose=UNLINKED) if is_rest else start


def _is_rest(connection: sa.Connection, start: CallStarted) -> bool:
    parts = _parts(connection, start)
    unlinked = [name for name, purpose in parts if purpose == UNLINKED]
    if not unlinked:
        return False
    up = message_path(start.prompt_node, "hash", "role")
    path = {row.hash: row.role for row in connection.execute(sa.select(up.c.hash, up.c.role))}
    if parts[-1][1] == UNLINKED:
        return "assistant" in path.values()
    calls, choices = schema.calls, schema.choices
    answers = sa.select(choices.c.reply_node).join(calls, calls.c.id == choices.c.call_id)
    return not path.keys().isdisjoint(connection.scalars(answers.where(calls.c.trajectory_id.in_(unlinked))))


def _parts(connection: sa.Connection, start: CallStarted) -> list[tuple[str, str]]:
    """Return id and purpose of the parts of this call's agent and key, the latest one last."""
    table, origin = schema.trajectories, start.trajectory_id
    last = int(connection.scalar(sa.select(table.c.successors).where(table.c.id == origin)) or 0)
    names = [origin, *(f"{origin}~{number}" for number in range(max(1, last - _MAX_PARTS + 1), last + 1))]
    columns = (table.c.id, table.c.purpose, table.c.key_id)
    found = connection.execute(sa.select(*columns).where(table.c.id.in_(names), table.c.alias == start.alias))
    own = {row.id: row.purpose for row in found if may_share_trajectory(row.key_id, start.key_id)}
    return [(name, own[name]) for name in names if name in own]


def message_path(leaf: str, *names: str) -> sa.CTE:
    """Return the messages from `leaf` up to the root: their parents, these columns, and the distance from the leaf."""
    table, up, columns = schema.messages, schema.messages.alias("up"), ("parent", *names)
    start = sa.select(*(table.c[name] for name in columns), sa.literal(0).label("distance")).where(table.c.hash == leaf)
    path = start.cte("path", recursive=True)
    above = sa.select(*(up.c[name] for name in columns), path.c.distance + 1).where(up.c.hash == path.c.parent)
    return path.union_all(above)


# Writes calls with their messages and trajectories, in the caller's transaction.
#
# Guarantees: a repeated record changes nothing. A call opens a successor trajectory if its trajectory was grouped or
# finished, or has another version, purpose or key; the rest of an `unlinked` one is `unlinked`. A call whose start and
# end come together is written once; an end that comes later replaces the row, so that database pages stay full. Text is
# truncated to its column.
#
# Rows are locked in order of their ids, so that proxies that ship the same messages and trajectories do not deadlock.

MESSAGES_LOCK = 0x52414D53  # advisory lock: shared to ship messages, exclusive to delete them
_MAX_TASK_CHARS = 512  # longer values do not fit an index


def _shared(record: type[Record], table: sa.Table) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the columns of a table that are fields of a record, and the function that reads them."""
    names = tuple(name for name in record.__struct_fields__ if name in table.c)
    return names, attrgetter(*names)


_NODE_COLUMNS, _node_values = _shared(MessageNode, schema.messages)
_START_COLUMNS, _start_values = _shared(CallStarted, schema.calls)
_ENDED_COLUMNS, _ended_values = _shared(CallEnded, schema.calls)
_CHOICE_COLUMNS, _choice_values = _shared(Choice, schema.choices)
_NO_END = {"state": CallState.STARTED, "context": "root", "prompt_ids": b"", "prompt_tokens": 0, "completion_tokens": 0}
_NOT_ENDED = tuple(_NO_END.get(name) for name in _ENDED_COLUMNS)

_ACTIVE = (
    sa.update(schema.trajectories)
    .where(schema.trajectories.c.id == sa.bindparam("run"), schema.trajectories.c.last_active_at < sa.bindparam("at"))
    .values(last_active_at=sa.bindparam("at"))
)  # fmt: skip


_calls, _trajectories = schema.calls.c, schema.trajectories.c
_KNOWN = sa.select(_calls.id, _calls.state, _calls.trajectory_id)


class _TrajectoryRow(NamedTuple):
    """The columns of a trajectory that decide whether it accepts a call."""

    state: str
    sealed_by: str | None
    alias: str
    version: int
    purpose: str
    key_id: str | None
    last_active_at: float


_TRAJECTORIES = (
    sa.select(_trajectories.id, *(_trajectories[name] for name in _TrajectoryRow._fields))
    .order_by(_trajectories.id)
    .with_for_update()
)


def ship(connection: sa.Connection, records: Sequence[CallRecord]) -> Collection[CallEnded]:
    """Write a batch of starts and ends in the caller's transaction; return the ends that were not stored before."""
    lock_messages_shared(connection)
    # The first start and the first end of a call count; later ones in the batch are repetitions.
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
    hosts |= _trajectories_of_calls(connection, new, ended, trajectories)
    _write_calls(connection, new, ending, hosts, replaced=[name for name in ending if name in known])
    _write_choices(connection, ending.values())
    _touch(connection, _active(new, ending.values(), hosts), trajectories)
    return ending.values()


def lock_messages_shared(connection: sa.Connection) -> None:
    """Prevent the deletion of messages until this transaction ends. SQLite has a single writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({MESSAGES_LOCK})")


def _start_of(record: CallRecord) -> CallStarted:
    return record if isinstance(record, CallStarted) else record.start


def _add_messages(
    connection: sa.Connection, starts: Iterable[CallStarted], ended: Iterable[CallEnded], known: Collection[str]
) -> None:
    """Write messages and tool lists, except those of known starts, which are stored."""
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
    """Insert rows, as tuples of these columns, with truncated texts; return their number."""
    columns = truncate_columns(table, dict(zip(names, zip(*rows, strict=True), strict=False)))
    return insert_columns(connection, table, columns, new_only=new_only)


def _known(connection: sa.Connection, names: Sequence[str]) -> dict[str, Any]:
    """Return state and trajectory of the calls that are stored, by id."""
    return {row.id: row for row in select_in(connection, _KNOWN, _calls.id, names)}


def _write_calls(
    connection: sa.Connection,
    new: Sequence[CallStarted],
    ending: Mapping[str, CallEnded],
    hosts: Mapping[str, str],
    replaced: Sequence[str],
) -> None:
    """Insert new calls, with their ends if these are in the batch; replace the rows of calls that end now."""
    table = schema.calls
    if replaced:
        connection.execute(sa.delete(table).where(in_values(connection, table.c.id, replaced)))
    rows = [*new, *(ending[name].start for name in replaced)]
    if rows:
        ends = [ending.get(start.call_id) for start in rows]
        started = zip(_START_COLUMNS, zip(*map(_start_values, rows), strict=True), strict=True)
        ended = zip(*(_ended_values(end) if end else _NOT_ENDED for end in ends), strict=True)
        columns: dict[str, Sequence[Any]] = dict(started) | dict(zip(_ENDED_COLUMNS, ended, strict=True))
        columns |= {
            "id": [start.call_id for start in rows],
            "trajectory_id": [hosts[start.call_id] for start in rows],
            "retained_node": list(map(_retained_node, rows, ends)),
        }
        insert_columns(connection, table, truncate_columns(table, _cut_prompts(connection, columns)))
    _add_tags(connection, new, hosts)


def _retained_node(start: CallStarted, end: CallEnded | None) -> str | None:
    """Return the last message of the prompt, unless a stored answer follows it and so retains it."""
    below = {node.hash for node in end.nodes if node.parent == start.prompt_node} if end else set()
    answered = end is not None and any(choice.reply_node in below for choice in end.choices)
    return None if answered else start.prompt_node or None


def _cut_prompts(connection: sa.Connection, columns: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Store the blocks of forked prompts; return the columns with block hashes and rests."""
    if "fork" not in columns["context"]:
        return {**columns, "prompt_blocks": [None] * len(columns["context"])}
    named: list[bytes | None] = []
    left: list[bytes] = []
    stored: dict[tuple[str, bytes], bytes] = {}
    for run, context, prompt in zip(columns["trajectory_id"], columns["context"], columns["prompt_ids"], strict=True):
        pieces, rest = split_prompt(context, prompt)
        names = [digest(piece) for piece in pieces]
        stored |= {(run, name): piece for name, piece in zip(names, pieces, strict=True)}
        named.append(b"".join(names) or None)
        left.append(rest)
    ordered = [{"trajectory_id": run, "digest": name, "token_ids": stored[run, name]} for run, name in sorted(stored)]
    insert_or_ignore(connection, schema.prompt_blocks, ordered)
    return {**columns, "prompt_ids": left, "prompt_blocks": named}


def _add_tags(connection: sa.Connection, calls: Sequence[CallStarted], hosts: Mapping[str, str]) -> None:
    """Add the tags of calls to their trajectories."""
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
    rows = [(end.start.call_id, choice.index, *_choice_values(choice)) for end in ends for choice in end.choices]
    _insert(connection, schema.choices, ("call_id", "choice", *_CHOICE_COLUMNS), rows)


def _active(new: Iterable[CallStarted], ends: Iterable[CallEnded], hosts: Mapping[str, str]) -> dict[str, float]:
    """Return the time of the last activity in these calls, by trajectory."""
    times: dict[str, float] = {}
    moments = [(one.call_id, one.started_at) for one in new] + [(end.start.call_id, end.ended_at) for end in ends]
    for name, moment in moments:
        times[hosts[name]] = max(moment, times.get(hosts[name], 0.0))
    return times


def _open_trajectories(
    connection: sa.Connection, calls: Sequence[CallStarted], ended: Mapping[str, CallEnded], also: Iterable[str]
) -> dict[str, _TrajectoryRow]:
    """Return the trajectories that calls name, and those of `also`, by id; create missing ones."""
    firsts = {start.trajectory_id: start for start in reversed(calls)}
    trajectories = _trajectory_rows(connection, sorted({*firsts, *also}))
    if new := {name: start for name, start in firsts.items() if name not in trajectories}:
        trajectories |= _add_trajectories(connection, new, ended)
    return trajectories


def _trajectories_of_calls(
    connection: sa.Connection,
    calls: Sequence[CallStarted],
    ended: Mapping[str, CallEnded],
    trajectories: Mapping[str, _TrajectoryRow],
) -> dict[str, str]:
    """Return the open trajectory of each call: the one that it names, or a successor."""
    hosts: dict[str, str] = {}
    taken: set[str] = set()
    for start in calls:
        name = start.trajectory_id
        as_stored = start if _accepts(trajectories[name], start) else mark_rest(connection, start)
        if _accepts(trajectories[name], as_stored):
            hosts[start.call_id] = name
            taken.add(name)
        else:
            hosts[start.call_id] = _successor(connection, as_stored, ended)
    _reopen(connection, [name for name in sorted(taken) if trajectories[name].state == TrajectoryState.SEALED])
    return hosts


def _trajectory_rows(connection: sa.Connection, names: Sequence[str]) -> dict[str, _TrajectoryRow]:
    """Return trajectories by id, with row locks where the database has them, so that none is sealed meanwhile."""
    if not names:
        return {}
    return {row.id: _TrajectoryRow(*row[1:]) for row in select_in(connection, _TRAJECTORIES, _trajectories.id, names)}


def _accepts(run: _TrajectoryRow, start: CallStarted) -> bool:
    """Return whether a trajectory accepts a call: open or sealed as idle; with its agent, version, purpose and key."""
    idle = run.state == TrajectoryState.SEALED and run.sealed_by == IDLE
    same = (run.alias, run.version, run.purpose) == (start.alias, start.version, start.purpose)
    return bool(same and may_share_trajectory(run.key_id, start.key_id) and (run.state == TrajectoryState.OPEN or idle))


def _successor(connection: sa.Connection, start: CallStarted, ended: Mapping[str, CallEnded]) -> str:
    """Return the successor trajectory for a call: the latest one, or a new one.

    A client may already use the name of a successor; then the next number is taken.
    """
    trajectories, origin = schema.trajectories, start.trajectory_id
    count = int(connection.scalar(sa.select(trajectories.c.successors).where(trajectories.c.id == origin)) or 0)
    number = max(1, count)
    while True:
        name = f"{origin}~{number}"
        known = _trajectory_rows(connection, [name]) or _add_trajectories(connection, {name: start}, ended)
        if _accepts(known[name], start):
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
) -> dict[str, _TrajectoryRow]:
    """Create trajectories with the values of their first calls; return their rows."""
    rows = [
        {
            "id": name, "alias": start.alias, "version": start.version, "purpose": start.purpose,
            "state": TrajectoryState.OPEN, "task": short_task(start.task), "root_node": start.prompt_node,
            "tools_hash": start.tools_hash, "key_id": start.key_id, "opened_at": start.started_at,
            "last_active_at": _last_active(start, ended), **_drawn(start),
        }
        for name, start in sorted(new.items())
    ]  # fmt: skip
    if _insert(connection, schema.trajectories, tuple(rows[0]), [row.values() for row in rows], new_only=True) < len(
        new
    ):
        return _trajectory_rows(connection, sorted(new))  # another proxy created some, with other values
    return {
        name: _TrajectoryRow(
            TrajectoryState.OPEN, None, b.alias, b.version, b.purpose, b.key_id, _last_active(b, ended)
        )
        for name, b in new.items()
    }


def _drawn(start: CallStarted) -> dict[str, Any]:
    """Return the draw of the trajectory's version, and whether it is evidence about its version."""
    draw = start.draw
    if draw is None:
        return {"draw": None, "counted": False}
    return {"draw": {**msgspec.structs.asdict(draw), "shares": dict(draw.shares)}, "counted": draw.counted}


def _last_active(start: CallStarted, ended: Mapping[str, CallEnded]) -> float:
    return ended[start.call_id].ended_at if start.call_id in ended else start.started_at


def _touch(connection: sa.Connection, times: Mapping[str, float], trajectories: Mapping[str, _TrajectoryRow]) -> None:
    """Update the last activity of trajectories to these times, if later."""
    later = sorted(
        name for name in times if name not in trajectories or trajectories[name].last_active_at < times[name]
    )
    execute_many(connection, _ACTIVE, [{"run": name, "at": times[name]} for name in later])


def short_task(task: str | None) -> str | None:
    """Return a task as stored: a very long one is its start and a hash."""
    if task is None or len(task) <= _MAX_TASK_CHARS:
        return task
    return f"{task[: _MAX_TASK_CHARS - 40]}~{blake2b(task.encode(), digest_size=16).hexdigest()}"
