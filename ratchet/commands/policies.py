"""The `ratchet policies` commands: list, show, promote, roll back, hold, pin, export, import and fork versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.policies_export import export
from ratchet.commands.policies_fork import fork
from ratchet.commands.policies_import import import_
from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.records import Decision, Policy, Prompt

_NAMED = click.argument("alias", metavar="NAME[@VERSION]")
_VERSION = click.argument("version", type=int, required=False)
_BY_HAND = click.option("--reason", required=True, help="Reason, recorded with the decision.")


def _decision(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments and options of a person's decision about a version."""
    for add in (click.pass_context, options.project, options.store_url, _BY_HAND, _VERSION, _NAMED):
        command = add(command)
    return command


@click.group()
def policies() -> None:
    """List, promote, roll back, hold, pin, export, import and fork the versions of a model.

    \b
    Example:
      ratchet policies list --model mail
    """


@policies.command("list")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_policies(
    context: click.Context, model: str | None, store: str | None, project: str | None, as_json: bool
) -> None:
    """List every version: state, adapter, prompt, and its newest decision.

    \b
    Example:
      ratchet policies list --model mail --json
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, model)
        found, decided = opened.policies.all(model), opened.decisions.latest(model)
        learnt = {(one.alias, one.version) for one in opened.deletions.versions_with_deleted_data()}
    if as_json:
        options.print_json(
            [
                _plain(one)
                | _last_decision(decided.get((one.alias, one.version)))
                | {"trained_on_deleted": (one.alias, one.version) in learnt}
                for one in found
            ]
        )
        return
    for policy in found:
        deleted = "  (trained on deleted trajectories)" if (policy.alias, policy.version) in learnt else ""
        click.echo(_line(policy) + deleted)
        if decision := decided.get((policy.alias, policy.version)):
            click.echo(f"    {_decided(decision)}")
    if not found:
        click.echo("no versions yet: nothing has run on this store")


@policies.command()
@_NAMED
@_VERSION
@options.store_url
@options.project
@options.as_json
@click.pass_context
def show(
    context: click.Context, alias: str, version: int | None, store: str | None, project: str | None, as_json: bool
) -> None:
    """Show the decisions about a model or one version, newest first, with their evidence.

    Prompts of versions are printed first.

    \b
    Example:
      ratchet policies show mail 7
    """
    from ratchet.status import format_ramp
    from ratchet.store.reports.version_reports import describe_release, read_ramp_scores, read_release

    alias, version = _named(alias, version)
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, alias)
        versions = opened.policies.all(alias) if version is None else [opened.policies.get(alias, version)]
        prompts = {one.version: opened.prompts.get(one.prompt_id) for one in versions if one.prompt_id}
        decisions = opened.decisions.decisions_of(alias, version)
        scores, release = read_ramp_scores(opened, alias), read_release(opened, alias)
    if as_json:
        prompt_records = {str(number): _plain(prompt) for number, prompt in prompts.items()}
        options.print_json(
            {
                "decisions": [_plain(decision) for decision in decisions],
                "release": release,
                "ramp": scores,
                "prompts": prompt_records,
            }
        )
        return
    for number, prompt in prompts.items():
        click.echo("\n".join(_prompt_lines(prompt, f"{alias}@{number}")))
    for line in describe_release(release) if release and version is None else ():
        click.echo(line)
    if scores:
        click.echo(f"ramp {alias}{format_ramp(scores)}")
    for decision in decisions:
        click.echo(f"{alias}@{decision.version}  {_decided(decision)}")
        for name, value in _leaves(decision.evidence):
            click.echo(f"    {name}: {value:g}" if isinstance(value, float) else f"    {name}: {value}")
    if not decisions:
        name = alias if version is None else f"{alias}@{version}"
        click.echo(f"no decision about {name} yet")


@policies.command()
@_NAMED
@_VERSION
@_BY_HAND
@click.option("--rejected", is_flag=True, help="Allow a version that was rejected.")
@options.store_url
@options.project
@click.pass_context
def promote(
    context: click.Context,
    /,
    alias: str,
    version: int | None,
    reason: str,
    rejected: bool,
    store: str | None,
    project: str | None,
) -> None:
    """Make a version live: the named one, else the one in its ramp, else the one that awaits approval.

    Proxies follow within a second. A version that was rejected needs --rejected; one that is unproven is promoted with
    a warning. Damaged files are refused.

    \b
    Example:
      ratchet policies promote mail --reason "read fifty answers, the gain is real"
    """
    from ratchet.store.states import PolicyAction
    from ratchet.trainer.adapters.adapter_store import AdapterStore

    alias, version = _named(alias, version)
    settings = options.read_project_settings(context, {"store": store, "project": project})
    adapters = AdapterStore(settings.state.adapter_cache, settings.adapters.max_cache_bytes)
    with options.open_store_for_command(settings.store_url) as opened:
        options.check_alias(opened, alias)
        done = opened.policies.promote_manually(
            alias, version, by=options.current_user(), reason=reason, rejected=rejected, verify=adapters.verify
        )
        before = opened.decisions.decisions_of(alias, done.version)[1:2]  # the one before this promotion
    click.echo(f"{done.alias}@{done.version} is live")
    if before and before[0].action is PolicyAction.UNPROVEN:
        click.echo(f"warning: {done.alias}@{done.version} was unproven: {before[0].reason}", err=True)
    if done.adapter and not adapters.is_here(done.adapter):
        click.echo(f"its files were not checked: {done.adapter} is not on this machine", err=True)


@policies.command()
@_NAMED
@_VERSION
@_BY_HAND
@click.option("--to-anchor", is_flag=True, help="Go back to the anchor: the last version that was shown to be better.")
@click.option("--now", is_flag=True, help="Open trajectories of the rejected versions go on with the live one.")
@options.store_url
@options.project
@click.pass_context
def rollback(
    context: click.Context,
    /,
    alias: str,
    version: int | None,
    reason: str,
    to_anchor: bool,
    now: bool,
    store: str | None,
    project: str | None,
) -> None:
    """Roll back to a version and reject every later one; training continues from there.

    Without a version, it rejects the version in its ramp or the one that awaits approval, else it restores the
    previous live version. Open trajectories finish on the version that they began with; with --now they go on with
    the live one, and what is moved like this is not trained.

    \b
    Example:
      ratchet policies rollback mail 6 --reason "version 7 is rude"
      ratchet policies rollback mail --now --reason "it deletes mails"
    """
    alias, version = _named(alias, version)
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, alias)
        if to_anchor:
            if version is not None:
                raise click.UsageError("--to-anchor names the version: leave out the other one")
            anchor = opened.policies.serving_of(alias).anchor
            version = anchor.version if anchor else None
        rejected = opened.policies.roll_back_manually(alias, version, by=options.current_user(), reason=reason, now=now)
        live = opened.policies.live()[alias]
    names = ", ".join(f"{policy.alias}@{policy.version}" for policy in rejected) or "nothing more"
    moved = "; open trajectories go on with it" if now else ""
    click.echo(f"{alias}@{live.version} is live; rejected: {names}{moved}")


@policies.command()
@_decision
def hold(
    context: click.Context, alias: str, version: int | None, reason: str, store: str | None, project: str | None
) -> None:
    """Hold a version: only a person promotes it. It is still rolled back if it is shown to be worse.

    Without a version, it is the one in its ramp, else the newest candidate.

    \b
    Example:
      ratchet policies hold mail --reason "until legal has read its answers"
    """
    alias, version = _named(alias, version)
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, alias)
        held = opened.policies.hold_manually(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{held.alias}@{held.version} ({held.state}) is held: promote it or roll it back")


@policies.command()
@_decision
def pin(
    context: click.Context, alias: str, version: int | None, reason: str, store: str | None, project: str | None
) -> None:
    """Pin the live version: it serves all new trajectories, and nothing is released until `unpin`.

    Ramp and holdback end. Training goes on. Nothing is rolled back, not even by `rollback`.

    \b
    Example:
      ratchet policies pin mail --reason "audit this week"
    """
    alias, version = _named(alias, version)
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, alias)
        pinned = opened.policies.pin_manually(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{pinned.alias}@{pinned.version} is pinned")


@policies.command()
@_decision
def unpin(
    context: click.Context, alias: str, version: int | None, reason: str, store: str | None, project: str | None
) -> None:
    """Unpin the live version: newer versions are released again.

    \b
    Example:
      ratchet policies unpin mail --reason "the audit is done"
    """
    alias, version = _named(alias, version)
    with options.open_project_store(context, store=store, project=project) as opened:
        options.check_alias(opened, alias)
        released = opened.policies.unpin(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{released.alias}@{released.version} is not pinned any more")


policies.add_command(export)
policies.add_command(fork)
policies.add_command(import_)


def _named(alias: str, version: int | None) -> tuple[str, int | None]:
    """Return alias and version of `mail 7`, `mail@7` or `mail`."""
    name, _, number = alias.rpartition("@")
    return (name, int(number)) if version is None and name and number.isdecimal() else (alias, version)


def _line(policy: Policy) -> str:
    share = f" {policy.share:.0%}" if policy.share else " pinned" if policy.pinned_at else ""
    where = "pruned" if policy.pruned_at else policy.adapter or "base model"
    where = f"{where}  prompt {policy.prompt_id}" if policy.prompt_id else where
    return f"{policy.alias}@{policy.version}  {f'{policy.state}{share}':<11}  {_when(policy.created_at)}  {where}"


def _prompt_lines(prompt: Prompt, name: str) -> Iterator[str]:
    """Yield the lines of a version's prompt, without control characters: a language model may have written it."""
    yield f"{name} has prompt {prompt.id} ({prompt.mode}, by {strip_control_characters(prompt.origin) or 'unknown'})"
    texts = [("", prompt.text)] if prompt.text else []
    for family, text in [*texts, *sorted(prompt.families.items())]:
        if family:
            yield f"  for {strip_control_characters(family)}:"
        yield from (f"    {line}" for line in strip_control_characters(text or "(unchanged)").splitlines())


def _decided(decision: Decision) -> str:
    return f"{decision.action} by {decision.decided_by}, {_when(decision.decided_at)}: {decision.reason}"


def _when(moment: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _plain(record: Any) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def _last_decision(decision: Decision | None) -> dict[str, Any]:
    return {"decision": _plain(decision) if decision else None}


def _leaves(evidence: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
