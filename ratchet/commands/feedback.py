"""The `ratchet feedback` commands: add, list and export. They need the store and no running proxy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.records import Transcript
    from ratchet.store.store import Store

_PAGE = 1000


@click.group()
def feedback() -> None:
    """Add, list and export feedback on answers.

    \b
    Example:
      ratchet feedback add --response chatcmpl-8d1f --value up --comment "just what I needed"
    """


@feedback.command()
@click.option("--response", metavar="ID", help="The `id` of an answer, as its client received it.")
@click.option("--call", metavar="ID", help="The id of a call.")
@click.option("--trajectory", metavar="ID", help="The id of a trajectory.")
@click.option("--value", metavar="VALUE", help="A number, true, false, up or down.")
@click.option("--comment", default="", help="Comment.")
@click.option("--demonstration", help="The correct answer.")
@click.option("--end-user", metavar="NAME", help="Who gives the feedback.  [default: the operator]")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def add(
    context: click.Context,
    /,
    response: str | None,
    call: str | None,
    trajectory: str | None,
    value: str | None,
    comment: str,
    demonstration: str | None,
    end_user: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Add feedback on a trajectory, a call or an answer.

    \b
    Example:
      ratchet feedback add --trajectory traj_01J8 --value 0.5 --end-user ann
    """
    import time

    import msgspec

    from ratchet.proxy.coordinator.keys.key_cache import OPERATOR
    from ratchet.proxy.coordinator.operator_api.feedback import parse_feedback

    named: dict[str, Any] = {"response_id": response, "call_id": call, "trajectory_id": trajectory}
    body = named | {"comment": comment, "demonstration": demonstration, "end_user": end_user, "value": _value(value)}
    entry = parse_feedback(msgspec.json.encode(body)).record(OPERATOR, None, time.time())
    with options.open_project_store(context, **given) as store:
        place = store.feedback.target_of(entry)
        if place is None:
            raise click.ClickException(f"the store holds no {entry.kind} {entry.target!r}")
        store.feedback.add([entry])
        trained = store.lineage.versions_of([place[0]]).get(place[0], ())
    if as_json:
        options.print_json({"id": entry.id, "trajectory_id": place[0], "call_id": place[1], "trained": trained})
        return
    click.echo(f"{entry.id}: feedback on {place[0]}" + (f", which trained {', '.join(trained)}" if trained else ""))


@feedback.command("list")
@click.option("--trajectory", metavar="ID", help="Only feedback on this trajectory.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_feedback(context: click.Context, /, trajectory: str | None, limit: int, as_json: bool, **given: Any) -> None:
    """List feedback, newest first, and the policies trained on its trajectories.

    \b
    Example:
      ratchet feedback list --trajectory traj_01J8
    """
    import msgspec

    with options.open_project_store(context, **given) as store:
        found = store.feedback.page(limit, trajectory=trajectory)
        trained = store.lineage.versions_of(list({entry.trajectory_id for entry in found if entry.trajectory_id}))
    if as_json:
        options.print_json(
            [msgspec.structs.asdict(s) | {"trained": trained.get(s.trajectory_id or "", ())} for s in found]
        )
        return
    for entry in found:
        click.echo(line(entry, trained.get(entry.trajectory_id or "", ())))
    if not found:
        click.echo("no feedback in this store: agents send it to POST /api/feedback (docs/feedback.md)")


@feedback.command()
@click.option(
    "--format",
    "layout",
    type=click.Choice(["unpaired", "paired", "demonstrations"]),
    required=True,
    help="unpaired: liked or not (KTO); paired: best and worst of a group (DPO); demonstrations (SFT).",
)
@click.option("--out", type=click.Path(dir_okay=False, writable=True), required=True, help="JSON Lines file to write.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Maximum number to read.",
)
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def export(context: click.Context, /, layout: str, out: str, limit: int, as_json: bool, **given: Any) -> None:
    """Export preferences as rows in the formats of TRL's trainers.

    \b
    Example:
      ratchet feedback export --format unpaired --out thumbs.jsonl
    """
    import msgspec

    from ratchet.trainer.rows import preference_rows

    settings = options.read_agent_settings(context, given)
    alias, held_out = settings.model, Counter[str]()
    with options.open_store_for_command(settings.store_url) as store:
        if layout == "paired":
            found = preference_rows.pairs(_judged_groups(store, alias, limit, options.held_out_share(settings)))
        else:
            make = preference_rows.unpaired if layout == "unpaired" else preference_rows.demonstrations
            spoken = _with_feedback(store, alias, limit)
            found = make(_learnable(spoken, options.held_out_share(settings), held_out), store.trajectories.messages_to)
    if held_out:
        found.skipped["of a held-out task"] = held_out.total()
    Path(out).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in found.rows))
    if as_json:
        options.print_json({"rows": len(found.rows), "skipped": dict(found.skipped)})
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.skipped.items()))
    click.echo(f"{out}: {len(found.rows)} rows" + (f"; skipped: {reasons}" if reasons else ""))


def _learnable(found: Iterable[Transcript], share: float, left_out: Counter[str]) -> Iterator[Transcript]:
    """Yield the trajectories whose tasks are not held out for evaluation; count the others."""
    from ratchet.trainer.tasks import is_set_aside

    for one in found:
        if is_set_aside(one.trajectory, share):
            left_out["held_out"] += 1
        else:
            yield one


def _with_feedback(store: Store, alias: str, limit: int) -> Iterator[Transcript]:
    """Yield the trajectories that the newest feedback refers to, each once."""
    seen: set[str] = set()
    page = store.feedback.page(min(limit, _PAGE))
    while page and limit > 0:
        limit -= len(page)
        for name in dict.fromkeys(entry.trajectory_id for entry in page if entry.trajectory_id):
            if name not in seen and store.trajectories.get(name).alias == alias:
                yield store.trajectories.read(name)
            seen.add(name)
        page = store.feedback.page(min(limit, _PAGE), before=page[-1].id) if limit > 0 else []


def _judged_groups(store: Store, alias: str, limit: int, held_out: float) -> Iterator[list[tuple[Transcript, float]]]:
    """Yield the members of the newest groups with their scores, without held-out tasks."""
    from ratchet.trainer.tasks import is_held_out

    page = store.groups.page(min(limit, _PAGE))
    while page and limit > 0:
        limit -= len(page)
        for group in page:
            wanted = group.alias == alias and not is_held_out(group.key, held_out)
            verdicts = store.groups.verdicts(group.members) if wanted else {}
            scores = {name: verdict.score for name, verdict in verdicts.items() if verdict.score is not None}
            if scores:
                yield [(store.trajectories.read(name), score) for name, score in scores.items()]
        page = store.groups.page(min(limit, _PAGE), before=page[-1].id) if limit > 0 else []


def line(entry: Any, trained: tuple[str, ...]) -> str:
    """Format feedback as a line, without control characters."""
    from datetime import UTC, datetime

    parts = [
        datetime.fromtimestamp(entry.given_at, UTC).strftime("%Y-%m-%d %H:%M"),
        "     -" if entry.value is None else f"{entry.value:>6g}",
        entry.trajectory_id or f"waits for {entry.kind} {entry.target}",
        entry.source,
        entry.comment,
        "(with a demonstration)" if entry.demonstration else "",
        f"trained {', '.join(trained)}" if trained else "",
    ]
    return "  ".join(strip_control_characters(part).replace("\n", " ") for part in parts if part)


def _value(text: str | None) -> float | bool | str | None:
    """Convert the text of --value."""
    if text is None or text in ("up", "down"):
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number, true, false, up or down", param_hint="--value") from None
