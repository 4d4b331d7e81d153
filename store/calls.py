"""Calls: shipped in by the proxy, read by everyone.

Promises: shipping is idempotent by call id and one transaction per batch; a call that arrives after its trajectory
was grouped or finished opens a successor trajectory, so that nothing is lost and nothing is trained twice; so does one
of another version, purpose or key, so that no trajectory mixes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from store import schema
from store.database import read, write
from store.errors import UnknownRecord
from store.owners import may_share
from store.records import Call, CallBegun, CallEnded, Choice, MessageNode, OpenLeaf, Shipment
from store.states import CallState, TrajectoryState
from store.tokens import sequences

_PAGE_MOST = 1000
IDLE = "idle"  # why a trajectory was sealed: it was still
FINISH = "finish"  # somebody said that it is complete
_IN_MOST = 500  # values in one IN (...)
_BEGUN_COLUMNS = (
    "started_at", "alias", "version", "dialect", "streamed", "linked_by", "prompt_node", "tools_hash",
    "parent_call", "parent_choice", "key_id", "role",
)  # fmt: skip
_ENDED_COLUMNS = (
    "state", "ended_at", "first_byte_at", "status", "context", "prompt_ids", "prompt_tokens", "completion_tokens",
    "untrainable", "error", "upstream",
)  # fmt: skip


class Calls:
    """The verbs over calls and the messages they carry."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def ship(self, records: Sequence[Shipment]) -> None:
        """Write a batch of beginnings and ends; repeating any of them changes nothing.

        Raises StoreUnavailable, in which case nothing of the batch was written.
        """
        with write(self._engine) as connection:
            _add_messages(connection, records)
            # The first record of a kind counts; those that follow it in the batch repeat it.
            begun = {one.call_id: one for one in map(_begun_of, reversed(records))}
            ended = {one.begun.call_id: one for one in reversed(records) if isinstance(one, CallEnded)}
            known = _states(connection, list(begun))
            _begin(connection, [one for one in reversed(begun.values()) if one.call_id not in known])
            awaited = (CallState.BEGUN, CallState.INTERRUPTED)
            _end(connection, [end for name, end in ended.items() if known.get(name, CallState.BEGUN) in awaited])

    def interrupt(self, call_ids: Iterable[str]) -> None:
        """Mark calls whose proxy died before their end; calls that have an end stay as they are."""
        with write(self._engine) as connection:
            connection.execute(
                sa.update(schema.calls)
                .where(schema.calls.c.id.in_(list(call_ids)), schema.calls.c.state == CallState.BEGUN)
                .values(state=CallState.INTERRUPTED, untrainable="interrupted")
            )

    def read(self, call_id: str) -> Call:
        """Return one call with its tokens. Raises UnknownRecord."""
        with read(self._engine) as connection:
            found = load_calls(connection, schema.calls.c.id == call_id)
        if not found:
            raise UnknownRecord(f"no call {call_id}")
        return found[0]

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
    ) -> list[Call]:
        """Return at most `limit` calls, newest first, older than the call id `before` (ids sort by time)."""
        table = schema.calls
        chosen = sa.select(table.c.id).order_by(table.c.id.desc()).limit(min(limit, _PAGE_MOST))
        if before:
            chosen = chosen.where(table.c.id < before)
        if trajectory:
            chosen = chosen.where(table.c.trajectory_id == trajectory)
        if state:
            chosen = chosen.where(table.c.state == state)
        with read(self._engine) as connection:
            found = load_calls(connection, table.c.id.in_(chosen.subquery().select()))
        return sorted(found, key=lambda call: call.id, reverse=True)

    def message_count(self) -> int:
        """Return how many distinct messages are stored."""
        with read(self._engine) as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(schema.messages)) or 0)

    def open_leaves(self, since: float, limit: int = 10_000) -> list[OpenLeaf]:
        """Return the answers of open trajectories active after `since` (Unix seconds), oldest first."""
        calls, answers, runs = schema.calls, schema.choices, schema.trajectories
        query = (
            sa.select(
                calls,
                runs.c.purpose,
                answers.c.choice,
                answers.c.link_key,
                answers.c.tool_call_ids,
                runs.c.last_active_at,
            )
            .join(answers, answers.c.call_id == calls.c.id)
            .join(runs, runs.c.id == calls.c.trajectory_id)
            .where(runs.c.state == TrajectoryState.OPEN, runs.c.last_active_at >= since, answers.c.link_key != "")
            .order_by(calls.c.id.desc())
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
            known = sequences(load_calls(connection, calls.c.trajectory_id.in_({row.trajectory_id for row in rows})))
        return [
            OpenLeaf(
                trajectory_id=row.trajectory_id,
                call_id=row.id,
                choice=row.choice,
                alias=row.alias,
                version=row.version,
                link_key=row.link_key,
                tool_call_ids=tuple(row.tool_call_ids),
                key_id=row.key_id,
                purpose=row.purpose,
                sequence=known.get((row.id, row.choice), b""),
                last_active_at=row.last_active_at,
            )
            for row in reversed(rows)
        ]


def _begun_of(record: Shipment) -> CallBegun:
    return record if isinstance(record, CallBegun) else record.begun


def insert_new(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, leaving those whose primary key exists as they are."""
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).on_conflict_do_nothing(), rows)


def _add_messages(connection: sa.Connection, records: Sequence[Shipment]) -> None:
    nodes: dict[str, MessageNode] = {}
    toolsets: dict[str, bytes] = {}
    for record in records:
        begun = _begun_of(record)
        for node in (*begun.nodes, *(record.nodes if isinstance(record, CallEnded) else ())):
            nodes[node.hash] = node
        if begun.tools:
            toolsets[begun.tools_hash] = begun.tools
    insert_new(connection, schema.messages, [msgspec.structs.asdict(node) for node in nodes.values()])
    insert_new(connection, schema.toolsets, [{"hash": name, "body": body} for name, body in toolsets.items()])


def _states(connection: sa.Connection, names: Sequence[str]) -> dict[str, str]:
    """Return the state of each of these calls that is there."""
    return _look_up(connection, sa.select(schema.calls.c.id, schema.calls.c.state), names)


def _look_up(connection: sa.Connection, pairs: sa.Select[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return {first column: second column} of the rows whose first column is among `names`."""
    column = pairs.selected_columns[0]
    found: dict[str, str] = {}
    for start in range(0, len(names), _IN_MOST):
        chosen = pairs.where(column.in_(names[start : start + _IN_MOST]))
        found |= {row[0]: row[1] for row in connection.execute(chosen)}
    return found


def _begin(connection: sa.Connection, calls: Sequence[CallBegun]) -> None:
    """Insert the rows of calls that are not there, with their trajectories where those are new."""
    if not calls:
        return
    hosts = _host_trajectories(connection, calls)
    rows = []
    for begun in calls:
        row = {name: getattr(begun, name) for name in _BEGUN_COLUMNS}
        row |= {
            "id": begun.call_id,
            "trajectory_id": hosts[begun.call_id],
            "state": CallState.BEGUN,
            "tags": list(begun.tags),
            "sampling": dict(begun.sampling),
            "context": "root",
            "prompt_ids": b"",
            "prompt_tokens": 0,
            "completion_tokens": 0,
        }
        rows.append(row)
    connection.execute(sa.insert(schema.calls), rows)


def _host_trajectories(connection: sa.Connection, calls: Sequence[CallBegun]) -> dict[str, str]:
    """Return, by call id, the open trajectory that takes the call; make those that are new."""
    known = _runs(connection, sorted({begun.trajectory_id for begun in calls}))
    hosts: dict[str, str] = {}
    new: dict[str, CallBegun] = {}
    touched: dict[str, float] = {}
    for begun in calls:
        name = begun.trajectory_id
        hosts[begun.call_id] = name
        first = new.get(name)
        if name in known and not _takes(known[name], begun):
            hosts[begun.call_id] = _successor(connection, begun)
        elif name in known or (first and _is_like(first, begun)):
            touched[name] = max(begun.started_at, touched.get(name, 0.0))
        elif first:  # the trajectory is made in this batch, on another version or with another key
            _add_trajectories(connection, {name: new.pop(name)})
            known |= _runs(connection, [name])
            hosts[begun.call_id] = _successor(connection, begun)
        else:
            new[name] = begun
    _add_trajectories(connection, new)
    _reopen(connection, [name for name in touched if name in known and known[name].state == TrajectoryState.SEALED])
    _touch(connection, touched)
    return hosts


def _runs(connection: sa.Connection, names: Sequence[str]) -> dict[str, Any]:
    """Return the rows of trajectories by id, locked where the database locks rows: nobody may seal one meanwhile."""
    runs = schema.trajectories
    found: dict[str, Any] = {}
    columns = (
        runs.c.id,
        runs.c.state,
        runs.c.sealed_by,
        runs.c.version,
        runs.c.purpose,
        runs.c.key_id,
        runs.c.successors,
    )
    for start in range(0, len(names), _IN_MOST):
        query = sa.select(*columns).where(runs.c.id.in_(names[start : start + _IN_MOST])).with_for_update()
        found |= {row.id: row for row in connection.execute(query)}
    return found


def _takes(run: Any, begun: CallBegun) -> bool:
    """Return whether a trajectory may take a further call.

    It must be open, or sealed only for being still; and of the call's version, purpose and key, since a trajectory has
    one of each.
    """
    still = run.state == TrajectoryState.SEALED and run.sealed_by == IDLE
    return _is_like(run, begun) and (run.state == TrajectoryState.OPEN or still)


def _is_like(run: Any, begun: CallBegun) -> bool:
    same = (run.version, run.purpose) == (begun.version, begun.purpose)
    return same and may_share(run.key_id, begun.key_id)


def _successor(connection: sa.Connection, begun: CallBegun) -> str:
    """Return the successor of a closed trajectory that takes the call: the latest one, or a new one."""
    runs = schema.trajectories
    count = int(connection.scalar(sa.select(runs.c.successors).where(runs.c.id == begun.trajectory_id)) or 0)
    latest = f"{begun.trajectory_id}~{count}"
    known = _runs(connection, [latest]) if count else {}
    if latest in known and _takes(known[latest], begun):
        _reopen(connection, [latest])
        _touch(connection, {latest: begun.started_at})
        return latest
    name = f"{begun.trajectory_id}~{count + 1}"
    connection.execute(sa.update(runs).where(runs.c.id == begun.trajectory_id).values(successors=count + 1))
    _add_trajectories(connection, {name: begun})
    return name


def _reopen(connection: sa.Connection, names: Sequence[str]) -> None:
    runs = schema.trajectories
    if names:
        connection.execute(
            sa.update(runs)
            .where(runs.c.id.in_(names), runs.c.state == TrajectoryState.SEALED)
            .values(state=TrajectoryState.OPEN, sealed_at=None, sealed_by=None)
        )


def _add_trajectories(connection: sa.Connection, new: Mapping[str, CallBegun]) -> None:
    """Make trajectories, each with the values of its first call."""
    rows = [
        {
            "id": name,
            "alias": begun.alias,
            "version": begun.version,
            "state": TrajectoryState.OPEN,
            "task": begun.task,
            "purpose": begun.purpose,
            "root_node": begun.prompt_node,
            "tools_hash": begun.tools_hash,
            "key_id": begun.key_id,
            "opened_at": begun.started_at,
            "last_active_at": begun.started_at,
        }
        for name, begun in new.items()
    ]
    if rows:
        connection.execute(sa.insert(schema.trajectories), rows)


def _touch(connection: sa.Connection, times: Mapping[str, float]) -> None:
    """Note that trajectories were active at these times."""
    runs = schema.trajectories
    if times:
        connection.execute(
            sa.update(runs)
            .where(runs.c.id == sa.bindparam("run"), runs.c.last_active_at < sa.bindparam("at"))
            .values(last_active_at=sa.bindparam("at")),
            [{"run": name, "at": at} for name, at in times.items()],
        )


def _end(connection: sa.Connection, ends: Sequence[CallEnded]) -> None:
    """Write the ends of calls that are there without one."""
    if not ends:
        return
    table = schema.calls
    connection.execute(
        sa.update(table)
        .where(table.c.id == sa.bindparam("call"))
        .values({name: sa.bindparam(f"new_{name}") for name in _ENDED_COLUMNS}),
        [{"call": end.begun.call_id} | {f"new_{name}": getattr(end, name) for name in _ENDED_COLUMNS} for end in ends],
    )
    answers = [
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
    if answers:
        connection.execute(sa.insert(schema.choices), answers)
    names = [end.begun.call_id for end in ends]
    hosts = _look_up(connection, sa.select(table.c.id, table.c.trajectory_id), names)
    times: dict[str, float] = {}
    for end in ends:
        host = hosts[end.begun.call_id]
        times[host] = max(end.ended_at, times.get(host, 0.0))
    _touch(connection, times)


def load_calls(connection: sa.Connection, where: sa.ColumnElement[bool]) -> list[Call]:
    """Return the calls that match, with their choices, in the order in which they began."""
    rows = connection.execute(
        sa.select(schema.calls).where(where).order_by(schema.calls.c.started_at, schema.calls.c.id)
    ).all()
    answers: dict[str, list[Choice]] = {}
    for chunk in range(0, len(rows), _IN_MOST):
        names = [row.id for row in rows[chunk : chunk + _IN_MOST]]
        found = sa.select(schema.choices).where(schema.choices.c.call_id.in_(names)).order_by(schema.choices.c.choice)
        for answer in connection.execute(found):
            answers.setdefault(answer.call_id, []).append(_choice(answer))
    return [_call(row, tuple(answers.get(row.id, ()))) for row in rows]


def _choice(row: Any) -> Choice:
    return Choice(
        index=row.choice,
        finish_reason=row.finish_reason,
        ids=row.ids,
        logprobs=row.logprobs,
        reply_node=row.reply_node,
        link_key=row.link_key,
        tool_call_ids=tuple(row.tool_call_ids),
    )


def _call(row: Any, answers: tuple[Choice, ...]) -> Call:
    names = [field for field in Call.__struct_fields__ if field not in ("choices", "state")]
    return Call(choices=answers, state=CallState(row.state), **{name: getattr(row, name) for name in names})
