"""The group `ratchet tune`: three methods on one task set, with one judge and one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options
from ratchet.output import format_time, print_json, print_note, prints_json, show

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Tuning
    from ratchet.store.store import Store

EXIT_NOT_BETTER = 3  # exit code without a better result, with --fail-unless-better
KINDS = ("select-model", "prompt", "weights", "eval", "lessons", "doctor")
_MAX_RUNS = 1000  # newest runs that are read
_ONE_OR_MORE = click.IntRange(1)
_Command = TypeVar("_Command", bound=Callable[..., Any])

score_range = click.option(
    "--score-range", type=(float, float), metavar="LOW HIGH", help="Range of the judge's scores.  [default: 0 1]"
)
resume_comparison = click.option("--resume", metavar="ID", help="Resume a stopped run; finished rollouts are kept.")
split = click.option("--split", default="test", show_default=True, help="Split of the task set.")
limit = click.option("--limit", type=click.IntRange(1), help="Use only the first N tasks of the split.")
fail_unless_better = click.option(
    "--fail-unless-better", is_flag=True, help=f"Exit with {EXIT_NOT_BETTER} unless something is shown to be better."
)


def png(what: str) -> Callable[[_Command], _Command]:
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


def with_agent(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the settings of the project's agent to a command, in place of its options that are settings."""
    return options.with_settings(options.read_agent_settings)(command)


def print_result(data: Any, printed: Callable[[], object]) -> None:
    """Print a result: as JSON with --json, else by `printed`."""
    if prints_json():
        print_json(data)
    else:
        printed()


def _count(name: str, least: int, text: str) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", type=click.IntRange(least), help=text)


def _prompt(name: str, text: str, **given: Any) -> Callable[[_Command], _Command]:
    return options.setting(f"tuner.prompt.{name.replace('-', '_')}", f"--{name}", help=text, **given)


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
@with_agent
def select_model(settings: Settings, *, png: Path | None, fail_unless_better: bool, **own: Any) -> int:
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

    _, found = evaluate.compare(settings, evaluate.ComparisonOptions("select-model", **own))

    def printed() -> None:
        reports.show_selection(found)
        alias, at, version = (found.chosen or "").partition("@")
        if at:
            click.echo(f"make it live with: ratchet policies promote {alias} {version} --reason 'select-model'")

    print_result(evaluate.plain(found), printed)
    draw(reports.draw_selection, found, png)
    if not found.measured:
        return 1
    return EXIT_NOT_BETTER if fail_unless_better and not found.chosen else 0


@tune.command()
@_prompt("method", "Optimizer: gepa, mipro or a plug-in.  [default: gepa]", metavar="NAME")
@_prompt("max-rollouts", "Limit of all rollouts.  [default: 300, plus those on held-out tasks]", type=_ONE_OR_MORE)
@_prompt("max-total-tokens", "Token limit, agent and reflection model together.", type=_ONE_OR_MORE)
@click.option("--reflection-url", metavar="URL", help="Base URL of the language model that proposes prompts.")
@click.option("--reflection-model", metavar="NAME", help="Name of that model; without a URL, one of `model_list`.")
@click.option(
    "--seed-prompt", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Start from this text file."
)
@_prompt("mode", "How the prompt is applied.  [default: auto]", type=click.Choice(["auto", "replace", "append"]))
@_prompt("train-tasks", "Maximum number of training tasks.  [default: 40]", type=_ONE_OR_MORE)
@_prompt("validation-tasks", "Maximum number of validation tasks.  [default: 40]", type=_ONE_OR_MORE)
@_prompt("held-out-tasks", "Maximum number of held-out tasks.  [default: the test split]", type=_ONE_OR_MORE)
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

    if resume is not None:
        tune_prompt.check_resumption(resume, given)
        settings = options.read_project_settings(context)
        run, found = tune_prompt.run_prompt_tuning(settings, resume=resume)
    else:
        more = tune_prompt.reflection_setting(given["reflection_url"], given["reflection_model"])
        model, file = given["model"], given["seed_prompt"]
        settings = options.read_project_settings(context, more)
        if model not in settings.listed_models:
            settings, model = options.read_agent_settings(context, more | {"model": model}), None
        elif promote:
            raise click.UsageError(f"--promote: {model} is a model of model_list and has no versions; use --out FILE")
        text = None if file is None else file.read_text()
        run, found = tune_prompt.run_prompt_tuning(settings, text, model=model)
    better, version = found.details["verdict"] == "better", None
    if promote and better:
        with options.open_store_for_command(settings.store_url) as store:
            version = runs.create_candidate(store, run)
    if out is not None:
        out.write_text(found.details["prompt"])
    lines = reports.prompt_lines(run, found)
    if promote:
        lines.append(f"candidate {version}: see `ratchet policies`" if version else "not promoted: it is not better")
    show({"id": run, **msgspec.to_builtins(found), "promoted": version}, lines)
    return EXIT_NOT_BETTER if fail_unless_better and not better else 0


