"""The `ratchet policies` commands: list, show, promote, roll back, hold, pin, export, import and fork versions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ratchet import options
from ratchet.output import format_time, plain, show, strip_control_characters

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.records import Decision, Policy, Prompt
    from ratchet.store.store import Store
    from ratchet.trainer.adapters.adapter_store import AdapterStore
    from ratchet.trainer.release.adopted import ForkTarget

_BY_HAND = click.option("--reason", required=True, help="Reason, recorded with the decision.")
_NAMED = re.compile(r"(?P<alias>[^@/\s]+)@(?P<version>\d+)")
_CARD = "readme"  # name of the plug-in's entry point
_FOLDER = click.Path(path_type=Path)


def _of_version(command: Callable[..., None]) -> Callable[..., None]:
    """Pass store, agent and version to a command that is given NAME@VERSION, NAME VERSION or NAME."""

    @functools.wraps(command)
    def run(store: Store, alias: str, version: int | None, **given: Any) -> None:
        name, _, number = alias.rpartition("@")
        if version is None and name and number.isdecimal():
            alias, version = name, int(number)
        options.check_alias(store, alias)
        command(store, alias, version, **given)

    arguments = click.argument("version", type=int, required=False)(options.with_store(run))
    return click.argument("alias", metavar="NAME[@VERSION]")(arguments)


@click.group()
def policies() -> None:
    """List, promote, roll back, hold, pin, export, import and fork the versions of a model.

    \b
    Example:
      ratchet policies list --model mail
    """


@policies.command("list")
@options.only_agent
@options.as_json
@options.with_store
def list_policies(store: Store, model: str | None) -> None:
    """List every version: state, adapter, prompt, and its newest decision.

    \b
    Example:
      ratchet policies list --model mail --json
    """
    from ratchet.store.reports.version_reports import list_versions

    options.check_alias(store, model)
    found = list_versions(store, model)
    show(
        [plain(one, decision=decision, trained_on_deleted=deleted) for one, decision, deleted in found],
        (line for one in found for line in _policy_lines(*one)),
        empty="no versions yet: nothing has run on this store",
    )


def _policy_lines(policy: Policy, decision: Decision | None, deleted: bool) -> Iterator[str]:
    share = f" {policy.share:.0%}" if policy.share else " pinned" if policy.pinned_at else ""
    where = "pruned" if policy.pruned_at else policy.adapter or "base model"
    where = f"{where}  prompt {policy.prompt_id}" if policy.prompt_id else where
    line = f"{policy.alias}@{policy.version}  {f'{policy.state}{share}':<11}  {format_time(policy.created_at)}  {where}"
    yield f"{line}  (trained on deleted trajectories)" if deleted else line
    if decision:
        yield f"    {_decided(decision)}"


@policies.command("show")
@options.as_json
@_of_version
def show_(store: Store, alias: str, version: int | None) -> None:
    """Show the decisions about a model or one version, newest first, with their evidence.

    Prompts of versions are printed first.

    \b
    Example:
      ratchet policies show mail 7
    """
    from ratchet.status import format_ramp
    from ratchet.store.reports.version_reports import describe_release, read_ramp_scores, read_release

    versions = store.policies.all(alias) if version is None else [store.policies.get(alias, version)]
    prompts = {str(one.version): store.prompts.get(one.prompt_id) for one in versions if one.prompt_id}
    decisions = store.decisions.decisions_of(alias, version)
    scores, release = read_ramp_scores(store, alias), read_release(store, alias)
    lines = [line for number, prompt in prompts.items() for line in _prompt_lines(prompt, f"{alias}@{number}")]
    lines += describe_release(release) if release and version is None else ()
    if scores:
        lines.append(f"ramp {alias}{format_ramp(scores)}")
    for decision in decisions:
        lines.append(f"{alias}@{decision.version}  {_decided(decision)}")
        for name, value in _leaves(decision.evidence):
            lines.append(f"    {name}: {value:g}" if isinstance(value, float) else f"    {name}: {value}")
    if not decisions:
        lines.append(f"no decision about {alias if version is None else f'{alias}@{version}'} yet")
    show({"decisions": decisions, "release": release, "ramp": scores, "prompts": prompts}, lines)


@policies.command()
@_BY_HAND
@click.option("--rejected", is_flag=True, help="Allow a version that was rejected.")
@_of_version
def promote(store: Store, alias: str, version: int | None, reason: str, rejected: bool) -> None:
    """Make a version live: the named one, else the one in its ramp, else the one that awaits approval.

    Proxies follow within a second. A version that was rejected needs --rejected; one that is unproven is promoted with
    a warning. Damaged files are refused.

    \b
    Example:
      ratchet policies promote mail --reason "read fifty answers, the gain is real"
    """
    from ratchet.store.states import PolicyAction

    adapters = _adapters(options.read_project_settings(click.get_current_context()))
    done = store.policies.promote_manually(
        alias, version, by=options.current_user(), reason=reason, rejected=rejected, verify=adapters.verify
    )
    before = store.decisions.decisions_of(alias, done.version)[1:2]  # the one before this promotion
    click.echo(f"{done.alias}@{done.version} is live")
    if before and before[0].action is PolicyAction.UNPROVEN:
        click.echo(f"warning: {done.alias}@{done.version} was unproven: {before[0].reason}", err=True)
    if done.adapter and not adapters.is_here(done.adapter):
        click.echo(f"its files were not checked: {done.adapter} is not on this machine", err=True)


@policies.command()
@_BY_HAND
@click.option("--to-anchor", is_flag=True, help="Go back to the anchor: the last version that was shown to be better.")
@click.option("--now", is_flag=True, help="Open trajectories of the rejected versions go on with the live one.")
@_of_version
def rollback(store: Store, alias: str, version: int | None, reason: str, to_anchor: bool, now: bool) -> None:
    """Roll back to a version and reject every later one; training continues from there.

    Without a version, it rejects the version in its ramp or the one that awaits approval, else it restores the
    previous live version. Open trajectories finish on the version that they began with; with --now they go on with
    the live one, and what is moved like this is not trained.

    \b
    Example:
      ratchet policies rollback mail 6 --reason "version 7 is rude"
      ratchet policies rollback mail --now --reason "it deletes mails"
    """
    if to_anchor:
        if version is not None:
            raise click.UsageError("--to-anchor names the version: leave out the other one")
        anchor = store.policies.serving_of(alias).anchor
        version = anchor.version if anchor else None
    rejected = store.policies.roll_back_manually(alias, version, by=options.current_user(), reason=reason, now=now)
    names = ", ".join(f"{policy.alias}@{policy.version}" for policy in rejected) or "nothing more"
    moved = "; open trajectories go on with it" if now else ""
    click.echo(f"{alias}@{store.policies.live()[alias].version} is live; rejected: {names}{moved}")


@policies.command()
@_BY_HAND
@_of_version
def hold(store: Store, alias: str, version: int | None, reason: str) -> None:
    """Hold a version: only a person promotes it. It is still rolled back if it is shown to be worse.

    Without a version, it is the one in its ramp, else the newest candidate.

    \b
    Example:
      ratchet policies hold mail --reason "until legal has read its answers"
    """
    held = store.policies.hold_manually(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{held.alias}@{held.version} ({held.state}) is held: promote it or roll it back")


@policies.command()
@_BY_HAND
@_of_version
def pin(store: Store, alias: str, version: int | None, reason: str) -> None:
    """Pin the live version: it serves all new trajectories, and nothing is released until `unpin`.

    Ramp and holdback end. Training goes on. Nothing is rolled back, not even by `rollback`.

    \b
    Example:
      ratchet policies pin mail --reason "audit this week"
    """
    pinned = store.policies.pin_manually(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{pinned.alias}@{pinned.version} is pinned")


@policies.command()
@_BY_HAND
@_of_version
def unpin(store: Store, alias: str, version: int | None, reason: str) -> None:
    """Unpin the live version: newer versions are released again.

    \b
    Example:
      ratchet policies unpin mail --reason "the audit is done"
    """
    released = store.policies.unpin(alias, version, by=options.current_user(), reason=reason)
    click.echo(f"{released.alias}@{released.version} is not pinned any more")


@policies.command()
@click.argument("policy", metavar="NAME[@VERSION] [VERSION]", nargs=-1, required=True)
@click.option("--merged", type=_FOLDER, metavar="DIR", help="Write the merged model into a new folder.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32"]),
    default="auto",
    help="Data type of the merged model: the base model's, or float32, which does not round.  [default: auto]",
)
@click.option("--adapter", type=_FOLDER, metavar="DIR", help="Copy the adapter into a new folder.")
@options.base_model
@options.with_project
def export(
    settings: Settings, store: Store, policy: Sequence[str], merged: Path | None, adapter: Path | None,
    dtype: Literal["auto", "float32"],
) -> None:  # fmt: skip
    """Export a version in Hugging Face's format.

    The plug-in model-card adds a card with the training data, the judge, the decisions and the gain with its interval.

    \b
    Example:
      ratchet policies export mail@7 --merged mail-7
    """
    from ratchet.status import versions
    from ratchet.supervisor.vllm_command import check_model
    from ratchet.trainer.learner.merged_model import export_adapter, export_merged
    from ratchet.trainer.user_code import MODEL_CARDS, load_plugin, missing_plugin_remedy, plugin_names

    if (folder := merged or adapter) is None or (merged and adapter):
        raise click.UsageError("give one of --merged DIR, for a whole model, and --adapter DIR, for the adapter alone")
    if folder.exists():
        raise click.UsageError(f"{folder} already exists: name a new folder")
    base = check_model(settings.base_model)
    name = "@".join(policy)  # `mail 7`, which the other commands accept, is mail@7
    found = _exportable(store, name)
    source = _adapters(settings).fetch(found.adapter or "", state=False)
    card, with_card = None, f"without a model card ({missing_plugin_remedy(MODEL_CARDS, _CARD)})"
    if _CARD in plugin_names(MODEL_CARDS):
        card = load_plugin(MODEL_CARDS, _CARD)(store, found, base, versions(), source, merged=merged is not None)
        with_card = f"with its card in {folder / 'README.md'}"
    if merged:
        export_merged(base, source, folder, card, dtype)
    else:
        export_adapter(source, folder, card)
    click.echo(f"{name}: {folder}, {with_card}")


def _exportable(store: Store, name: str) -> Policy:
    """Return the version, which has an adapter."""
    policy = _version(store, name, "NAME@VERSION or NAME VERSION")
    if policy.adapter is None:
        prompt = f" with the system prompt {policy.prompt_id}" if policy.prompt_id else ""
        raise click.UsageError(f"{name} has no adapter: it is the base model{prompt or ' as it is'}")
    if policy.pruned_at is not None:
        raise click.UsageError(f"{name} was pruned: its folder was deleted (trainer.keep_checkpoints)")
    return policy


def _version(store: Store, name: str, form: str = "NAME@VERSION") -> Policy:
    """Return a named version. Raises UsageError, RecordNotFound."""
    named = _NAMED.fullmatch(name)
    if named is None:
        raise click.UsageError(f"{name!r} is not a version: give {form}, such as mail@7")
    options.check_alias(store, named["alias"])
    return store.policies.get(named["alias"], int(named["version"]))


@policies.command()
@click.argument("source", metavar="NAME@VERSION")
@click.argument("target", metavar="AGENT")
@options.with_project
def fork(settings: Settings, store: Store, source: str, target: str) -> None:
    """Copy a version (adapter and optimizer state) into another agent as its candidate.

    The agent's trainer proves and releases it like any candidate, with the agent's own prompt, and trains on from it.
    The agent must have no undecided version. If the optimizer state was pruned, training starts with a new optimizer.

    \b
    Example:
      ratchet policies fork mail@7 support
    """
    from ratchet.trainer.release.adopted import fork as copy_version

    policy = _version(store, source)
    options.check_alias(store, target)
    made = copy_version(store, _adapters(settings), policy, _target(settings, target), by=options.current_user())
    click.echo(f"{target}@{made.candidate.version} is a candidate: a copy of {source}")
    if not made.with_state:
        click.echo(
            f"{source} has no learner's state any more (trainer.keep_optimizer_states): the optimizer of {target} "
            "starts over"
        )


@policies.command("import")
@click.argument("adapter", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.argument("agent", metavar="AGENT")
@options.with_project
def import_(settings: Settings, store: Store, adapter: Path, agent: str) -> None:
    """Copy a PEFT adapter that was trained elsewhere into an agent as its candidate.

    The agent's trainer proves, checks and releases it like any candidate, and trains on from it with a new optimizer.
    It must be plain LoRA with the learner's lora_r, lora_alpha and layers. The agent must have no undecided version.

    \b
    Example:
      ratchet policies import ./mail-lora mail
    """
    from ratchet.trainer.release.adopted import import_adapter

    target = _target(settings, agent)
    options.check_alias(store, agent)
    made = import_adapter(store, _adapters(settings), adapter, target, by=options.current_user())
    click.echo(f"{agent}@{made.version} is a candidate: a copy of {adapter}")


def _adapters(settings: Settings) -> AdapterStore:
    from ratchet.trainer.adapters.adapter_store import AdapterStore

    return AdapterStore(settings.state.adapter_cache, settings.adapters.max_cache_bytes)


def _target(settings: Settings, agent: str) -> ForkTarget:
    """Return where the agent's versions are and how they are trained."""
    from ratchet.trainer.release.adopted import ForkTarget

    learner = settings.for_agent(agent).trainer.learner
    place = settings.adapters.store
    versions = f"{place}/{agent}/checkpoints" if place else str(settings.state.checkpoints(agent))
    return ForkTarget(agent, versions, learner)


def _prompt_lines(prompt: Prompt, name: str) -> Iterator[str]:
    yield f"{name} has prompt {prompt.id} ({prompt.mode}, by {prompt.origin or 'unknown'})"
    texts = [("", prompt.text)] if prompt.text else []
    for family, text in [*texts, *sorted(prompt.families.items())]:
        if family:
            yield f"  for {family}:"
        yield from (f"    {line}" for line in strip_control_characters(text or "(unchanged)").splitlines())


def _decided(decision: Decision) -> str:
    return f"{decision.action} by {decision.decided_by}, {format_time(decision.decided_at)}: {decision.reason}"


def _leaves(evidence: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
