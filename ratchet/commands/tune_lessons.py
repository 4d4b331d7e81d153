"""`ratchet tune lessons`: what a language model learns from failed attempts, tried on a share of live traffic."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output.tables import strip_control_characters

if TYPE_CHECKING:
    from ratchet.tuner.prompts.lessons.reflexion import LearnedLessons


@click.command()
@click.option("--below", type=float, help="A task failed below this mean score.  [default: 0.5]")
@click.option("--least", type=click.IntRange(1), help="Failed tasks that a family needs.  [default: 3]")
@click.option("--share", type=click.FloatRange(0, 1, True, True), help="Trajectories that get them.  [default: 0.5]")
@click.option("--reflection-url", metavar="URL", help="Language model that reads the failures: its base URL.")
@click.option("--reflection-model", metavar="NAME", help="Its name there.")
@click.option("--dry-run", is_flag=True, help="Only show the lessons; nothing serves them.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def lessons(context: click.Context, /, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Let a language model read failed attempts and write lessons, and try them on half of the live traffic.

    One short list per task family; the proxy appends it to the system prompt of that family's calls. The lessons are a
    canary: the running trainer's sequential test promotes them or rolls them back.

    \b
    Example:
      ratchet tune lessons --reflection-url http://127.0.0.1:8001 --reflection-model big --dry-run
      ratchet tune lessons --reflection-url http://127.0.0.1:8001 --reflection-model big
    """
    from ratchet.trainer.controller.judges.language_model import LanguageModel
    from ratchet.tuner.prompts.lessons.reflexion import check, learn, on_trial
    from ratchet.tuning.run_lease import Hold

    settings = options.project_settings_of(context, _named(given))
    tuner, alias = settings.tuner_settings(), settings.model
    if tuner.reflection is None:
        raise click.UsageError("no language model is named: give --reflection-url and --reflection-model, or set "
                               "tuner.reflection")  # fmt: skip
    model = LanguageModel(tuner.reflection, os.environ.get(tuner.reflection.api_key_env))
    version = run = None
    try:
        with options.open_store_for_command(settings.store_url) as store:
            check(store, alias)
            learned = learn(
                store, alias, model, tuner.lessons, lambda family: click.echo(f"asking: {family}", err=True)
            )
            if not dry_run:
                config = {"lessons": tuner.lessons.model_dump(), "reflection": tuner.reflection.model}
                run = store.tunings.begin("reflexion", alias, config).id
                with Hold(store).on(run):
                    version = on_trial(store, alias, learned, tuner.lessons.share, run).version
                    store.tunings.end(run, "done", learned.plain() | {"promoted": f"{alias}@{version}"})
    finally:
        model.close()
    if as_json:
        options.emit(learned.plain() | {"run": run, "version": version})
        return
    _show(learned)
    if version is not None:
        click.echo(
            f"canary {alias}@{version} at {tuner.lessons.share:.0%}: the running trainer decides; "
            f"`ratchet policies show {alias}` follows it"
        )


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options by the names of their settings."""
    url, model = given.pop("reflection_url"), given.pop("reflection_model")
    if (url is None) != (model is None):
        raise click.UsageError("--reflection-url and --reflection-model belong together")
    own = ("below", "least", "share")
    named = {f"tuner.lessons.{key}" if key in own else key: value for key, value in given.items()}
    return named | ({"tuner.reflection": {"base_url": url, "model": model}} if url is not None else {})


def _show(learned: LearnedLessons) -> None:
    """Print the lessons; they are a language model's words, so nothing in them steers the terminal."""
    for family, said in learned.lessons.items():
        found = learned.failing[family]
        click.echo(f"{strip_control_characters(family)}: {found.tasks} tasks failed, mean score {found.mean:.3f}")
        for lesson in said:
            click.echo(f"  - {strip_control_characters(lesson)}")
    for family, problem in learned.problems.items():
        click.echo(f"{strip_control_characters(family)}: no lessons: {strip_control_characters(problem)}")
    cost = "" if learned.cost is None else f", cost {learned.cost:.4f}"
    click.echo(f"{learned.tokens:,} tokens{cost}")
