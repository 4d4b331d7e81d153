"""Verification of a store: recomputes every hash and checks every invariant. Reads only.

It reads in pages, in the order of the primary keys, each page from one snapshot. So memory stays bounded, a running
project is not disturbed, and concurrent changes are seen completely or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.calls import unnamed_messages
from ratchet.store.calls.shipping import block_digests
from ratchet.store.content.messages import ROOT, is_intact, is_intact_toolset
from ratchet.store.db import schema
from ratchet.store.db.column_types import NOT_DECODED, Body, Ids, decompress_token_ids, unpack_body
from ratchet.store.db.engine import connect, ensure_schema, read
from ratchet.store.db.verbs import chunks, matches
from ratchet.store.errors import RecordDamaged
from ratchet.store.policies.policies import prompt_id
from ratchet.store.records import MessageNode, Record
from ratchet.store.states import CallState, GroupState, RoundState, TrajectoryState

# Violations, and the queries that all checks use.

Page = Sequence[Any]  # rows of one table


class Violation(Record, frozen=True):
    """A row that breaks an invariant, the problem, and the remedy."""

    row: str
    problem: str
    remedy: str


def undecoded(table: sa.Table) -> list[sa.ColumnElement[Any]]:
    """Return a table's columns, encoded ones as raw bytes: a damaged value must not stop the check of its page."""
    return [_undecoded(column) for column in table.c]


