"""The group `ratchet tune`: three methods on one task set, with one judge and one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options
from ratchet.output import format_time, strip_control_characters

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Tuning

EXIT_NOT_BETTER = 3  # exit code without a better result, with --fail-unless-better
KINDS = ("select-model", "prompt", "weights", "eval", "lessons", "doctor")
_MAX_RUNS = 1000  # newest runs that are read
_Command = TypeVar("_Command", bound=Callable[..., Any])

split = click.option("--split", default="test", show_default=True, help="Split of the task set.")
limit = click.option("--limit", type=click.IntRange(1), help="Use only the first N tasks of the split.")
score_range = click.option(
    "--score-range", type=(float, float), metavar="LOW HIGH", help="Range of the judge's scores.  [default: 0 1]"
)
resume_comparison = click.option(
    "--resume", metavar="ID", help="Resume a stopped run; finished rollouts are kept."
)  # fmt: skip
fail_unless_better = click.option(
    "--fail-unless-better",
    is_flag=True,
    help=f"Exit with {EXIT_NOT_BETTER} unless something is shown to be better.",
)


def png(what: str) -> Callable[[_Command], _Command]:
    """Return the option --png."""
    return click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help=f"Draw {what} into this file.")


def draw(drawn: Callable[[Any, Path], object], found: Any, file: Path | None) -> None:
    """Draw what was found into the file of --png, if one is given."""
    if file is not None:
        drawn(found, file)
        click.echo(f"drawn: {file}", err=True)


def add_rollout_options(command: _Command) -> _Command:
    """Add the options of commands that run rollouts: `ratchet tune` and `ratchet eval`."""
    for option in reversed(
        (
            options.tasks, options.test_size, options.workflow, options.judge, options.attempts, options.concurrency,
            options.seed, options.proxy_url, options.store_url, options.project,
        )
    ):  # fmt: skip
        command = option(command)
    return command


def settings_of(context: click.Context, given: dict[str, Any]) -> Settings:
    """Return the settings of the project's agent, overridden by the options of `add_rollout_options`."""
    from ratchet.api.context import setting_names

    return options.read_agent_settings(context, setting_names(given))


def _count(name: str, least: int, text: str) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", type=click.IntRange(least), help=text)


@click.group(cls=options.PluginGroup, plugins="ratchet.tune_commands")
def tune() -> None:
    """Tune the model, the prompt or the weights of an agent on a task set, and compare the gains.

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
    """


@tune.command("select-model")
@click.option(
    "--candidate", "candidates", multiple=True, metavar="NAME", help="A `model_list` name, or alias@3; repeat for more."
)
@split
@limit
@click.option(
    "--policy",
    type=click.Choice(["best", "cheapest"]),
    default="best",
    show_default=True,
    help="Choose the best, or the cheapest --within X of it.",
)
@click.option("--within", type=click.FloatRange(0), help="With cheapest: accepted score difference to the best.")
@score_range
@resume_comparison
@png("the comparison")
@options.alias
@add_rollout_options
@fail_unless_better
@options.as_json
@click.pass_context
def select_model(
    context: click.Context, /, png: Path | None, fail_unless_better: bool, as_json: bool, **given: Any
) -> int:
    """Compare models or versions on the same tasks and choose one: the best, or the cheapest within a margin of it.

    Every candidate gets every task, in alternating order. A failed rollout counts as a failure. The gain is measured
    against the first candidate. If nothing runs, the services that the candidates need are started and stopped again:
    only the proxy for models of `model_list`. Exits with 0 on completion, and with 1 on errors or if no rollout could
    be scored; with --fail-unless-better, with 3 if nothing is chosen (a tie, too few tasks, rollouts that could not be
    judged).

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
      ratchet tune select-model --candidate gpt-small --candidate gpt-big --tasks ./tasks --workflow agent:run
    """
    from ratchet.api import evaluate, reports

    own = ("candidates", "split", "limit", "policy", "within", "score_range", "resume")
    wanted = evaluate.ComparisonOptions("select-model", **{name: given[name] for name in own})
    _, found = evaluate.compare(settings_of(context, given), wanted)
    if as_json:
        options.print_json(evaluate.plain(found))
    else:
        reports.show_selection(found)
        alias, at, version = (found.chosen or "").partition("@")
        if at:
            click.echo(f"make it live with: ratchet policies promote {alias} {version} --reason 'select-model'")
    draw(reports.draw_selection, found, png)
    if not found.measured:
        return 1
    return EXIT_NOT_BETTER if fail_unless_better and not found.chosen else 0


