"""The commands for feedback by hand: add, list, export. They need the store and no running proxy."""

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
    """Say how good an answer was, and list what people said.

    \b
    Example:
      ratchet feedback add --response chatcmpl-8d1f --value up --comment "just what I needed"
    """


@feedback.command()
@click.option("--response", metavar="ID", help="The answer's `id`, as its client got it.")
@click.option("--call", metavar="ID", help="A call.")
@click.option("--trajectory", metavar="ID", help="A whole trajectory.")
@click.option("--value", metavar="VALUE", help="A number, true, false, up or down.")
@click.option("--comment", default="", help="Words about it.")
@click.option("--demonstration", help="The answer that would have been right.")
@click.option("--end-user", metavar="NAME", help="Who says it; without it, the operator.")
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
    """Say how good a trajectory, a call or an answer was.

    \b
    Example:
      ratchet feedback add --trajectory traj_01J8 --value 0.5 --end-user ann
    """
    import time

    import msgspec

    from ratchet.proxy.coordinator.keys.caller import OPERATOR
    from ratchet.proxy.coordinator.operator_api.feedback import parse_feedback

    named: dict[str, Any] = {"response_id": response, "call_id": call, "trajectory_id": trajectory}
    body = named | {"comment": comment, "demonstration": demonstration, "end_user": end_user, "value": _value(value)}
    said = parse_feedback(msgspec.json.encode(body)).record(OPERATOR, None, time.time())
    with options.open_project_store(context, **given) as store:
        place = store.feedback.target_of(said)
        if place is None:
            raise click.ClickException(f"the store holds no {said.kind} {said.target!r}")
        store.feedback.add([said])
        trained = store.lineage.versions_of([place[0]]).get(place[0], ())
    if as_json:
        options.print_json({"id": said.id, "trajectory_id": place[0], "call_id": place[1], "trained": trained})
        return
    click.echo(f"{said.id}: said of {place[0]}" + (f", which trained {', '.join(trained)}" if trained else ""))


@feedback.command("list")
@click.option("--trajectory", metavar="ID", help="Of this trajectory alone.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_feedback(context: click.Context, /, trajectory: str | None, limit: int, as_json: bool, **given: Any) -> None:
    """List what people said, newest first, and which policies their trajectories trained.

    \b
    Example:
      ratchet feedback list --trajectory traj_01J8
    """
    import msgspec

    with options.open_project_store(context, **given) as store:
        found = store.feedback.page(limit, trajectory=trajectory)
        trained = store.lineage.versions_of(list({said.trajectory_id for said in found if said.trajectory_id}))
    if as_json:
        options.print_json(
            [msgspec.structs.asdict(s) | {"trained": trained.get(s.trajectory_id or "", ())} for s in found]
        )
        return
    for said in found:
        click.echo(line(said, trained.get(said.trajectory_id or "", ())))
    if not found:
        click.echo("no feedback in this store: agents send it to POST /api/feedback (docs/feedback.md)")


@feedback.command()
@click.option(
    "--form",
    type=click.Choice(["unpaired", "pairs", "shown"]),
    required=True,
    help="unpaired: liked or not (KTO); pairs: best and worst of a group (DPO); shown: demonstrations (SFT).",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True), required=True, help="JSON ProgressLines file to write."
)
@click.option("--limit", type=click.IntRange(min=1), default=100_000, show_default=True, help="Newest to look at.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def export(context: click.Context, /, form: str, out: str, limit: int, as_json: bool, **given: Any) -> None:
    """Write preferences as rows in the forms of TRL's trainers.

    \b
    Example:
      ratchet feedback export --form unpaired --out thumbs.jsonl
    """
    import msgspec

    from ratchet.trainer.rows import preference_rows

    settings = options.read_project_settings(context, given)
    alias, held_out = settings.model, Counter[str]()
    with options.open_store_for_command(settings.store_url) as store:
        if form == "pairs":
            found = preference_rows.pairs(_judged_groups(store, alias, limit, options.held_out_share(settings)))
        else:
            make = preference_rows.unpaired if form == "unpaired" else preference_rows.shown
            spoken = _spoken_of(store, alias, limit)
            found = make(_learnable(spoken, options.held_out_share(settings), held_out), store.trajectories.messages_to)
    if held_out:
        found.left_out["of a held-out task"] = held_out.total()
    Path(out).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in found.rows))
    if as_json:
        options.print_json({"rows": len(found.rows), "left_out": dict(found.left_out)})
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items()))
    click.echo(f"{out}: {len(found.rows)} rows" + (f"; left out: {reasons}" if reasons else ""))


def _learnable(found: Iterable[Transcript], share: float, left_out: Counter[str]) -> Iterator[Transcript]:
    """Yield the trajectories of tasks that are not set aside for evaluation; count the others."""
    from ratchet.trainer.tasks.held_out import is_set_aside

    for one in found:
        if is_set_aside(one.trajectory, share):
            left_out["held_out"] += 1
        else:
            yield one


def _spoken_of(store: Store, alias: str, limit: int) -> Iterator[Transcript]:
    """Return the trajectories that the newest feedback is about, each once."""
    seen: set[str] = set()
    page = store.feedback.page(min(limit, _PAGE))
    while page and limit > 0:
        limit -= len(page)
        for name in dict.fromkeys(said.trajectory_id for said in page if said.trajectory_id):
            if name not in seen and store.trajectories.get(name).alias == alias:
                yield store.trajectories.read(name)
            seen.add(name)
        page = store.feedback.page(min(limit, _PAGE), before=page[-1].id) if limit > 0 else []


def _judged_groups(store: Store, alias: str, limit: int, held_out: float) -> Iterator[list[tuple[Transcript, float]]]:
    """Return the members of the newest groups with the scores that count; none of a held-out task."""
    from ratchet.trainer.tasks.held_out import is_held_out

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


def line(said: Any, trained: tuple[str, ...]) -> str:
    """Return feedback in a line that cannot steer a terminal."""
    from datetime import UTC, datetime

    parts = [
        datetime.fromtimestamp(said.given_at, UTC).strftime("%Y-%m-%d %H:%M"),
        "     -" if said.value is None else f"{said.value:>6g}",
        said.trajectory_id or f"waits for {said.kind} {said.target}",
        said.source,
        said.comment,
        "(with a demonstration)" if said.demonstration else "",
        f"trained {', '.join(trained)}" if trained else "",
    ]
    return "  ".join(strip_control_characters(part).replace("\n", " ") for part in parts if part)


def _value(text: str | None) -> float | bool | str | None:
    """Return what was typed as the value that it stands for."""
    if text is None or text in ("up", "down"):
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number, true, false, up or down", param_hint="--value") from None
