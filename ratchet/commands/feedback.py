"""The `ratchet feedback` commands: add, list and export. They need the store and no running proxy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import format_time, plain, show

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.records import Feedback, Transcript
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
@click.option("--response", "response_id", metavar="ID", help="The `id` of an answer, as its client received it.")
@click.option("--call", "call_id", metavar="ID", help="The id of a call.")
@click.option("--trajectory", "trajectory_id", metavar="ID", help="The id of a trajectory.")
@click.option("--value", metavar="VALUE", help="A number, true, false, up or down.")
@click.option("--comment", default="", help="Comment.")
@click.option("--demonstration", help="The correct answer.")
@click.option("--end-user", metavar="NAME", help="Who gives the feedback.  [default: the operator]")
@options.as_json
@options.with_store
def add(store: Store, value: str | None, **body: str | None) -> None:
    """Add feedback on a trajectory, a call or an answer.

    \b
    Example:
      ratchet feedback add --trajectory traj_01J8 --value 0.5 --end-user ann
    """
    import msgspec

    from ratchet.proxy.coordinator.keys.key_cache import OPERATOR
    from ratchet.proxy.coordinator.operator_api.feedback import parse_feedback

    sent = msgspec.json.encode(body | {"value": _value(value)})
    entry = parse_feedback(sent).record(OPERATOR, None, time.time())
    place = store.feedback.target_of(entry)
    if place is None:
        raise click.ClickException(f"the store holds no {entry.kind} {entry.target!r}")
    store.feedback.add([entry])
    trajectory, call = place
    trained = store.lineage.versions_of([trajectory]).get(trajectory, ())
    line = f"{entry.id}: feedback on {trajectory}" + (f", which trained {', '.join(trained)}" if trained else "")
    show({"id": entry.id, "trajectory_id": trajectory, "call_id": call, "trained": trained}, [line])


def _value(text: str | None) -> float | bool | str | None:
    if text is None or text in ("up", "down"):
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number, true, false, up or down", param_hint="--value") from None


@feedback.command("list")
@click.option("--trajectory", metavar="ID", help="Only feedback on this trajectory.")
@options.number("--limit", 50, "Maximum number.", most=1000)
@options.as_json
@options.with_store
def list_feedback(store: Store, trajectory: str | None, limit: int) -> None:
    """List feedback, newest first, and the policies trained on its trajectories.

    \b
    Example:
      ratchet feedback list --trajectory traj_01J8
    """
    found = store.feedback.page(limit, trajectory=trajectory)
    versions = store.lineage.versions_of(list({one.trajectory_id for one in found if one.trajectory_id}))
    trained = [(one, versions.get(one.trajectory_id or "", ())) for one in found]
    show(
        [plain(one, trained=names) for one, names in trained],
        (feedback_line(*one) for one in trained),
        empty="no feedback in this store: agents send it to POST /api/feedback (docs/feedback.md)",
    )


def feedback_line(entry: Feedback, trained: tuple[str, ...]) -> str:
    """Format feedback as a line."""
    parts = [
        format_time(entry.given_at)[:16],
        "     -" if entry.value is None else f"{entry.value:>6g}",
        entry.trajectory_id or f"waits for {entry.kind} {entry.target}",
        entry.source,
        entry.comment,
        "(with a demonstration)" if entry.demonstration else "",
        f"trained {', '.join(trained)}" if trained else "",
    ]
    return "  ".join(part.replace("\n", " ") for part in parts if part)


@feedback.command()
@click.option(
    "--format",
    "layout",
    type=click.Choice(["unpaired", "paired", "demonstrations"]),
    required=True,
    help="unpaired: liked or not (KTO); paired: best and worst of a group (DPO); demonstrations (SFT).",
)
@click.option("--out", type=click.Path(dir_okay=False, writable=True), required=True, help="JSON Lines file to write.")
@options.number("--limit", 100_000, "Maximum number to read.")
@options.alias
@options.store_url
@options.project
@options.as_json
@options.with_settings(options.read_agent_settings)
def export(settings: Settings, layout: str, out: str, limit: int) -> None:
    """Export preferences as rows in the formats of TRL's trainers.

    \b
    Example:
      ratchet feedback export --format unpaired --out thumbs.jsonl
    """
    import msgspec

    from ratchet.trainer.rows import preference_rows

    alias, share, held_out = settings.model, settings.trainer.release.held_out_share, Counter[str]()
    with options.open_store_for_command(settings.store_url) as store:
        if layout == "paired":
            found = preference_rows.pairs(_judged_groups(store, alias, limit, share))
        else:
            make = preference_rows.unpaired if layout == "unpaired" else preference_rows.demonstrations
            learnable = _learnable(_with_feedback(store, alias, limit), share, held_out)
            found = make(learnable, store.trajectories.messages_to)
    if held_out:
        found.skipped["of a held-out task"] = held_out.total()
    Path(out).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in found.rows))
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.skipped.items()))
    line = f"{out}: {len(found.rows)} rows" + (f"; skipped: {reasons}" if reasons else "")
    show({"rows": len(found.rows), "skipped": dict(found.skipped)}, [line])


def _learnable(found: Iterable[Transcript], share: float, left_out: Counter[str]) -> Iterator[Transcript]:
    """Yield the trajectories whose tasks are not held out for evaluation; count the others."""
    from ratchet.trainer.tasks import is_set_aside

    for one in found:
        if is_set_aside(one.trajectory, share):
            left_out["held_out"] += 1
        else:
            yield one


def _pages(read: Callable[..., list[Any]], limit: int) -> Iterator[Any]:
    """Yield the newest records of a table, `limit` at most, read in pages."""
    page = read(min(limit, _PAGE))
    while page:
        yield from page
        limit -= len(page)
        page = read(min(limit, _PAGE), before=page[-1].id) if limit > 0 else []


def _with_feedback(store: Store, alias: str, limit: int) -> Iterator[Transcript]:
    """Yield the trajectories that the newest feedback refers to, each once."""
    seen: set[str | None] = {None}
    for entry in _pages(store.feedback.page, limit):
        if entry.trajectory_id not in seen and store.trajectories.get(entry.trajectory_id).alias == alias:
            yield store.trajectories.read(entry.trajectory_id)
        seen.add(entry.trajectory_id)


def _judged_groups(store: Store, alias: str, limit: int, held_out: float) -> Iterator[list[tuple[Transcript, float]]]:
    """Yield the members of the newest groups with their scores, without held-out tasks."""
    from ratchet.trainer.tasks import is_held_out

    for group in _pages(store.groups.page, limit):
        if group.alias == alias and not is_held_out(group.key, held_out):
            scores = store.groups.scores(group.members)
            if scores:
                yield [(store.trajectories.read(name), score) for name, score in scores.items()]