@tune.command()
@click.option("--method", metavar="NAME", help="Optimizer: gepa, mipro or a plug-in.  [default: gepa]")
@_count("max-rollouts", 1, "Limit of all rollouts.  [default: 300, plus those on held-out tasks]")
@_count("max-total-tokens", 1, "Token limit, agent and reflection model together.")
@click.option("--reflection-url", metavar="URL", help="Base URL of the language model that proposes prompts.")
@click.option("--reflection-model", metavar="NAME", help="Name of that model; without a URL, one of `model_list`.")
@click.option(
    "--seed-prompt", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Start from this text file."
)
@click.option(
    "--mode", type=click.Choice(["auto", "replace", "append"]), help="How the prompt is applied.  [default: auto]"
)
@_count("train-tasks", 1, "Maximum number of training tasks.  [default: 40]")
@_count("validation-tasks", 1, "Maximum number of validation tasks.  [default: 40]")
@_count("held-out-tasks", 1, "Maximum number of held-out tasks.  [default: the test split]")
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
    context: click.Context,
    /,
    resume: str | None,
    out: Path | None,
    promote: bool,
    fail_unless_better: bool,
    as_json: bool,
    **given: Any,
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
    import msgspec

    from ratchet.api import reports, runs, tune_prompt
    from ratchet.api.context import setting_names

    if resume is not None:
        tune_prompt.check_resumption(resume, given)
        names = {"concurrency": "tuner.concurrency", "project": "project"}
        values = setting_names({name: given[name] for name in ("proxy", "store", *names)}, names)
        run, found = tune_prompt.resume_run(options.read_project_settings(context, values), resume)
    else:
        named = setting_names(given, tune_prompt.SETTINGS)
        named |= tune_prompt.reflection_setting(given["reflection_url"], given["reflection_model"])
        model = named.pop("model")
        settings = options.read_project_settings(context, named)
        if model not in settings.listed_models:
            settings, model = options.read_agent_settings(context, named | {"model": model}), None
        elif promote:
            raise click.UsageError(f"--promote: {model} is a model of model_list and has no versions; use --out FILE")
        file: Path | None = given["seed_prompt"]
        run, found = tune_prompt.start_run(settings, None if file is None else file.read_text(), model=model)
    better, version = found.details["verdict"] == "better", None
    if promote and better:
        with options.open_project_store(context, store=given["store"], project=given["project"]) as store:
            version = runs.create_candidate(store, run)
    if out is not None:
        out.write_text(found.details["prompt"])
    if as_json:
        options.print_json({"id": run, **msgspec.to_builtins(found), "promoted": version})
    else:
        for line in reports.prompt_lines(run, found):
            click.echo(strip_control_characters(line))
        if promote:
            click.echo(f"candidate {version}: see `ratchet policies`" if version else "not promoted: it is not better")
    return EXIT_NOT_BETTER if fail_unless_better and not better else 0


@tune.command("promote")
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
    from ratchet.api.runs import create_candidate

    with options.open_project_store(context, store=store, project=project) as opened:
        version = create_candidate(opened, run, force=force)
    if as_json:
        options.print_json({"run": run, "promoted": version})
    else:
        click.echo(f"candidate {version}: released by the running trainer, or by `ratchet policies promote`")


@tune.command()
@click.option(
    "--tasks",
    "families",
    multiple=True,
    metavar="[NAME=]SOURCE[:WEIGHT]",
    help="Task set. May be repeated: sets are trained together.",
)
@_count("rounds", 0, "Rounds of training tasks.  [default: 20]")
@_count("tasks-per-round", 1, "Training tasks of a round.  [default: 16]")
@_count("eval-every", 1, "Rounds between two validations.  [default: 5]")
@_count("eval-tasks", 2, "Test tasks of each set.  [default: all]")
@_count("validation-tasks", 1, "Validation tasks of each set.  [default: 32]")
@_count("eval-attempts", 1, "Rollouts per validation and test task.  [default: 1]")
@click.option(
    "--family-workflow",
    multiple=True,
    metavar="NAME=SPEC",
    help="Agent of the task set with this name, in place of --workflow. May be repeated.",
)
@click.option("--eval-workflow", metavar="SPEC", help="Agent of the evaluations, such as a greedy one.")
@_count("patience", 0, "Stop after this many validations without a gain.  [default: 3]")
@_count("collect", 0, "Rounds of rollouts for a warm start, not trained.  [default: 0]")
@click.option(
    "--warm-start",
    multiple=True,
    metavar="SOURCE",
    help="Run SFT first on: policy, demonstrations, or a `model_list` name. May be repeated.",
)
@click.option(
    "--warm-start-setting",
    multiple=True,
    metavar="KEY=VALUE",
    help="A warm-start setting, such as general=chat.jsonl. May be repeated.",
)
@click.option("--resume", metavar="ID", help="Resume a run that was stopped or killed.")
@png("the learning curve")
@options.test_size
@options.workflow
@options.judge
@options.attempts
@options.concurrency
@options.seed
@options.alias
@options.base_model
@options.store_url
@options.project
@fail_unless_better
@options.as_json
@click.pass_context
def weights(context: click.Context, /, png: Path | None, as_json: bool, fail_unless_better: bool, **given: Any) -> int:
    """Train the weights on a task set, check versions on validation tasks, and measure the gain on the test split.

    The rollouts go through the running project (`ratchet up`), whose trainer learns from them as from any traffic. If
    no project is running, vLLM, proxy and trainer are started and stopped again. Exits with 0 on completion and 1 on
    errors; with --fail-unless-better, with 3 unless the version served afterwards is shown to be better than before.

    \b
    Example:
      ratchet tune weights --tasks ./tasks --workflow my_agent:run --rounds 20
      ratchet tune weights --tasks mail=./mail:3 --tasks math=./math --warm-start policy --collect 4
      ratchet tune weights --tasks mail=./mail --tasks math=./math --workflow mail:run --family-workflow math=sums:run
    """
    from ratchet.api import reports
    from ratchet.api import tune as api
    from ratchet.api.context import setting_names
    from ratchet.output import print_note
    from ratchet.tuner.reports import plain

    settings = options.read_agent_settings(context, setting_names(given, api.SETTINGS))
    result = api.tune_weights(settings, given, announce=print_note if as_json else click.echo)
    if as_json:
        options.print_json(plain(result))
    else:
        reports.show_weights(result)
    draw(reports.draw_weights, result, png)
    return EXIT_NOT_BETTER if fail_unless_better and result.best is None else 0


