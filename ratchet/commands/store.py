"""The `ratchet store` commands: migrate, verify, export, prune and delete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.export import export
from ratchet.output import prints_json, progress_bars, show

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
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
@options.with_settings(options.read_project_settings)
def migrate(settings: Settings) -> None:
    """Create the tables in an empty database; a database of another schema is refused.

    \b
    Example:
      ratchet store migrate --store postgresql://ratchet@db/ratchet
    """
    from ratchet.store.db.engine import HEAD, connect, ensure_schema, schema_version

    engine = connect(settings.store_url)
    before = schema_version(engine)
    ensure_schema(engine)
    engine.dispose()
    click.echo(f"schema {HEAD}: nothing to do" if before else f"schema none -> {HEAD}")


@store.command()
@options.store_url
@options.project
@options.as_json
@options.with_settings(options.read_project_settings)
def verify(settings: Settings) -> int:
    """Recompute every hash and check every invariant. Exits with 1 if anything is wrong.

    \b
    Example:
      ratchet store verify --json
    """
    from ratchet.store.store import DAMAGE_ALARM
    from ratchet.store.verify import verify as verify_store

    with progress_bars() as report_progress:
        found = verify_store(settings.store_url, report_progress)
    if found.sound:
        with options.open_store_for_command(settings.store_url) as opened:
            opened.alarms.clear(DAMAGE_ALARM)
    lines = [f"{', '.join(f'{count} {table}' for table, count in found.rows.items())}: {found.count or 'no'} findings"]
    lines += [f"  {finding.row}: {finding.problem}\n    {finding.remedy}" for finding in found.findings]
    if found.count > len(found.findings):
        lines.append(f"  and {found.count - len(found.findings)} more")
    show({"rows": found.rows, "findings": found.findings, "count": found.count, "sound": found.sound}, lines)
    return 0 if found.sound else 1


@store.command()
@click.option(
    "--older-than", type=options.duration, required=True, metavar="AGE", help="Time since the last call: 30d, 12h."
)
@click.option("--keep-trained", is_flag=True, help="Keep trajectories that were trained on.")
@_dry_run
@options.as_json
@options.with_store
def prune(store: Store, older_than: float, keep_trained: bool, dry_run: bool) -> int:
    """Delete inactive trajectories and the records that belong only to them.

    \b
    Example:
      ratchet store prune --older-than 30d --keep-trained
    """
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    chosen = TrajectoryFilter(inactive_since=time.time() - older_than, trained=False if keep_trained else None)
    why = f"prune: inactive for {older_than / 86400:g} days" + (", not trained" if keep_trained else "")
    return _delete(store, [chosen], why, dry_run=dry_run)


@store.command()
@click.argument("trajectories", nargs=-1, metavar="[TRAJECTORY]...")
@click.option("--key", metavar="ID", help="Only trajectories of the API key with this id.")
@click.option("--task", help="Only trajectories of this task key.")
@click.option("--tag", help="Only trajectories with this tag.")
@click.option(
    "--before", "until", type=options.timestamp, metavar="TIME",
    help="Only trajectories opened before this time: 2026-11-21.",
)  # fmt: skip
@click.option(
    "--reject-policies", is_flag=True, help="Reject the versions trained on them; the newest other version serves."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_dry_run
@options.as_json
@options.with_store
def delete(
    store: Store, trajectories: tuple[str, ...], reject_policies: bool, yes: bool, dry_run: bool, **given: Any
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

    if not trajectories and all(value is None for value in given.values()):
        raise click.UsageError("name a trajectory, or give --key, --task, --tag or --before")
    chosen = [TrajectoryFilter(id=name, **given) for name in trajectories] or [TrajectoryFilter(**given)]
    # The names of the options without their values: a task or a tag may name a person.
    named = [f"{len(trajectories)} by id"] if trajectories else []
    why = "delete: " + ", ".join([*named, *(f"by {name}" for name, value in given.items() if value is not None)])
    if not dry_run and not yes:
        click.confirm(f"delete {_count(store, *chosen)} trajectories permanently?", abort=True, err=True)
    unknown = [
        f"no trajectory {one.id}, or other options exclude it"
        for one in chosen if one.id is not None and not _count(store, one)
    ]  # fmt: skip
    key = given["key"]
    # Keys of variables are not among the store's keys.
    if (
        key is not None
        and key not in {one.id for one in store.keys.all()}
        and not _count(store, TrajectoryFilter(key=key))
    ):
        unknown.append(f"no key {key} in this store, and no trajectory of it; `ratchet keys list` shows the ids")
    status = _delete(store, chosen, why, dry_run=dry_run)
    if reject_policies and not dry_run:
        _reject(store)
    for problem in unknown:
        click.echo(f"ratchet: {problem}", err=True)
    return 1 if unknown else status


def _count(store: Store, *chosen: TrajectoryFilter) -> int:
    return sum(store.deletions.count(one) for one in chosen)


def _reject(store: Store) -> None:
    """Reject every version that was trained on deleted trajectories."""
    from ratchet.store.deletion import reject_affected

    affected = store.deletions.versions_with_deleted_data()
    for alias, rejected in reject_affected(store.policies, affected, by=options.current_user()).items():
        if not prints_json():
            names = ", ".join(f"{alias}@{policy.version}" for policy in rejected)
            click.echo(f"rejected: {names}; {alias}@{store.policies.live()[alias].version} is live")


def _delete(store: Store, chosen: list[TrajectoryFilter], why: str, *, dry_run: bool) -> int:
    """Delete the chosen trajectories, or show what would be deleted; return the exit code."""
    if dry_run:
        count = _count(store, *chosen)
        policies = list(dict.fromkeys(policy for one in chosen for policy in store.deletions.versions_trained_on(one)))
        lines = [f"{count} trajectories would be deleted", *_policy_lines(policies)]
        show({"trajectory_count": count, "policies": policies}, lines)
        return 0
    done = [_delete_with_bar(store, one, why) for one in chosen]
    count = sum(one.trajectory_count for one in done)
    store.audit.record_command(options.current_user(), "store delete", {"reason": why, "trajectories": str(count)})
    show(done, _deletion_lines(done))
    return 1 if any(one.unswept_messages for one in done) else 0


def _delete_with_bar(store: Store, chosen: TrajectoryFilter, why: str) -> Deletion:
    total = _count(store, chosen)
    with progress_bars() as report_progress:
        return store.deletions.delete(chosen, why, lambda count: report_progress("deleting", count, total))


def _deletion_lines(done: list[Deletion]) -> Iterator[str]:
    yield (
        f"{sum(one.trajectory_count for one in done)} trajectories deleted, with "
        f"{sum(one.call_count for one in done)} calls and "
        f"{sum(one.messages for one in done)} messages and tool lists that nothing else uses"
    )
    if dropped := sum(one.groups_dropped for one in done):
        yield f"{dropped} groups lost a member before training and were dropped"
    if waited := sum(one.feedback for one in done):
        yield f"{waited} pieces of feedback that waited for a call deleted"
    yield from _policy_lines([policy for one in done for policy in one.policies])
    if unswept_messages := max((one.unswept_messages for one in done), default=0):
        yield (
            f"{unswept_messages} messages wait for a proxy that has not shipped its journal (/health/backlog): "
            "run `ratchet store prune --older-than 9999d` when it has"
        )


def _policy_lines(policies: list[AffectedVersion]) -> Iterator[str]:
    """Yield the versions whose adapters keep what they learned."""
    kept = {(policy.alias, policy.version): policy for policy in policies}
    if not kept:
        yield "no policy was trained on them"
        return
    yield (
        f"{len(kept)} policy versions keep what they learned from them, until their adapters are deleted "
        "(`ratchet store delete --reject-policies` takes them out of service):"
    )
    for policy in list(kept.values())[:_SHOWN]:
        how = "trained on them" if policy.trained_directly else "based on such a version"
        yield f"  {policy.alias}@{policy.version}  {policy.state:<9}  {how}  {policy.adapter or ''}"
    if len(kept) > _SHOWN:
        yield f"  and {len(kept) - _SHOWN} more; --json lists them all"
