"""`ratchet up`, `down`, `status` and `doctor`: the commands for a whole project."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import strip_control_characters

if TYPE_CHECKING:
    from ratchet.checks.check_result import CheckResult
    from ratchet.checks.judge_quality_check import JudgeExample
    from ratchet.settings.project_settings import Settings


@click.command()
@options.project
@options.base_model
@options.alias
@options.judge
@options.store_url
@click.option("--port", type=int, help="Port of the proxy, for agents.  [default: 8000]")
@click.option("--vllm-port", type=int, help="Port of vLLM.  [default: 8001]")
@click.option("--detach", is_flag=True, help="Run in the background; return once everything is ready.")
@options.as_json
@click.pass_context
def up(context: click.Context, /, detach: bool, as_json: bool, vllm_port: int | None, **given: Any) -> None:
    """Start vLLM, proxy, trainer and learner of a project and supervise them.

    When it ends, for whatever reason, all of them end. Without a judge, calls are recorded and nothing is trained.

    \b
    Example:
      ratchet up --base-model Qwen/Qwen2.5-0.5B-Instruct --judge my_agent.judge:judge
    """
    from ratchet.supervisor import up as supervision

    values = {
        "project": given["project"],
        "base_model": given["base_model"],
        "model": given["model"],
        "store": given["store"],
        "trainer.judge": given["judge"],
        "proxy.port": given["port"],
        "vllm.port": vllm_port,
    }
    settings = options.read_settings(context, values)
    if not detach:
        supervision.run_foreground(settings)
        return
    # The same command line without --detach: there is one way to start.
    running = supervision.run_detached(settings, [argument for argument in sys.argv[1:] if argument != "--detach"])
    if as_json:
        options.print_json(running)
    else:
        named = supervision.names_of_agents(settings)
        click.echo(f"base_url: {running['base_url']}   {named}   (`ratchet down` stops everything)")
        if running["console"]:
            click.echo(f"console: {running['console']}")


@click.command()
@options.project
@options.as_json
@click.pass_context
def down(context: click.Context, project: str | None, as_json: bool) -> None:
    """Stop everything that `up` started. Succeeds if nothing runs.

    \b
    Example:
      ratchet down --project mail
    """
    from ratchet.supervisor import up as supervision

    settings = options.read_settings(context, {"project": project})
    stopped = supervision.down(settings)
    if as_json:
        options.print_json({"project": settings.project, "stopped": stopped})
    elif stopped:
        click.echo(f"project {settings.project}: stopped {', '.join(stopped)}")
    else:
        click.echo(f"project {settings.project}: nothing was running")


@click.command("reload")
@options.project
@options.as_json
@click.pass_context
def reload_agents(context: click.Context, project: str | None, as_json: bool) -> None:
    """Apply changes of `agents` in ratchet.yaml to the running project: added agents join, removed ones leave.

    Other agents are served and trained meanwhile. Settings, judges and the base model are checked first: an error
    changes nothing. Only `agents` is applied; other keys that differ are printed, because they need a restart.

    \b
    Example:
      ratchet reload
    """
    from ratchet.supervisor import reload

    settings = options.read_settings(context, {"project": project})
    done = reload.reload_agents(settings, lambda text: click.echo(text, err=True))
    if as_json:
        options.print_json(dataclasses.asdict(done))
    else:
        click.echo("\n".join(done.lines()))


@click.command()
@options.project
@options.store_url
@options.alias
@click.option("--report", is_flag=True, help="Show scores of live traffic before and after training, with intervals.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="With --report: plot file.")
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write all rounds and decisions as event files to this new folder.",
)
@options.as_json
@click.pass_context
def status(
    context: click.Context,
    /,
    project: str | None,
    store: str | None,
    model: str | None,
    report: bool,
    png: Path | None,
    tensorboard: Path | None,
    as_json: bool,
) -> None:
    """Show processes, ports, versions, trajectories by state, rounds and alarms; with --report, whether it learns.

    Several agents are shown in one table; --model shows one of them in full.

    \b
    Example:
      ratchet status --report --png learning_report.png
    """
    settings = options.read_project_settings(context, {"project": project, "store": store, "model": model})
    if tensorboard is not None:
        from ratchet.status import write_tensorboard

        settings = options.one_agent(settings)
        click.echo(f"{write_tensorboard(settings, tensorboard)} points: tensorboard --logdir {tensorboard}")
        return
    if report:
        _report(options.one_agent(settings), png, as_json)
        return
    if png is not None:
        raise click.UsageError("--png needs --report")
    from ratchet.status import collect_status, status_lines

    found = collect_status(settings)
    if as_json:
        options.print_json(found)
    else:
        click.echo("\n".join(status_lines(found)))


def _report(settings: Settings, png: Path | None, as_json: bool) -> None:
    from ratchet.status import read_report, read_tools, report_lines, save_report_plot, tool_lines
    from ratchet.store.reports.learning_report import to_dict

    found, tools = read_report(settings), read_tools(settings)
    if as_json:
        options.print_json(to_dict(found) | {"tools": tools})
    else:
        click.echo("\n".join([*report_lines(found), *tool_lines(tools)]))
    if png is not None:
        save_report_plot(found, png)
        click.echo(f"plot: {png}", err=True)


@click.command()
@options.base_model
@click.option("--task", metavar="TASK", help="Task for the workflow: a JSON object, a file, or a task set.")
@options.workflow
@options.judge
@click.option("--question", help="For the judge, if no call is recorded yet: a question, or a task's row as JSON.")
@click.option("--answer", help="The correct answer to --question.")
@click.option("--attempts", type=click.IntRange(1, 64), default=4, show_default=True, help="Attempts at the task.")
@options.concurrency
@options.proxy_url
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def doctor(context: click.Context, /, base_model: str | None, task: str | None, as_json: bool, **given: Any) -> int:
    """Check that training can work: vLLM, capture of calls, gradient, adapter swap, batches, judge.

    Failures name the remedy. The project should be up. For services that were started separately, give --proxy and
    --store: checks that need a project started by `ratchet up` are then skipped, which is no failure.

    The judge is checked on recorded calls; before the first one, with --question and --answer. With a real model on a
    CPU, the checks take minutes: each is named on stderr when it begins.

    With --workflow or --task, the agent makes a few attempts at one task, and every reason why training on them would
    have no effect is reported. Both may be set in ratchet.yaml (tuner.workflow, tuner.tasks).

    \b
    Example:
      ratchet up --base-model ./model --detach && ratchet doctor
      ratchet doctor --question "What is the capital of Norway?" --answer Oslo
      ratchet doctor --proxy https://proxy.example:8000 --store postgresql://ratchet@db/ratchet
      ratchet doctor --workflow my_agent:run --task '{"question": "2 + 2?", "answer": "4"}' --judge my_judge:judge
    """
    findings = []
    example = _judge_example(given.pop("question"), given.pop("answer"))
    announce = (lambda check: None) if as_json else _announce
    for finding in _check_results(context, base_model, task, given, example, announce):
        findings.append(finding)
        if not as_json:
            click.echo(strip_control_characters(finding.line()))
    if as_json:
        options.print_json([dataclasses.asdict(finding) for finding in findings])
    return 1 if any(finding.failed for finding in findings) else 0


def _announce(check: str) -> None:
    click.echo(f"...   {check}", err=True)


def _judge_example(question: str | None, answer: str | None) -> JudgeExample | None:
    from ratchet.checks.judge_quality_check import JudgeExample

    if question is None and answer is None:
        return None
    if question is None or answer is None:
        raise click.UsageError("--question and --answer belong together: give both")
    try:
        return JudgeExample.of(question, answer)
    except ValueError as error:
        raise click.UsageError(f"--question begins like a task's row and is not JSON: {error}") from error


def _check_results(
    context: click.Context,
    base_model: str | None,
    task: str | None,
    given: dict[str, Any],
    example: JudgeExample | None,
    announce: Callable[[str], None],
) -> Iterator[CheckResult]:
    if given["workflow"] is None and task is None:
        from ratchet.checks import doctor as doctor_checks
        from ratchet.trainer.settings.learner_settings import pinned

        own = {"project": given["project"], "base_model": base_model, "trainer.judge": given["judge"]}
        own |= {"model": given["model"], "store": given["store"], "tuner.proxy_url": given["proxy"]}
        settings = options.read_project_settings(context, own)
        proxy = settings.tuner_settings().proxy_url if given["proxy"] else None
        os.environ.update(pinned(settings.learner_devices))  # it trains as the trainer would
        yield from doctor_checks.run_checks(settings, proxy, example, announce)
        return
    from ratchet.checks import workflow_check
    from ratchet.commands.tune import settings_of

    settings = settings_of(context, given | {"tasks": None, "test_size": None, "seed": None})
    source = task or settings.tuner_settings().tasks
    if source is None:
        raise click.UsageError("the workflow needs a task: give --task JSON or a file, or set tuner.tasks")
    yield from workflow_check.run_checks(settings, workflow_check.task_of(source, settings))