@tune.command()
@click.option("--model", metavar="NAME", help="Only runs for this agent.  [default: that of the newest run]")
@click.option(
    "--tasks", metavar="SOURCE", help="Only runs on this task set, by its source.  [default: the newest run's]"
)
@click.option(
    "--judged-by", metavar="JUDGE", help="Only runs with this judge, by its name.  [default: the newest run's]"
)
@png("the gains")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@options.as_json
@options.store_url
@options.project
@click.pass_context
def report(
    context: click.Context,
    /,
    model: str | None,
    tasks: str | None,
    judged_by: str | None,
    png: Path | None,
    markdown: bool,
    as_json: bool,
    store: str | None,
    project: str | None,
) -> int:
    """Show what each method gained on the same held-out tasks, with an interval, and what it cost.

    It compares the newest finished run of each method. Runs with other tasks, another judge or another alias are listed
    with the reason why they are not compared. Exits with 1 if no run has finished.

    \b
    Example:
      ratchet tune report --png gains.png
    """
    import msgspec

    from ratchet.api import reports
    from ratchet.trainer.errors import TuningError
    from ratchet.tuner.reports import missing
    from ratchet.tuner.reports import report as made

    with options.open_project_store(context, store=store, project=project) as opened:
        live, newest = opened.policies.live(), opened.tunings.page(limit=_MAX_RUNS)
    if reason := missing(newest, model, tasks, judged_by):
        raise TuningError(reason)
    found = made(newest, live=live, alias=model, tasks=tasks, judge=judged_by)
    if as_json:
        options.print_json(msgspec.to_builtins(found))
    elif markdown:
        click.echo(reports.markdown(found), nl=False)
    else:
        reports.show_report(found)
    draw(reports.draw_report, found, png)
    return 0 if found.task_set is not None else 1


@tune.command()
@click.option("--method", type=click.Choice(KINDS), help="Only runs of this method.")
@click.option(
    "--limit", type=click.IntRange(1, _MAX_RUNS), default=20, show_default=True, help="Maximum number of runs."
)
@options.as_json
@options.store_url
@options.project
@click.pass_context
def runs(
    context: click.Context, method: str | None, limit: int, as_json: bool, store: str | None, project: str | None
) -> None:
    """List the runs of the tuner, newest first: id, method, state, alias, start and duration.

    Rollouts of `ratchet doctor --workflow` are listed only with --method doctor.

    \b
    Example:
      ratchet tune runs --method prompt
    """
    import msgspec

    from ratchet.api.run_lease import interruption

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.tunings.page(kind=method, limit=limit)
        led = opened.tunings.led()
    interrupted = {one.id: interruption(one, led) for one in found}
    if as_json:
        options.print_json([msgspec.to_builtins(one) | {"interrupted": interrupted[one.id]} for one in found])
        return
    for one in found:
        click.echo(strip_control_characters(_run_line(one, interrupted[one.id])))
    if not found:
        click.echo("no runs yet: `ratchet tune --help` lists the methods")


def _run_line(tuning: Tuning, interrupted: str | None) -> str:
    """Return a line of the list of runs."""
    from ratchet.api.reports import duration

    elapsed = duration(tuning.ended_at - tuning.started_at) if tuning.ended_at else interrupted or "running"
    line = (
        f"{tuning.id}  {tuning.kind:<12} {tuning.state:<7} {tuning.alias}  {format_time(tuning.started_at)}  {elapsed}"
    )
    return f"{line}  {tuning.error}" if tuning.error else line