def _undecoded(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    if isinstance(column.type, (Body, Ids)):
        return sa.type_coerce(column, sa.LargeBinary).label(column.name)
    return sa.type_coerce(column, sa.Text).label(column.name) if isinstance(column.type, sa.JSON) else column


def existing_values(connection: sa.Connection, column: sa.Column[str], values: Iterable[str | None]) -> set[str]:
    """Return the values, of those that are not empty, that occur in a column."""
    queries = [sa.select(column).where(column.in_(some)) for some in chunks(sorted(filter(None, values)))]
    return {value for query in queries for value in connection.scalars(query)}


# Checks messages and tool lists: they decode, match their hash, and have a reference.

_BACKUP = "restore it from a backup"
_LOST = "restore it from a backup; transcripts that contain it are incomplete, tokens are not affected"
_LEFT = "nothing is lost: the next `ratchet store prune` deletes it"


def check_messages(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that messages match their hash, have their parent, and have a reference."""
    there = existing_values(connection, schema.messages.c.hash, {row.parent for row in page})
    names = [row.hash for row in page]
    next_swept = existing_values(connection, schema.orphan_candidates.c.hash, names)
    orphans = unnamed_messages(connection, names).keys() - next_swept
    for row in page:
        name = f"message {row.hash}"
        body = _body(row.body)
        if body is None:
            yield Violation(name, "its body does not inflate to JSON", _LOST)
        elif not is_intact(MessageNode(hash=row.hash, parent=row.parent, role=row.role, body=body)):
            yield Violation(name, "its hash does not match its parent and body", _LOST)
        if row.parent != ROOT and row.parent not in there:
            yield Violation(name, f"its parent {row.parent} is missing", _LOST)
        if row.hash in orphans:
            yield Violation(name, "no call, answer or message names it", _LEFT)


def check_toolsets(_: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that tool lists match their hash."""
    for row in page:
        body = _body(row.body)
        if body is None or not is_intact_toolset(row.hash, body):
            problem = "it does not inflate to JSON" if body is None else "its hash does not match its content"
            yield Violation(f"tool list {row.hash}", problem, _BACKUP)


def _body(packed: bytes) -> bytes | None:
    """Return the JSON of a body; None if it is damaged."""
    try:
        body = unpack_body(bytes(packed))
        msgspec.json.decode(body, type=msgspec.Raw)
    except (RecordDamaged, *NOT_DECODED):
        return None
    return body


# Checks calls and answers: tokens decode and agree in number, references exist, and chains end.

_UNTRAINED = "its tokens will not be trained; restore it from a backup to have them"
_MAX_CHAIN_LENGTH = 100_000  # calls


def check_calls(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check calls with their answers."""
    answers = _answers(connection, [row.id for row in page])
    parents = _parents(connection, page)
    named = {row.prompt_node for row in page} | {one.reply_node for some in answers.values() for one in some}
    messages = existing_values(connection, schema.messages.c.hash, named)
    toolsets = existing_values(connection, schema.toolsets.c.hash, {row.tools_hash for row in page})
    blocks = _blocks(connection, page)
    calls, runs = schema.calls, schema.trajectories
    mixed = sa.select(calls.c.id, runs.c.alias).join(runs, runs.c.id == calls.c.trajectory_id)
    mixed = mixed.where(runs.c.alias != calls.c.alias, calls.c.id.in_([row.id for row in page]))
    strangers = {row.id: row.alias for row in connection.execute(mixed)}  # each with its trajectory's agent
    for row in page:
        own = answers[row.id]
        name = f"call {row.id}"
        if row.prompt_node and row.prompt_node not in messages:
            remedy = f"{_BACKUP}; the transcript is incomplete, its tokens are not affected"
            yield Violation(name, f"its prompt {row.prompt_node} is missing", remedy)
        if row.tools_hash and row.tools_hash not in toolsets:
            yield Violation(name, f"its tool list {row.tools_hash} is missing", _BACKUP)
        if row.id in strangers:
            problem = f"it is of {row.alias}, its trajectory {row.trajectory_id} of {strangers[row.id]}"
            yield Violation(name, problem, "drop its trajectory: no adapter may learn from both")
        yield from _state(name, row, own)
        yield from _prompt(name, row, blocks)
        yield from _context(connection, name, row, parents)
        for one in own:
            yield from _answer(f"{name} choice {one.choice}", row, one, messages)


def _state(name: str, row: Any, own: Sequence[Any]) -> Iterator[Violation]:
    remedy = "start the proxy that recorded it: its journal may hold the end; else drop its trajectory"
    ended = row.state not in (CallState.STARTED, CallState.INTERRUPTED)
    if ended != (row.ended_at is not None):
        yield Violation(name, f"it is {row.state} and has {'no' if ended else 'an'} end", remedy)
    if row.state == CallState.ANSWERED and [one.choice for one in own] != list(range(len(own))):
        yield Violation(name, f"its answers are numbered {[one.choice for one in own]}: one is missing", _BACKUP)


def _prompt(name: str, row: Any, blocks: Mapping[tuple[str, bytes], int]) -> Iterator[Violation]:
    """Check that the prompt decodes, its blocks exist, and a whole prompt has as many tokens as the engine reported."""
    size = _size(row.prompt_ids)
    if size is None:
        yield Violation(name, "its prompt's token ids are damaged", _UNTRAINED)
        return
    for part in block_digests(row.prompt_blocks):
        if (row.trajectory_id, part) not in blocks:
            yield Violation(name, f"block {part.hex()} of its prompt is missing", _UNTRAINED)
            return
        size += blocks[row.trajectory_id, part]
    if row.context != "exact" and size and not row.untrainable and size != row.prompt_tokens:
        yield Violation(name, f"its prompt has {size} token ids, the engine reported {row.prompt_tokens}", _UNTRAINED)


def _context(connection: sa.Connection, name: str, row: Any, parents: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that an exact call continues an answer of its trajectory, or of a predecessor."""
    parent = parents.get(row.parent_call or "")
    if row.context != "exact" or parent is None:  # deleted, or never shipped: its tokens are not trained
        return
    if _origin(parent.trajectory_id) != _origin(row.trajectory_id):
        problem = f"it continues call {parent.id} of trajectory {parent.trajectory_id}, which is another run"
        yield Violation(name, problem, _UNTRAINED)
    if parent.started_at >= row.started_at and _is_circle(connection, row.id):
        remedy = "set parent_call of one of them to NULL and its context to 'fork'"
        yield Violation(name, "its chain of parent calls is a cycle", remedy)


def _answer(name: str, row: Any, one: Any, messages: set[str]) -> Iterator[Violation]:
    size = _size(one.token_ids)
    if size is None:
        yield Violation(name, "its token ids are damaged", _UNTRAINED)
    elif len(one.logprobs) % 4 or (size and one.logprobs and size != len(one.logprobs) // 4 and not row.untrainable):
        yield Violation(name, f"it has {size} token ids and {len(one.logprobs) / 4:g} logprobs", _UNTRAINED)
    if one.reply_node and one.reply_node not in messages:
        remedy = f"{_BACKUP}; its tokens are not affected"
        yield Violation(name, f"its message {one.reply_node} is missing", remedy)


def _size(packed: bytes) -> int | None:
    """Return the number of packed token ids; None if they are damaged."""
    try:
        return len(decompress_token_ids(bytes(packed))) // 4
    except RecordDamaged:
        return None


def _origin(trajectory_id: str) -> str:
    name, _, number = trajectory_id.rpartition("~")
    return name if name and number.isdigit() else trajectory_id


def _is_circle(connection: sa.Connection, name: str) -> bool:
    """Follow a chain of calls, one at a time; only needed if the start times are out of order."""
    table, at = schema.calls, name
    for _ in range(_MAX_CHAIN_LENGTH):
        above = connection.scalar(sa.select(table.c.parent_call).where(table.c.id == at))
        if above is None:
            return False
        if above == name:
            return True
        at = above
    return True


def _answers(connection: sa.Connection, names: Sequence[str]) -> defaultdict[str, list[Any]]:
    table = schema.choices
    query = sa.select(*undecoded(table)).where(table.c.call_id.in_(names)).order_by(table.c.call_id, table.c.choice)
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        found[row.call_id].append(row)
    return found


def _parents(connection: sa.Connection, page: Page) -> dict[str, Any]:
    table = schema.calls
    names = sorted({row.parent_call for row in page if row.parent_call})
    query = sa.select(table.c.id, table.c.trajectory_id, table.c.started_at).where(table.c.id.in_(names))
    return {row.id: row for row in connection.execute(query)}


def _blocks(connection: sa.Connection, page: Page) -> dict[tuple[str, bytes], int]:
    """Return the number of token ids of each block of these calls' trajectories, without damaged ones."""
    table = schema.prompt_blocks
    trajectories = sorted({row.trajectory_id for row in page if row.prompt_blocks})
    packed = sa.type_coerce(table.c.token_ids, sa.LargeBinary).label("token_ids")
    query = sa.select(table.c.trajectory_id, table.c.digest, packed).where(table.c.trajectory_id.in_(trajectories))
    sizes = ((row, _size(row.token_ids)) for row in connection.execute(query))
    return {(row.trajectory_id, bytes(row.digest)): size for row, size in sizes if size is not None}


# Checks that the states of trajectories, groups, verdicts and rounds agree.

_DROP = "delete it with `ratchet store delete`, or restore the store from a backup"
_MEMBERS = {
    GroupState.READY: TrajectoryState.GROUPED,
    GroupState.JUDGED: TrajectoryState.GROUPED,
    GroupState.TRAINED: TrajectoryState.TRAINED,
    GroupState.DROPPED: TrajectoryState.DROPPED,
}


def check_trajectories(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that trajectories have calls, and the seal time, group and committed round of their state."""
    with_calls = existing_values(connection, schema.calls.c.trajectory_id, {row.id for row in page})
    wanted = {row.round_id for row in page if row.round_id}
    query = sa.select(schema.rounds.c.id).where(matches(schema.rounds, id=wanted, state=RoundState.COMMITTED))
    committed = set(connection.scalars(query))
    for row in page:
        name = f"trajectory {row.id}"
        if row.id not in with_calls:
            yield Violation(name, "it has no call", _DROP)
        if (row.state == TrajectoryState.OPEN) != (row.sealed_at is None):
            was = "was" if row.sealed_at is not None else "was never"
            yield Violation(name, f"it is {row.state} and {was} sealed", _DROP)
        if row.state in (TrajectoryState.GROUPED, TrajectoryState.TRAINED) and row.group_id is None:
            yield Violation(name, f"it is {row.state} and of no group", _DROP)
        if row.state == TrajectoryState.TRAINED and row.round_id not in committed:
            problem = f"its round {row.round_id} is not committed: it may be trained a second time"
            yield Violation(name, problem, _DROP)


def check_groups(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that group members have the state of their group, and those of a judged group a score."""
    trajectories, verdicts = schema.trajectories, schema.verdicts
    members: defaultdict[str, list[Any]] = defaultdict(list)
    columns = sa.select(trajectories.c.id, trajectories.c.group_id, trajectories.c.state, trajectories.c.alias)
    for run in connection.execute(columns.where(matches(trajectories, group_id=[row.id for row in page]))):
        members[run.group_id].append(run)
    judged = [row.id for row in page if row.state in (GroupState.JUDGED, GroupState.TRAINED)]
    scored = matches(verdicts, trajectory_id=[run.id for group in judged for run in members[group]])
    query = sa.select(verdicts.c.trajectory_id).where(scored, verdicts.c.score.is_not(None))
    with_score = set(connection.scalars(query))
    for row in page:
        name = f"group {row.id}"
        if not members[row.id]:
            yield Violation(name, "it has no member", "delete the row; nothing needs it")
        for run in members[row.id]:
            if run.state != _MEMBERS[GroupState(row.state)] or run.alias != row.alias:
                problem = f"it is {row.state} of {row.alias}, its member {run.id} is {run.state} of {run.alias}"
                yield Violation(name, problem, _DROP)
            if row.id in judged and run.id not in with_score:
                yield Violation(name, f"it is {row.state}, and no verdict scores its member {run.id}", _DROP)


def check_verdicts(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that verdicts are of their trajectory's group, and that the judge requests behind them are there."""
    trajectories, judge_requests = schema.trajectories, schema.judge_requests
    query = sa.select(trajectories.c.id, trajectories.c.group_id)
    query = query.where(matches(trajectories, id={row.trajectory_id for row in page}))
    groups = {row.id: row.group_id for row in connection.execute(query)}
    requests = existing_values(connection, judge_requests.c.id, {row.judge_request_id for row in page})
    remedy = "delete the verdict, or restore what it names from a backup"
    for row in page:
        name, group_id = f"verdict {row.id}", groups.get(row.trajectory_id)
        if row.group_id is not None and group_id != row.group_id:
            yield Violation(name, f"it is of group {row.group_id}, its trajectory is of {group_id}", remedy)
        if row.judge_request_id and row.judge_request_id not in requests:
            yield Violation(name, f"its judge request {row.judge_request_id} is missing", remedy)


def check_rounds(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that committed rounds and their versions name each other."""
    table = schema.policies
    query = sa.select(table.c.alias, table.c.version, table.c.round_id)
    made = {row.round_id: (row.alias, row.version) for row in connection.execute(query) if row.round_id}
    remedy = "restore the table policies from a backup; without the row the version cannot be served"
    for row in page:
        if row.state == RoundState.COMMITTED and made.get(row.id) != (row.alias, row.to_version):
            problem = f"it is committed, and policy {row.alias}@{row.to_version} does not name it"
            yield Violation(f"round {row.id}", problem, remedy)


# Checks prompts, rollouts, resamples, and versions that share an adapter.

_ROLL_BACK = "roll back to the version before that round"


def check_prompts(_: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that prompts match their id, so that versions serve an unchanged text."""
    for row in page:
        if prompt_id(row.mode, row.text, _families(row.families)) != row.id:
            remedy = "restore it from a backup; versions serve its current text"
            yield Violation(f"prompt {row.id}", "its id does not match its text", remedy)


def _families(stored: Any) -> Mapping[str, str]:
    """Return a prompt's texts by family, which PostgreSQL's driver has decoded; none if they are damaged."""
    try:
        return msgspec.json.decode(stored, type=dict[str, str]) if isinstance(stored, str) else stored
    except NOT_DECODED:
        return {}


def check_rollouts(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that rollouts of evaluations were not trained."""
    trajectories = schema.trajectories
    names = [row.id for row in page if row.purpose == "eval"]
    trained = sa.select(trajectories.c.id).where(matches(trajectories, id=names, state=TrajectoryState.TRAINED))
    for name in connection.scalars(trained):
        yield Violation(f"rollout {name}", "it is of an evaluation, and its trajectory was trained", _ROLL_BACK)


def check_resamples(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that trained resamples share the group of their original."""
    trajectories, originals = schema.trajectories, schema.trajectories.alias("original")
    query = (
        sa.select(schema.resamples.c.id)
        .join(trajectories, trajectories.c.id == schema.resamples.c.id)
        .join(originals, originals.c.id == schema.resamples.c.original_id)
        .where(schema.resamples.c.id.in_([row.id for row in page]), trajectories.c.state == TrajectoryState.TRAINED)
        .where(sa.func.coalesce(originals.c.group_id, "") != trajectories.c.group_id)
    )
    for name in connection.scalars(query):
        yield Violation(f"resample {name}", "it was trained, and not in the group of its original", _ROLL_BACK)


def check_policies(connection: sa.Connection) -> Iterator[Violation]:
    """Check that versions with the same served name share an adapter and differ only by their prompt."""
    table = schema.policies
    adapters: dict[tuple[str, str], str | None] = {}
    columns = (table.c.alias, table.c.version, table.c.served_name, table.c.adapter)
    for row in connection.execute(sa.select(*columns).order_by(table.c.alias, table.c.version)):
        first = adapters.setdefault((row.alias, row.served_name), row.adapter)
        if first != row.adapter:
            problem = f"vLLM knows it as {row.served_name}, and an earlier version of that name has adapter {first}"
            remedy = "restore the table policies from a backup; what it serves is the earlier version's adapter"
            yield Violation(f"policy {row.alias}@{row.version}", problem, remedy)


_MAX_KEPT = 1_000  # violations
_NOT_JSON = "restore this row from a backup; until then what needs it is refused, or dropped as `damaged`"
OnProgress = Callable[[str, int, int], None]  # table, rows checked now, rows in total

Check = Callable[[sa.Connection, Page], Iterator[Violation]]
_CHECKS: tuple[tuple[sa.Table, int, Check], ...] = (  # each with the size of its pages
    (schema.messages, 1_000, check_messages),
    (schema.toolsets, 200, check_toolsets),
    (schema.calls, 200, check_calls),
    (schema.trajectories, 500, check_trajectories),
    (schema.groups, 200, check_groups),
    (schema.verdicts, 500, check_verdicts),
    (schema.rounds, 500, check_rounds),
    (schema.prompts, 200, check_prompts),
    (schema.rollouts, 500, check_rollouts),
    (schema.resamples, 500, check_resamples),
)


@dataclass(slots=True)
class VerificationReport:
    """The number of checked rows, and the violations; only the first thousand are kept."""

    rows: dict[str, int] = field(default_factory=dict)  # checked rows by table
    findings: list[Violation] = field(default_factory=list)
    count: int = 0  # all violations, including those not kept

    @property
    def sound(self) -> bool:
        """Whether there is no violation."""
        return self.count == 0

    def add(self, findings: Iterable[Violation]) -> None:
        for finding in findings:
            self.count += 1
            if len(self.findings) < _MAX_KEPT:
                self.findings.append(finding)


def verify(store_url: str, on_progress: OnProgress = lambda table, rows, total: None) -> VerificationReport:
    """Verify a store; `on_progress` is called for each page. Raises StoreError if the database cannot be read."""
    engine = connect(store_url, create=False)
    report = VerificationReport()
    try:
        ensure_schema(engine)
        report.add(_check_file(engine))
        with read(_with_snapshots(engine)) as connection:  # one row per version: few
            report.add(check_policies(connection))
        for table, size, check in _CHECKS:
            report.rows[table.name] = 0
            for found, checked, total in _check_table(engine, table, size, check):
                report.rows[table.name] += checked
                report.add(found)
                on_progress(table.name, checked, total)
    finally:
        engine.dispose()
    return report


def _check_table(
    engine: sa.Engine, table: sa.Table, size: int, check: Check
) -> Iterator[tuple[list[Violation], int, int]]:
    """Yield, by page, the violations, the number of rows checked, and the total."""
    (key,) = table.primary_key
    query = sa.select(*undecoded(table)).order_by(key).limit(size)
    snapshots, last = _with_snapshots(engine), None
    with read(snapshots) as connection:
        total = int(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0)
    while True:
        with read(snapshots) as connection:
            page = connection.execute(query if last is None else query.where(key > last)).all()
            found = list(check(connection, page)) if page else []
        yield found, len(page), total
        if len(page) < size:
            return
        last = getattr(page[-1], key.name)


def _with_snapshots(engine: sa.Engine) -> sa.Engine:
    """Return an engine whose transactions read one snapshot, as SQLite's always do."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="REPEATABLE READ")


def _check_file(engine: sa.Engine) -> Iterator[Violation]:
    """Yield problems of SQLite's file, dangling references, and values that are not JSON; PostgreSQL prevents all."""
    if engine.dialect.name != "sqlite":
        return
    remedy = "restore the store from a backup, or rebuild it: sqlite3 store.db .recover | sqlite3 new.db"
    with read(engine) as connection:
        for (problem,) in connection.exec_driver_sql("PRAGMA quick_check(20)"):
            if problem != "ok":
                yield Violation("the database file", str(problem), remedy)
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MAX_KEPT):
            remedy = f"restore {parent} from a backup, or delete this row"
            yield Violation(f"{table} rowid {row}", f"refers to a missing row of {parent}", remedy)
        for table in schema.metadata.sorted_tables:
            yield from _check_json(connection, table)


def _check_json(connection: sa.Connection, table: sa.Table) -> Iterator[Violation]:
    wrong = {
        column.name: sa.and_(column.is_not(None), sa.func.json_valid(sa.type_coerce(column, sa.Text)) == 0)
        for column in table.c
        if isinstance(column.type, sa.JSON)
    }
    if not wrong:
        return
    key = len(table.primary_key)
    query = sa.select(*table.primary_key, *wrong.values()).where(sa.or_(*wrong.values())).limit(_MAX_KEPT)
    for row in connection.execute(query):
        for name, is_wrong in zip(wrong, row[key:], strict=True):
            if is_wrong:
                row_name = " ".join((table.name, *map(str, row[:key])))
                yield Violation(row_name, f"its {name} is not JSON", _NOT_JSON)
