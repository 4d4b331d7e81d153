"""`ratchet tune prompt` and `ratchet tune promote`: search for a better system prompt, and release it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.rollout_options import EXIT_NOT_BETTER, add_rollout_options, fail_unless_better
from ratchet.output import strip_control_characters

if TYPE_CHECKING:
    from ratchet.tuning.tune_prompt import PromptOutcome


@click.command()
@click.option("--method", metavar="NAME", help="Optimizer: gepa, mipro or a plug-in.  [default: gepa]")
@click.option(
    "--max-rollouts",
    type=click.IntRange(1),
    help="Limit of all rollouts.  [default: 300, plus those on held-out tasks]",
)
@click.option("--max-total-tokens", type=click.IntRange(1), help="Token limit, agent and reflection model together.")
@click.option("--reflection-url", metavar="URL", help="Base URL of the language model that proposes prompts.")
@click.option("--reflection-model", metavar="NAME", help="Name of that model; without a URL, one of `model_list`.")
@click.option(
    "--seed-prompt", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Start from this text file."
)
@click.option(
    "--mode", type=click.Choice(["auto", "replace", "append"]), help="How the prompt is applied.  [default: auto]"
)
@click.option("--train-tasks", type=click.IntRange(1), help="Maximum number of training tasks.  [default: 40]")
@click.option("--validation-tasks", type=click.IntRange(1), help="Maximum number of validation tasks.  [default: 40]")
@click.option(
    "--held-out-tasks", type=click.IntRange(1), help="Maximum number of held-out tasks.  [default: the test split]"
)
@click.option("--resume", metavar="ID", help="Resume a run that was stopped or killed; finished rollouts are kept.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the best prompt to this file.")
@click.option("--promote", is_flag=True, help="If the prompt is better, create a candidate version with it.")
@click.option(
    "--model", metavar="NAME", help="Agent, or a model of `model_list` in its place.  [default: the only agent]"
)
@add_rollout_options
@fail_unless_better
@options.as_json
@click.pass_context
def prompt(
    context: click.Context, /, resume: str | None, out: Path | None, promote: bool, as_json: bool, **given: Any
) -> int:
    """Search for a better system prompt and compare it with the current one on held-out tasks.

    The agent is not changed: the proxy replaces the prompt, for these rollouts only. Training, validation and held-out
    tasks are disjoint. The verdict is `better`, `no better`, `worse` or `inconclusive`; only the first is promoted.
    If nothing runs, the services that the agent needs are started and stopped again: only the proxy for a model of
    `model_list`, whose prompt --out writes. Exits with 0 on completion and 1 on errors; with --fail-unless-better, with
    3 for every verdict but `better`.

    \b
    Example:
      ratchet tune prompt --tasks ./tasks --workflow my_agent:run --judge my_agent:judge \\
        --reflection-url http://127.0.0.1:8001 --reflection-model big --max-rollouts 300
      ratchet tune prompt --model gpt-small --tasks ./tasks --workflow my_agent:run --judge my_agent:judge \\
        --reflection-model gpt-big --out best.txt
      ratchet tune prompt --resume tun_01J8
    """
    fails: bool = given.pop("fail_unless_better")
    found = _resume(context, resume, given) if resume else _start(context, given, promotes=promote)
    version = _promote(context, found.run, given) if promote and found.better else None
    if out is not None:
        out.write_text(found.prompt)
    if as_json:
        options.print_json(found.content | {"promoted": version})
        return EXIT_NOT_BETTER if fails and not found.better else 0
    for line in found.lines():
        click.echo(strip_control_characters(line))
    if promote:
        click.echo(f"candidate {version}: see `ratchet policies`" if version else "not promoted: it is not better")
    return EXIT_NOT_BETTER if fails and not found.better else 0


def _start(context: click.Context, given: dict[str, Any], *, promotes: bool) -> PromptOutcome:
    from ratchet.tuning import tune_prompt

    file: Path | None = given["seed_prompt"]
    named = tune_prompt.setting_names({key: value for key, value in given.items() if key != "seed_prompt"})
    model = named.pop("model")
    settings = options.read_project_settings(context, named)
    if model not in settings.listed_models:
        settings, model = options.read_agent_settings(context, named | {"model": model}), None
    elif promotes:
        raise click.UsageError(f"--promote: {model} is a model of model_list and has no versions; use --out FILE")
    return tune_prompt.start_run(settings, None if file is None else file.read_text(), model=model)


def _resume(context: click.Context, name: str, given: dict[str, Any]) -> PromptOutcome:
    from ratchet.tuning import tune_prompt

    tune_prompt.check_resumption(name, given)
    values = {"tuner.proxy_url": given["proxy"], "tuner.concurrency": given["concurrency"]}
    settings = options.read_project_settings(context, values | {"store": given["store"], "project": given["project"]})
    return tune_prompt.resume_run(settings, name)


def _promote(context: click.Context, run: str, given: dict[str, Any]) -> str:
    from ratchet.tuning.tune_prompt import create_candidate

    with options.open_project_store(context, store=given["store"], project=given["project"]) as store:
        return create_candidate(store, run)


@click.command("promote")
@click.argument("run", metavar="ID")
@click.option("--force", is_flag=True, help="Promote it even if it is not better.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def promote_(
    context: click.Context, run: str, force: bool, store: str | None, project: str | None, as_json: bool
) -> None:
    """Create a candidate version with the prompt that a run found.

    The running trainer releases it like any candidate; without a trainer, `ratchet policies promote` does.

    \b
    Example:
      ratchet tune promote tun_01J8
    """
    from ratchet.tuning import tune_prompt

    with options.open_project_store(context, store=store, project=project) as opened:
        version = tune_prompt.create_candidate(opened, run, force=force)
    if as_json:
        options.print_json({"run": run, "promoted": version})
    else:
        click.echo(f"candidate {version}: released by the running trainer, or by `ratchet policies promote`")
