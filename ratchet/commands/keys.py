"""The commands for API keys: create, list, revoke. They need the store and no running proxy."""

from __future__ import annotations

import click

from ratchet import options


@click.group()
def keys() -> None:
    """Make, list and revoke the API keys of agents and operators.

    As soon as there is a key, agents need one. Running proxies follow within seconds.

    \b
    Example:
      ratchet keys create --name crawler
    """


@keys.command()
@click.option("--name", required=True, help="What the key is for, or whose it is.")
@click.option(
    "--scope", type=click.Choice(["agent", "operator"]), default="agent", help="What it opens.  [default: agent]"
)
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Most requests, at each proxy.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Most tokens, prompt and answer, at each proxy.")
@options.store_url
@options.project
@click.pass_context
def create(
    context: click.Context,
    name: str,
    scope: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    store: str | None,
    project: str | None,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    \b
    Example:
      ratchet keys create --name crawler --requests-per-minute 600 --tokens-per-minute 200000
    """
    from ratchet.proxy.api_keys import hash_key, new_key
    from ratchet.store.states import KeyScope

    key = new_key()
    with options.open_project_store(context, create=True, store=store, project=project) as opened:
        made = opened.keys.create(name, hash_key(key.encode()), KeyScope(scope), requests_per_minute, tokens_per_minute)
    click.echo(key)
    click.echo(f"{made.id}: scope {scope}; the key is not shown again", err=True)


@keys.command("list")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_keys(context: click.Context, store: str | None, project: str | None, as_json: bool) -> None:
    """List the keys of the store, revoked ones too. Those in variables are not in it.

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
        click.echo("  ".join([key.id, f"{key.scope:<8}", key.name, f"made {_when(key.created_at)}", state, *limits]))
    if not found:
        click.echo("no keys in this store: `ratchet keys create --name NAME` makes one")


@keys.command()
@click.argument("key_id", metavar="ID")
@options.store_url
@options.project
@click.pass_context
def revoke(context: click.Context, key_id: str, store: str | None, project: str | None) -> None:
    """Revoke a key by its id. Running proxies refuse it within seconds; revoking the last one opens nothing.

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
