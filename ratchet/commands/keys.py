"""The `ratchet keys` commands: create, list and revoke API keys. They need the store and no running proxy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.store.operation_records import Key, KeyTokens

_Command = TypeVar("_Command", bound=Callable[..., Any])


_MAX_COUNT, _MAX_BUDGET = 2**31 - 1, 2**63 - 1  # what the store's columns hold
_LATEST_EXPIRY = 253_402_300_799  # the last second of the year 9999
_LIMITS = {
    "requests_per_minute": "Maximum requests per minute and proxy.",
    "tokens_per_minute": "Maximum prompt and completion tokens per minute and proxy.",
    "max_parallel_requests": "Maximum requests at once, per proxy or over all proxies that share a coordinator.",
    "max_tokens": "Maximum completion tokens of an answer; higher values are lowered.",
    "tokens_per_day": "Budget of prompt and completion tokens per UTC day, over all proxies.",
    "tokens_per_month": "The same per UTC month.",
}
_BUDGETS = ("tokens_per_day", "tokens_per_month")


def _limit_options(minimum: int) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for name, text in reversed(_LIMITS.items()):
            option, maximum = f"--{name.replace('_', '-')}", _MAX_BUDGET if name in _BUDGETS else _MAX_COUNT
            command = click.option(option, type=click.IntRange(minimum, maximum), help=text)(command)
        for option, kind, metavar, text in (
            ("--expires-at", options.Timestamp(), "TIME", "Reject the key from then on: 2027-01-31."),
            ("--expires-in", options.Duration(), "AGE", "Reject the key after this time: 30d, 12h."),
        ):
            command = click.option(option, type=kind, metavar=metavar, help=text)(command)
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
    "--scope",
    type=click.Choice(["agent", "operator"]),
    default="agent",
    help="Access of the key.  [default: agent]",
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
@click.pass_context
def create(
    context: click.Context,
    /,
    name: str,
    scope: str,
    agents: tuple[str, ...],
    models: tuple[str, ...],
    no_agents: bool,
    no_models: bool,
    expires_in: float | None,
    expires_at: float | None,
    store: str | None,
    project: str | None,
    **limits: int | None,
) -> None:
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

    _check_choices(scope, agents, models, no_agents, no_models, limits)
    expires_at = _expiry(expires_in, expires_at)
    try:
        check_agent_names(agents)
    except ValueError as error:
        raise click.UsageError(f"--agent: {error}") from error
    key = new_key()
    settings = options.read_project_settings(context, {"store": store, "project": project})
    with options.open_store_for_command(settings.store_url, create=True) as opened:
        known = {policy.alias for policy in opened.policies.all()} | set(settings.agents_by_name)
        unknown_agents = _unknown("--agent", "agent", agents, known)
        unknown_models = _unknown("--model", "model", models, {entry.model_name for entry in settings.model_list})
        made = opened.keys.create(
            name, hash_key(key.encode()), KeyScope(scope), **limits,
            agents=() if no_agents else agents or None, models=() if no_models else models or None,
            expires_at=expires_at,
        )  # fmt: skip
        opened.audit.record_command(options.current_user(), "keys create", {"key": made.id, "name": made.name})
    click.echo(key)
    only = f" for {', '.join((*(made.agents or ()), *(made.models or ())))}" if made.agents or made.models else ""
    expiry = f"; it expires at {_when(expires_at)} UTC" if expires_at is not None else ""
    click.echo(f"{made.id}: scope {scope}{only}{expiry}; the key is not shown again", err=True)
    for note in (*unknown_agents, *unknown_models):
        click.echo(note, err=True)


def _expiry(expires_in: float | None, expires_at: float | None) -> float | None:
    """Return when a key expires (Unix seconds), or None. Raises UsageError."""
    import time

    if expires_in is not None and expires_at is not None:
        raise click.UsageError("--expires-in and --expires-at exclude each other")
    expires_at = time.time() + expires_in if expires_in is not None else expires_at
    if expires_at is not None and expires_at <= time.time():
        raise click.UsageError("--expires-at: this time has passed")
    if expires_at is not None and expires_at > _LATEST_EXPIRY:
        raise click.UsageError("--expires-in: this is after the year 9999")
    return expires_at


def _check_choices(
    scope: str,
    agents: tuple[str, ...],
    models: tuple[str, ...],
    no_agents: bool,
    no_models: bool,
    limits: Mapping[str, int | None],
) -> None:
    """Raise UsageError for options that contradict each other."""
    if scope == "operator" and (agents or models or no_agents or no_models or any(limits.values())):
        raise click.UsageError(
            "--agent, --model and limits are for agents' keys: an operator's key opens the operator API for all agents"
        )
    if (agents and no_agents) or (models and no_models):
        raise click.UsageError("--no-agents excludes --agent, and --no-models excludes --model")
    if no_agents and not models:
        raise click.UsageError("--no-agents needs a --model: the key could call nothing")


def _unknown(option: str, kind: str, names: tuple[str, ...], known: Collection[str]) -> list[str]:
    """Return a note for each name that is not known. Raises UsageError for one that differs by case only."""
    from ratchet.proxy.agent_names import nearest_name

    notes = []
    for name in sorted(set(names) - set(known)):
        nearest = nearest_name(name, tuple(known))
        if nearest is not None and nearest.casefold() == name.casefold():
            raise click.UsageError(f"{option}: there is no {kind} {name}; did you mean {nearest}?")
        hint = f"did you mean {nearest}?" if nearest else "the key is of use once there is one"
        place = "the settings or the store" if kind == "agent" else "model_list"
        notes.append(f"note: there is no {kind} {name} in {place}; {hint}")
    return notes


@keys.command("list")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_keys(context: click.Context, store: str | None, project: str | None, as_json: bool) -> None:
    """List the keys in the store, including revoked ones. Keys in environment variables are not listed.

    \b
    Example:
      ratchet keys list --json
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.keys.all()
        used = opened.usage.of_keys([key.id for key in found])
    if as_json:
        options.print_json([_plain(key, used[key.id]) for key in found])
        return
    for key in found:
        made = f"made {_when(key.created_at)}"
        click.echo(
            "  ".join(
                [key.id, f"{key.scope:<8}", key.name, made, _state(key), *_limits(key), *_used(key, used[key.id])]
            )
        )
    if not found:
        click.echo("no keys in this store: create one with `ratchet keys create --name NAME`")


