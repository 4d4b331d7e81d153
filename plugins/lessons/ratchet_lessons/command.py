"""`ratchet tune lessons`: a language model derives lessons from failed rollouts; a share of live traffic tries them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import print_json, prints_json, strip_control_characters

if TYPE_CHECKING:
    from ratchet_lessons.lessons import LearnedLessons


@click.command()
@options.setting(
    "tuner.lessons.failure_threshold",
    "--failure-threshold",
    type=float,
    help="A task with a lower mean score failed.  [default: 0.5]",
)
@options.setting(
    "tuner.lessons.min_failures",
    "--min-failures",
    type=click.IntRange(1),
    help="Minimum failed tasks of a family.  [default: 3]",
)
@options.setting(
    "tuner.lessons.share",
    "--share",
    type=click.FloatRange(0, 1, True, True),
    help="Share of new trajectories that get the lessons.  [default: 0.5]",
)
@click.option("--reflection-url", metavar="URL", help="Base URL of the language model that reads the failures.")
@click.option("--reflection-model", metavar="NAME", help="Name of that model.")
@click.option("--dry-run", is_flag=True, help="Print the lessons without serving them.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def lessons(
    context: click.Context, /, reflection_url: str | None, reflection_model: str | None, dry_run: bool, **_: Any
) -> None:
    """Derive lessons from failed rollouts with a language model and try them on half of the live traffic.

    Each task family gets a short list, which the proxy appends to the system prompt of that family's calls. The lessons
    are tried in a ramp: the running trainer promotes them or rolls them back.

    \b
    Example:
      ratchet tune lessons --reflection-url http://127.0.0.1:8001 --reflection-model big --dry-run
      ratchet tune lessons --reflection-url http://127.0.0.1:8001 --reflection-model big
    """
    from ratchet.api.run_lease import RunLease
    from ratchet.api.tune_prompt import reflection_setting
    from ratchet.settings.setting_errors import readable_errors
    from ratchet.trainer.judges.language_model import LanguageModel, key_of_model
    from ratchet_lessons.lessons import LessonSettings, check, learn, start_ramp

    settings = options.read_agent_settings(context, reflection_setting(reflection_url, reflection_model))
    tuner, alias = settings.tuner, settings.model
    with readable_errors(settings._sources, LessonSettings, "tuner", "lessons"):
        chosen = LessonSettings(**tuner.lessons)
    if tuner.reflection is None:
        raise click.UsageError("no language model is named: give --reflection-url and --reflection-model, or set "
                               "tuner.reflection")  # fmt: skip
    model = LanguageModel(tuner.reflection, key_of_model(tuner.reflection, os.environ))
    version = run = None
    try:
        with options.open_store_for_command(settings.store_url) as store:
            check(store, alias)
            learned = learn(
                store, alias, model, chosen, lambda family: click.echo(f"reading failures of {family}", err=True)
            )
            if not dry_run:
                config = {"lessons": chosen.model_dump(), "reflection": tuner.reflection.model}
                run = store.tunings.begin("lessons", alias, config).id
                with RunLease(store).acquire(run):
                    version = start_ramp(store, alias, learned, chosen.share, run).version
                    store.tunings.end(run, "done", learned.plain() | {"promoted": f"{alias}@{version}"})
    finally:
        model.close()
    if prints_json():
        print_json(learned.plain() | {"run": run, "version": version})
        return
    _show(learned)
    if version is not None:
        click.echo(
            f"ramp {alias}@{version} at {chosen.share:.0%}: the running trainer decides; "
            f"follow it with `ratchet policies show {alias}`"
        )


def _show(learned: LearnedLessons) -> None:
    """Print the lessons. A language model wrote them: control characters are removed."""
    for family, lessons in learned.lessons.items():
        found = learned.failing[family]
        click.echo(f"{strip_control_characters(family)}: {found.tasks} tasks failed, mean score {found.mean:.3f}")
        for lesson in lessons:
            click.echo(f"  - {strip_control_characters(lesson)}")
    for family, problem in learned.problems.items():
        click.echo(f"{strip_control_characters(family)}: no lessons: {strip_control_characters(problem)}")
    cost = "" if learned.cost is None else f", cost {learned.cost:.4f}"
    click.echo(f"{learned.tokens:,} tokens{cost}")
