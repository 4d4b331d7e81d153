"""The `ratchet keys` commands: create, list and revoke API keys. They need the store and no running proxy."""

from __future__ import annotations

import click

from ratchet import options


@click.group()
def keys() -> None:
    """Create, list and revoke the API keys of agents and operators.

    Once the first key exists, every agent needs one. Running proxies apply changes within seconds.

    \b
    Example:
      ratchet keys create --name crawler
    """


@keys.command()
@click.option("--name", required=True, help="Name of the key, such as its owner.")
@click.option(
    "--scope",
    type=click.Choice(["agent", "operator"]),
    default="agent",
    help="Access of the key.  [default: agent]",
)
@click.option(
    "--agent", "agents", multiple=True, metavar="NAME", help="Only this agent; repeat for more.  [default: all]"
)
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Maximum requests per proxy.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Maximum prompt and completion tokens per proxy.")
@click.option("--max-parallel-requests", type=click.IntRange(min=1), help="Maximum requests at once per proxy.")
@options.store_url
@options.project
@click.pass_context
def create(
    context: click.Context,
    name: str,
    scope: str,
    agents: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_parallel_requests: int | None,
    store: str | None,
    project: str | None,
) -> None:
    """Create a key and print it once: only its hash is stored.

    With --agent it calls these agents only, and sees no other one. Models of `model_list` are open to every key.

    \b
    Example:
      ratchet keys create --name crawler --requests-per-minute 600 --tokens-per-minute 200000
      ratchet keys create --name office --agent mail --agent support
    """
    from ratchet.proxy.agent_names import check_agent_names, nearest_name
    from ratchet.proxy.api_keys import hash_key, new_key
    from ratchet.store.states import KeyScope

    if agents and scope == "operator":
        raise click.UsageError("--agent is for agents' keys: an operator's key opens the operator API for all agents")
    try:
        check_agent_names(agents)
    except ValueError as error:
        raise click.UsageError(f"--agent: {error}") from error
    key = new_key()
    settings = options.read_project_settings(context, {"store": store, "project": project})
    with options.open_store_for_command(settings.store_url) as opened:
        known = {policy.alias for policy in opened.policies.all()} | set(settings.agents_by_name)
        nearest = {name: nearest_name(name, tuple(known)) for name in sorted(set(agents) - known)}
        for name_given, other in nearest.items():
            if other is not None and other.casefold() == name_given.casefold():
                raise click.UsageError(f"--agent: there is no agent {name_given}; did you mean {other}?")
        limits = (requests_per_minute, tokens_per_minute, agents or None, max_parallel_requests)
        made = opened.keys.create(name, hash_key(key.encode()), KeyScope(scope), *limits)
    click.echo(key)
    only = f" for {', '.join(made.agents)}" if made.agents else ""
    click.echo(f"{made.id}: scope {scope}{only}; the key is not shown again", err=True)
    for unknown, other in nearest.items():
        hint = f"did you mean {other}?" if other else "the key is of use once there is one"
        click.echo(f"note: there is no agent {unknown} in the settings or the store; {hint}", err=True)


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
    import msgspec

    with options.open_project_store(context, create=True, store=store, project=project) as opened:
        found = opened.keys.all()
    if as_json:
        options.print_json([{k: v for k, v in msgspec.structs.asdict(key).items() if k != "hash"} for key in found])
        return
    for key in found:
        state = f"revoked {_when(key.revoked_at)}" if key.revoked_at else f"used {_when(key.last_used_at)}"
        limits = [
            f"{limit} {unit}/min"
            for limit, unit in ((key.requests_per_minute, "requests"), (key.tokens_per_minute, "tokens"))
            if limit
        ]
        limits += [f"{key.max_parallel_requests} at once"] if key.max_parallel_requests else []
        only = [f"only {', '.join(key.agents)}"] if key.agents else []
        made = f"made {_when(key.created_at)}"
        click.echo("  ".join([key.id, f"{key.scope:<8}", key.name, made, state, *only, *limits]))
    if not found:
        click.echo("no keys in this store: create one with `ratchet keys create --name NAME`")


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
    click.echo(f"{revoked.id} ({revoked.name}) is revoked")


def _when(moment: float | None) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M") if moment else "never"