@keys.command()
@click.argument("key_id", metavar="ID")
@click.option("--no-expiry", is_flag=True, help="Remove the expiry.")
@_limit_options(0)
@options.store_url
@options.project
@click.pass_context
def update(
    context: click.Context,
    /,
    key_id: str,
    no_expiry: bool,
    expires_in: float | None,
    expires_at: float | None,
    store: str | None,
    project: str | None,
    **limits: int | None,
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
    with options.open_project_store(context, store=store, project=project) as opened:
        changed = opened.keys.update(key_id, **changes)
        target = {"key": changed.id, "name": changed.name, "changed": ", ".join(sorted(changes))}
        opened.audit.record_command(options.current_user(), "keys update", target)
    click.echo(f"{changed.id} ({changed.name}): {', '.join(_limits(changed)) or 'no limits'}")


@keys.command()
@click.argument("key_id", metavar="ID")
@options.store_url
@options.project
@click.pass_context
def revoke(context: click.Context, key_id: str, store: str | None, project: str | None) -> None:
    """Revoke a key by its id. Running proxies reject it within seconds; authentication stays on.

    \b
    Example:
      ratchet keys revoke key_06f3k9q2m8d4x7w1n5b0c3v6t2
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        revoked = opened.keys.revoke(key_id)
        opened.audit.record_command(options.current_user(), "keys revoke", {"key": revoked.id, "name": revoked.name})
    click.echo(f"{revoked.id} ({revoked.name}) is revoked")


def _when(moment: float | None) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M") if moment else "never"


def _plain(key: Key, used: KeyTokens) -> dict[str, Any]:
    import msgspec

    fields = {name: value for name, value in msgspec.structs.asdict(key).items() if name != "hash"}
    return fields | {"tokens_today": used.today, "tokens_this_month": used.this_month}


def _used(key: Key, used: KeyTokens) -> list[str]:
    """Return what is used up of a key's budgets."""
    budgets = ((key.tokens_per_day, used.today, "today"), (key.tokens_per_month, used.this_month, "this month"))
    return [f"{spent:,} of {budget:,} tokens {period}" for budget, spent, period in budgets if budget]


def _state(key: Key) -> str:
    import time

    if key.revoked_at:
        return f"revoked {_when(key.revoked_at)}"
    if key.expires_at is not None and key.expires_at <= time.time():
        return f"expired {_when(key.expires_at)}"
    return f"used {_when(key.last_used_at)}"


def _limits(key: Key) -> list[str]:
    """Return what a key may call, until when, and its limits, for the list."""
    found = []
    if key.expires_at is not None:
        found.append(f"until {_when(key.expires_at)}")
    if key.agents is not None:
        found.append(f"only {', '.join(key.agents)}" if key.agents else "no agents")
    if key.models is not None:
        found.append(f"models {', '.join(key.models)}" if key.models else "no models")
    for limit, unit in (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.max_parallel_requests, "at once"),
        (key.max_tokens, "tokens/answer"),
        (key.tokens_per_day, "tokens/day"),
        (key.tokens_per_month, "tokens/month"),
    ):
        if limit:
            found.append(f"{limit} {unit}")
    return found
