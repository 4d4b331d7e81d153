"""`ratchet audit`: what operators read and changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratchet import options
from ratchet.options import Timestamp
from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.operation_records import AuditEntry


@click.command()
@click.option("--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Maximum number.")
@click.option("--key", metavar="ID", help="Only entries of the operator key with this id.")
@click.option("--since", type=Timestamp(), metavar="TIME", help="Only entries at this time or later: 2026-11-21.")
@click.option("--changes", is_flag=True, help="Only changes, no reads.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def audit(
    context: click.Context,
    limit: int,
    key: str | None,
    since: float | None,
    changes: bool,
    store: str | None,
    project: str | None,
    as_json: bool,
) -> None:
    """Show what operators read and changed, newest first: through the operator API, or by commands on keys and data.

    Decisions about versions by command are in `ratchet policies show`.

    \b
    Example:
      ratchet audit --changes --since 2026-11-21
    """
    import msgspec

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.audit.page(limit, key=key, since=since, changes=changes)
    if as_json:
        options.print_json([msgspec.structs.asdict(entry) for entry in found])
        return
    for entry in found:
        click.echo(strip_control_characters(_line(entry)))
    if not found:
        click.echo("nothing yet: no operator has read or changed anything")


def _line(entry: AuditEntry) -> str:
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    who = f"{entry.actor} ({entry.key_id})" if entry.key_id else entry.actor
    target = " ".join(f"{name}={value}" for name, value in entry.target.items())
    status = "outcome unknown" if entry.status is None else str(entry.status or "done")
    times = f"{entry.count} times" if entry.count > 1 else ""
    parts = [at, who, entry.client or "", entry.method, entry.route, target, status, times]
    return "  ".join(part for part in parts if part)
