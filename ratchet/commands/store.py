"""The `ratchet store` commands: migrate, verify, export, prune and delete."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.export import export
from ratchet.options import Duration, Timestamp

if TYPE_CHECKING:
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter
    from ratchet.store.operation_records import AffectedVersion, Deletion
    from ratchet.store.store import Store

_SHOWN = 20


_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be deleted; delete nothing.")


@click.group()
def store() -> None:
    """Migrate, verify, export and prune the store.

    \b
    Example:
      ratchet store verify --store mail.db
    """


store.add_command(export)


@store.command()
@options.store_url
@options.project
@click.pass_context
def migrate(context: click.Context, store: str | None, project: str | None) -> None:
    """Create the tables in an empty database; a database of another schema is refused.

    \b
    Example:
      ratchet store migrate --store postgresql://ratchet@db/ratchet
    """
    from ratchet.store.db.engine import HEAD, connect, ensure_schema, schema_version

    engine = connect(store_url_of(context, store, project))
    before = schema_version(engine)
    ensure_schema(engine)
    engine.dispose()
    click.echo(f"schema {HEAD}: nothing to do" if before else f"schema none -> {HEAD}")


@store.command()
@options.store_url
@options.project
@options.as_json
@click.pass_context
def verify(context: click.Context, store: str | None, project: str | None, as_json: bool) -> int:
    """Recompute every hash and check every invariant. Exits with 1 if anything is wrong.

    \b
    Example:
      ratchet store verify --json
    """
    import msgspec

    from ratchet.output.terminal import progress_bars
    from ratchet.store.store import DAMAGE_ALARM, open_store
    from ratchet.store.verify import verify as verify_store

    url = store_url_of(context, store, project)
    with progress_bars() as report_progress:
        found = verify_store(url, report_progress)
    if found.sound:
        with closing(open_store(url, create=False)) as opened:
            opened.alarms.clear(DAMAGE_ALARM)
    if as_json:
        findings = [msgspec.structs.asdict(finding) for finding in found.findings]
        options.print_json({"rows": found.rows, "findings": findings, "count": found.count, "sound": found.sound})
    else:
        checked = ", ".join(f"{count} {table}" for table, count in found.rows.items())
        click.echo(f"{checked}: {found.count or 'no'} findings")
        for finding in found.findings:
            click.echo(f"  {finding.row}: {finding.problem}\n    {finding.remedy}")
        if found.count > len(found.findings):
            click.echo(f"  and {found.count - len(found.findings)} more")
    return 0 if found.sound else 1


@store.command()
@click.option("--older-than", type=Duration(), required=True, metavar="AGE", help="Time since the last call: 30d, 12h.")
@click.option("--keep-trained", is_flag=True, help="Keep trajectories that were trained on.")
@_dry_run
@options.store_url
@options.project
@options.as_json
@click.pass_context
def prune(
    context: click.Context,
    older_than: float,
    keep_trained: bool,
    dry_run: bool,
    store: str | None,
    project: str | None,
    as_json: bool,
) -> int:
    """Delete inactive trajectories and the records that belong only to them.

    \b
    Example:
      ratchet store prune --older-than 30d --keep-trained
    """
    import time

    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    chosen = TrajectoryFilter(inactive_since=time.time() - older_than, trained=False if keep_trained else None)
    why = f"prune: inactive for {older_than / 86400:g} days" + (", not trained" if keep_trained else "")
    with options.open_project_store(context, store=store, project=project) as opened:
        return _delete(opened, [chosen], why, dry_run=dry_run, as_json=as_json)


@store.command()
@click.argument("trajectories", nargs=-1, metavar="[TRAJECTORY]...")
@click.option("--key", metavar="ID", help="Only trajectories of the API key with this id.")
@click.option("--task", help="Only trajectories of this task key.")
@click.option("--tag", help="Only trajectories with this tag.")
@click.option(
    "--before", type=Timestamp(), metavar="TIME", help="Only trajectories opened before this time: 2026-11-21."
)
@click.option(
    "--reject-policies", is_flag=True, help="Reject the versions trained on them; the newest other version serves."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_dry_run
@options.store_url
@options.project
@options.as_json
@click.pass_context
def delete(
    context: click.Context,
    trajectories: tuple[str, ...],
    key: str | None,
    task: str | None,
    tag: str | None,
    before: float | None,
    reject_policies: bool,
    yes: bool,
    dry_run: bool,
    store: str | None,
    project: str | None,
    as_json: bool,
) -> int:
    """Delete trajectories and everything derived from them: by id, or all that match every option.

    With --key or --before alone, feedback that waits for a call is deleted too. Adapters keep what they
    learned: the command lists the versions trained on the trajectories, and `ratchet policies list` marks them.
    --reject-policies rejects these versions.

    \b
    Example:
      ratchet store delete --key key_01J8 --dry-run
    """
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    given = {"key": key, "task": task, "tag": tag, "until": before}
    if not trajectories and all(value is None for value in given.values()):
        raise click.UsageError("name a trajectory, or give --key, --task, --tag or --before")
    chosen = [TrajectoryFilter(id=name, **given) for name in trajectories] or [TrajectoryFilter(**given)]  # type: ignore[arg-type]
    # The names of the options without their values: a task or a tag may name a person.
    named = [f"{len(trajectories)} by id"] if trajectories else []
    why = "delete: " + ", ".join([*named, *(f"by {name}" for name, value in given.items() if value is not None)])
    with options.open_project_store(context, store=store, project=project) as opened:
        if not dry_run and not yes:
            count = sum(opened.deletions.count(one) for one in chosen)
            click.confirm(f"delete {count} trajectories permanently?", abort=True, err=True)
        unknown = [
            f"no trajectory {one.id}, or other options exclude it"
            for one in chosen if one.id is not None and not opened.deletions.count(one)
        ]  # fmt: skip
        if key is not None and not _is_key(opened, key):
            unknown.append(f"no key {key} in this store, and no trajectory of it; `ratchet keys list` shows the ids")
        status = _delete(opened, chosen, why, dry_run=dry_run, as_json=as_json)
        if reject_policies and not dry_run:
            _reject(opened, as_json=as_json)
        for problem in unknown:
            click.echo(f"ratchet: {problem}", err=True)
        return 1 if unknown else status


def _is_key(store: Store, key_id: str) -> bool:
    """Return whether the store has this key or a trajectory of it; keys of variables are not among its keys."""
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    return any(key.id == key_id for key in store.keys.all()) or store.deletions.count(TrajectoryFilter(key=key_id)) > 0


def _reject(store: Store, *, as_json: bool) -> None:
    """Reject every version that was trained on deleted trajectories."""
    from ratchet.store.deletion import reject_affected

    for alias, rejected in reject_affected(
        store.policies, store.deletions.versions_with_deleted_data(), by=options.current_user()
    ).items():
        if not as_json:
            live = store.policies.live()[alias]
            names = ", ".join(f"{alias}@{policy.version}" for policy in rejected)
            click.echo(f"rejected: {names}; {alias}@{live.version} is live")


def store_url_of(context: click.Context, store: str | None, project: str | None) -> str:
    """Return the store URL for a command."""
    return options.read_project_settings(context, {"store": store, "project": project}).store_url


def _delete(store: Store, chosen: list[TrajectoryFilter], why: str, *, dry_run: bool, as_json: bool) -> int:
    if dry_run:
        count = sum(store.deletions.count(one) for one in chosen)
        policies = [policy for one in chosen for policy in store.deletions.versions_trained_on(one)]
        _print_plan(count, list(dict.fromkeys(policies)), as_json)
        return 0
    done = [_with_bar(store, one, why) for one in chosen]
    count = sum(one.trajectory_count for one in done)
    store.audit.record_command(options.current_user(), "store delete", {"reason": why, "trajectories": str(count)})
    if as_json:
        import msgspec

        options.print_json(
            [msgspec.structs.asdict(one) | {"policies": list(map(_plain, one.policies))} for one in done]
        )
    else:
        _print_deletions(done)
    return 1 if any(one.unswept_messages for one in done) else 0


def _with_bar(store: Store, chosen: TrajectoryFilter, why: str) -> Deletion:
    from ratchet.output.terminal import progress_bars

    total = store.deletions.count(chosen)
    with progress_bars() as report_progress:
        return store.deletions.delete(chosen, why, lambda count: report_progress("deleting", count, total))


def _print_plan(count: int, policies: list[AffectedVersion], as_json: bool) -> None:
    if as_json:
        options.print_json({"trajectory_count": count, "policies": list(map(_plain, policies))})
        return
    click.echo(f"{count} trajectories would be deleted")
    _print_policies(policies)


def _print_deletions(done: list[Deletion]) -> None:
    deleted = sum(one.trajectory_count for one in done)
    click.echo(
        f"{deleted} trajectories deleted, with {sum(one.call_count for one in done)} calls and "
        f"{sum(one.messages for one in done)} messages and tool lists that nothing else uses"
    )
    if dropped := sum(one.groups_dropped for one in done):
        click.echo(f"{dropped} groups lost a member before training and were dropped")
    if waited := sum(one.feedback for one in done):
        click.echo(f"{waited} pieces of feedback that waited for a call deleted")
    _print_policies([policy for one in done for policy in one.policies])
    if unswept_messages := max((one.unswept_messages for one in done), default=0):
        click.echo(
            f"{unswept_messages} messages wait for a proxy that has not shipped its journal (/health/backlog): "
            "run `ratchet store prune --older-than 9999d` when it has"
        )


def _print_policies(policies: list[AffectedVersion]) -> None:
    """List the versions whose adapters keep what they learned."""
    kept = {(policy.alias, policy.version): policy for policy in policies}
    if not kept:
        click.echo("no policy was trained on them")
        return
    click.echo(
        f"{len(kept)} policy versions keep what they learned from them, until their adapters are deleted "
        "(`ratchet store delete --reject-policies` takes them out of service):"
    )
    for policy in list(kept.values())[:_SHOWN]:
        how = "trained on them" if policy.trained_directly else "based on such a version"
        click.echo(f"  {policy.alias}@{policy.version}  {policy.state:<9}  {how}  {policy.adapter or ''}")
    if len(kept) > _SHOWN:
        click.echo(f"  and {len(kept) - _SHOWN} more; --json lists them all")


def _plain(policy: AffectedVersion) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(policy)