@tune.command("promote")
@click.argument("run", metavar="ID")
@click.option("--force", is_flag=True, help="Promote it even if it is not better.")
@options.with_store
@options.as_json
def promote_(store: Store, run: str, force: bool) -> None:
    """Create a candidate version with the prompt that a run found.

    The running trainer releases it like any candidate; without a trainer, `ratchet policies promote` does.

    \b
    Example:
      ratchet tune promote tun_01J8
    """
    from ratchet.api.runs import create_candidate

    version = create_candidate(store, run, force=force)
    line = f"candidate {version}: released by the running trainer, or by `ratchet policies promote`"
    show({"run": run, "promoted": version}, [line])


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
@options.setting("trainer.num_generations", "--attempts", type=_ONE_OR_MORE, help="Rollouts per task and candidate.")
@options.concurrency
@options.seed
@options.alias
@options.base_model
@options.store_url
@options.project
@fail_unless_better
@options.as_json
@with_agent
def weights(settings: Settings, *, png: Path | None, fail_unless_better: bool, **own: Any) -> int:
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
    from ratchet.api.tune import tune_weights
    from ratchet.tuner.reports import plain

    result = tune_weights(settings, own, announce=print_note if prints_json() else click.echo)
    print_result(plain(result), lambda: reports.show_weights(result))
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
@options.with_store
def report(
    store: Store, model: str | None, tasks: str | None, judged_by: str | None, png: Path | None, markdown: bool
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
    from ratchet.tuner.reports import report as made

    newest = store.tunings.page(limit=_MAX_RUNS)
    found = made(newest, live=store.policies.live(), alias=model, tasks=tasks, judge=judged_by)

    def printed() -> None:
        if markdown:
            click.echo(reports.markdown(found), nl=False)
        else:
            reports.show_report(found)

    print_result(msgspec.to_builtins(found), printed)
    draw(reports.draw_report, found, png)
    return 0 if found.task_set is not None else 1


@tune.command()
@click.option("--method", type=click.Choice(KINDS), help="Only runs of this method.")
@options.number("--limit", 20, "Maximum number of runs.", most=_MAX_RUNS)
@options.as_json
@options.with_store
def runs(store: Store, method: str | None, limit: int) -> None:
    """List the runs of the tuner, newest first: id, method, state, alias, start and duration.

    Rollouts of `ratchet doctor --workflow` are listed only with --method doctor.

    \b
    Example:
      ratchet tune runs --method prompt
    """
    import msgspec

    from ratchet.api.run_lease import interruption

    found, led = store.tunings.page(kind=method, limit=limit), store.tunings.led()
    interrupted = {one.id: interruption(one, led) for one in found}
    show(
        [msgspec.to_builtins(one) | {"interrupted": interrupted[one.id]} for one in found],
        (_run_line(one, interrupted[one.id]) for one in found),
        empty="no runs yet: `ratchet tune --help` lists the methods",
    )


def _run_line(tuning: Tuning, interrupted: str | None) -> str:
    """Return a line of the list of runs."""
    from ratchet.api.reports import duration

    elapsed = duration(tuning.ended_at - tuning.started_at) if tuning.ended_at else interrupted or "running"
    line = (
        f"{tuning.id}  {tuning.kind:<12} {tuning.state:<7} {tuning.alias}  {format_time(tuning.started_at)}  {elapsed}"
    )
    return f"{line}  {tuning.error}" if tuning.error else line
