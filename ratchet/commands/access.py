"""`ratchet keys`, `usage` and `audit`: who may call what, what they used, and what operators read and changed.

They need the store and no running proxy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options
from ratchet.output import format_time, plain, show

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import AuditEntry, Key, KeyTokens, Usage
    from ratchet.store.store import Store

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MAX_COUNT, _MAX_BUDGET = 2**31 - 1, 2**63 - 1  # what the store's columns hold
_LATEST_EXPIRY = 253_402_300_799  # the last second of the year 9999
_LIMITS = {  # a key's limit: its unit and the help of its option
    "requests_per_minute": ("requests/min", "Maximum requests per minute and proxy."),
    "tokens_per_minute": ("tokens/min", "Maximum prompt and completion tokens per minute and proxy."),
    "max_parallel_requests": (
        "at once", "Maximum requests at once, per proxy or over all proxies that share a coordinator."
    ),
    "max_tokens": ("tokens/answer", "Maximum completion tokens of an answer; higher values are lowered."),
    "tokens_per_day": ("tokens/day", "Budget of prompt and completion tokens per UTC day, over all proxies."),
    "tokens_per_month": ("tokens/month", "The same per UTC month."),
}  # fmt: skip
_USAGE_COLUMNS = {"key": "key_id", "agent": "alias", "day": "day", "purpose": "purpose"}


def _limit_options(minimum: int) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for name, (_, text) in reversed(_LIMITS.items()):
            maximum = _MAX_BUDGET if name in ("tokens_per_day", "tokens_per_month") else _MAX_COUNT
            named = f"--{name.replace('_', '-')}"
            command = click.option(named, type=click.IntRange(minimum, maximum), help=text)(command)
        for name, kind, metavar, text in (
            ("--expires-at", options.timestamp, "TIME", "Reject the key from then on: 2027-01-31."),
            ("--expires-in", options.duration, "AGE", "Reject the key after this time: 30d, 12h."),
        ):
            command = click.option(name, type=kind, metavar=metavar, help=text)(command)
        return command

    return add


def _check_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """Refuse a name that a list of keys could not show on its line. Raises BadParameter."""
    if not name.strip() or not name.isprintable():
        raise click.BadParameter("give a name on one line, such as the owner of the key")
    return name


@click.group()
def keys() -> None:
    """Create, list and revoke the API keys of agents and operators.

    Once a key exists, every agent needs one. Running proxies apply changes within seconds.

    \b
    Example:
      ratchet keys create --name crawler
    """


@keys.command()
@click.option("--name", required=True, callback=_check_name, help="Name of the key, such as its owner.")
@click.option(
    "--scope", type=click.Choice(["agent", "operator"]), default="agent", help="Access of the key.  [default: agent]"
)
@click.option(
    "--agent", "agents", multiple=True, metavar="NAME", help="Only this agent; repeat for more.  [default: all]"
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME",
    help="Only this model of `model_list`; repeat for more.  [default: all]",
)  # fmt: skip
@click.option("--no-agents", is_flag=True, help="No agent: only models of `model_list`, named by --model.")
@click.option("--no-models", is_flag=True, help="No model of `model_list`.")
@_limit_options(1)
@options.store_url
@options.project
@options.with_settings(options.read_project_settings)
def create(
    settings: Settings, name: str, scope: str, agents: tuple[str, ...], models: tuple[str, ...], no_agents: bool,
    no_models: bool, expires_in: float | None, expires_at: float | None, **limits: int | None,
) -> None:  # fmt: skip
    """Create a key and print it once: only its hash is stored.

    With --agent it can call and list only these agents; with --model, only these models of `model_list`.

    \b
    Example:
      ratchet keys create --name crawler --requests-per-minute 600 --tokens-per-minute 200000
      ratchet keys create --name office --agent mail --agent support --no-models --expires-in 30d
    """
    from ratchet.proxy.agent_names import check_agent_names
    from ratchet.proxy.api_keys import hash_key, new_key
    from ratchet.store.states import KeyScope

    if scope == "operator" and (agents or models or no_agents or no_models or any(limits.values())):
        raise click.UsageError(
            "--agent, --model and limits are for agents' keys: an operator's key opens the operator API for all agents"
        )
    if (agents and no_agents) or (models and no_models):
        raise click.UsageError("--no-agents excludes --agent, and --no-models excludes --model")
    if no_agents and not models:
        raise click.UsageError("--no-agents needs a --model: the key could call nothing")
    expires_at = _expiry(expires_in, expires_at)
    try:
        check_agent_names(agents)
    except ValueError as error:
        raise click.UsageError(f"--agent: {error}") from error
    key = new_key()
    with options.open_store_for_command(settings.store_url, create=True) as store:
        notes = _unknown("agent", agents, {one.alias for one in store.policies.all()} | set(settings.agents_by_name))
        notes += _unknown("model", models, {entry.model_name for entry in settings.model_list})
        made = store.keys.create(
            name, hash_key(key.encode()), KeyScope(scope), **limits, expires_at=expires_at,
            agents=() if no_agents else agents or None, models=() if no_models else models or None,
        )  # fmt: skip
        store.audit.record_command(options.current_user(), "keys create", {"key": made.id, "name": made.name})
    click.echo(key)
    only = ", ".join((*(made.agents or ()), *(made.models or ())))
    expiry = f"; it expires at {_when(expires_at)} UTC" if expires_at is not None else ""
    for note in (f"{made.id}: scope {scope}{only and f' for {only}'}{expiry}; the key is not shown again", *notes):
        click.echo(note, err=True)


def _expiry(expires_in: float | None, expires_at: float | None) -> float | None:
    """Return when a key expires (Unix seconds), or None. Raises UsageError."""
    if expires_in is not None and expires_at is not None:
        raise click.UsageError("--expires-in and --expires-at exclude each other")
    expires_at = time.time() + expires_in if expires_in is not None else expires_at
    if expires_at is not None and expires_at <= time.time():
        raise click.UsageError("--expires-at: this time has passed")
    if expires_at is not None and expires_at > _LATEST_EXPIRY:
        raise click.UsageError("--expires-in: this is after the year 9999")
    return expires_at


def _unknown(kind: str, names: tuple[str, ...], known: Collection[str]) -> list[str]:
    """Return a note for each name that is not known. Raises UsageError for one that differs by case only."""
    from ratchet.proxy.agent_names import nearest_name

    notes = []
    for name in sorted(set(names) - set(known)):
        nearest = nearest_name(name, tuple(known))
        if nearest is not None and nearest.casefold() == name.casefold():
            raise click.UsageError(f"--{kind}: there is no {kind} {name}; did you mean {nearest}?")
        hint = f"did you mean {nearest}?" if nearest else "the key is of use once there is one"
        place = "the settings or the store" if kind == "agent" else "model_list"
        notes.append(f"note: there is no {kind} {name} in {place}; {hint}")
    return notes


@keys.command("list")
@options.as_json
@options.with_store
def list_keys(store: Store) -> None:
    """List the keys in the store, including revoked ones. Keys in environment variables are not listed.

    \b
    Example:
      ratchet keys list --json
    """
    found = store.keys.all()
    used = store.usage.of_keys([key.id for key in found])
    show(
        [_public(key, used[key.id]) for key in found],
        (_key_line(key, used[key.id]) for key in found),
        empty="no keys in this store: create one with `ratchet keys create --name NAME`",
    )


@keys.command()
@click.argument("key_id", metavar="ID")
@click.option("--no-expiry", is_flag=True, help="Remove the expiry.")
@_limit_options(0)
@options.with_store
def update(
    store: Store, key_id: str, no_expiry: bool, expires_in: float | None, expires_at: float | None, **limits: int | None
) -> None:
    """Change limits and expiry of a key by its id; 0 removes a limit. Running proxies follow within seconds.

    \b
    Example:
      ratchet keys update key_06f3k9q2m8d4x7w1n5b0c3v6t2 --tokens-per-day 5000000 --requests-per-minute 0
    """
    changes: dict[str, float | None] = {name: limit or None for name, limit in limits.items() if limit is not None}
    expires_at = _expiry(expires_in, expires_at)
    if no_expiry and expires_at is not None:
        raise click.UsageError("--no-expiry excludes --expires-in and --expires-at")
    if no_expiry or expires_at is not None:
        changes["expires_at"] = expires_at
    if not changes:
        raise click.UsageError("nothing to change: name a limit, or when the key expires")
    changed = store.keys.update(key_id, **changes)
    target = {"key": changed.id, "name": changed.name, "changed": ", ".join(sorted(changes))}
    store.audit.record_command(options.current_user(), "keys update", target)
    click.echo(f"{changed.id} ({changed.name}): {', '.join(_limits(changed)) or 'no limits'}")


@keys.command()
@click.argument("key_id", metavar="ID")
@options.with_store
def revoke(store: Store, key_id: str) -> None:
    """Revoke a key by its id. Running proxies reject it within seconds; authentication stays on.

    \b
    Example:
      ratchet keys revoke key_06f3k9q2m8d4x7w1n5b0c3v6t2
    """
    revoked = store.keys.revoke(key_id)
    store.audit.record_command(options.current_user(), "keys revoke", {"key": revoked.id, "name": revoked.name})
    click.echo(f"{revoked.id} ({revoked.name}) is revoked")


def _when(moment: float | None) -> str:
    return format_time(moment)[:16] if moment else "never"


def _public(key: Key, used: KeyTokens) -> dict[str, Any]:
    fields = plain(key, tokens_today=used.today, tokens_this_month=used.this_month)
    return {name: value for name, value in fields.items() if name != "hash"}


def _key_line(key: Key, used: KeyTokens) -> str:
    """Return a key with its state, what it may call, its limits, and what is used up of its budgets."""
    state = f"used {_when(key.last_used_at)}"
    if key.revoked_at:
        state = f"revoked {_when(key.revoked_at)}"
    elif key.expires_at is not None and key.expires_at <= time.time():
        state = f"expired {_when(key.expires_at)}"
    parts = [key.id, f"{key.scope:<8}", key.name, f"made {_when(key.created_at)}", state, *_limits(key)]
    budgets = ((key.tokens_per_day, used.today, "today"), (key.tokens_per_month, used.this_month, "this month"))
    parts += [f"{spent:,} of {budget:,} tokens {period}" for budget, spent, period in budgets if budget]
    return "  ".join(parts)


def _limits(key: Key) -> list[str]:
    """Return what a key may call, until when, and its limits."""
    found = []
    if key.expires_at is not None:
        found.append(f"until {_when(key.expires_at)}")
    if key.agents is not None:
        found.append(f"only {', '.join(key.agents)}" if key.agents else "no agents")
    if key.models is not None:
        found.append(f"models {', '.join(key.models)}" if key.models else "no models")
    limits = ((getattr(key, name), unit) for name, (unit, _) in _LIMITS.items())
    return found + [f"{limit} {unit}" for limit, unit in limits if limit]


@click.command()
@options.number("--days", 30, "Number of UTC days, today included.", most=400)
@click.option(
    "--by", "columns", type=click.Choice(list(_USAGE_COLUMNS)), multiple=True, default=("key", "agent"),
    show_default=True, help="Column; repeat for more. Models of `model_list` count as agents.",
)  # fmt: skip
@click.option("--agent", "alias", metavar="NAME", help="Only this agent, or model of `model_list`.")
@click.option("--key", "key_id", metavar="ID", help="Only this key.")
@options.as_json
@options.with_store
def usage(store: Store, days: int, columns: tuple[str, ...], alias: str | None, key_id: str | None) -> None:
    """Show calls, failed calls and tokens of the last days, by key and agent.

    Every recorded call counts once it has ended and is in the store. Deleted trajectories stay counted.

    \b
    Example:
      ratchet usage --days 7
      ratchet usage --by key --by day --json
    """
    from ratchet.store.errors import RecordNotFound

    found = store.usage.read(days, [_USAGE_COLUMNS[name] for name in columns], alias, key_id)
    if key_id and not found and all(key.id != key_id for key in store.keys.all()):
        raise RecordNotFound(f"no key {key_id}; `ratchet keys list` shows the ids")
    names = tuple(dict.fromkeys(columns))
    show(
        found,
        (_usage_cells(one, names) for one in found),
        columns=(*names, "calls", "failed", "prompt tokens", "completion tokens"),
        empty=f"no call has ended in the last {days} days",
    )


def _usage_cells(one: Usage, columns: tuple[str, ...]) -> tuple[Any, ...]:
    key = f"{one.key_id} {one.key_name or ''}".rstrip() if one.key_id else "(no key)"
    texts = (key if name == "key" else getattr(one, _USAGE_COLUMNS[name]) for name in columns)
    return (*texts, one.calls, one.failed, f"{one.prompt_tokens:,}", f"{one.completion_tokens:,}")


@click.command()
@options.number("--limit", 100, "Maximum number.", most=100_000)
@click.option("--key", metavar="ID", help="Only entries of the operator key with this id.")
@click.option("--since", type=options.timestamp, metavar="TIME", help="Only entries at this time or later: 2026-11-21.")
@click.option("--changes", is_flag=True, help="Only changes, no reads.")
@options.as_json
@options.with_store
def audit(store: Store, limit: int, **chosen: Any) -> None:
    """Show what operators read and changed, newest first: through the operator API, or by commands on keys and data.

    Decisions about versions by command are in `ratchet policies show`.

    \b
    Example:
      ratchet audit --changes --since 2026-11-21
    """
    found = store.audit.page(limit, **chosen)
    show(found, map(_audit_line, found), empty="nothing yet: no operator has read or changed anything")


def _audit_line(entry: AuditEntry) -> str:
    who = f"{entry.actor} ({entry.key_id})" if entry.key_id else entry.actor
    target = " ".join(f"{name}={value}" for name, value in entry.target.items())
    status = "outcome unknown" if entry.status is None else str(entry.status or "done")
    times = f"{entry.count} times" if entry.count > 1 else ""
    parts = (format_time(entry.at), who, entry.client or "", entry.method, entry.route, target, status, times)
    return "  ".join(part for part in parts if part)
