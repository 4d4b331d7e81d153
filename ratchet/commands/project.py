"""`ratchet up`, `down`, `reload`, `status`, `doctor`, `demo` and `plan`: the commands for a whole project."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import print_json, prints_json, show, strip_control_characters
from ratchet.trainer.settings.learner_settings import MAX_SERVABLE_RANK

if TYPE_CHECKING:
    from ratchet.checks.check_result import CheckResult
    from ratchet.checks.judge_quality_check import JudgeExample
    from ratchet.settings.project_settings import Settings
    from ratchet.trainer.planning.plan import OptionFit, Plan


@click.command()
@options.project
@options.base_model
@options.alias
@options.judge
@options.store_url
@options.setting("proxy.port", "--port", type=int, help="Port of the proxy, for agents.  [default: 8000]")
@options.setting("vllm.port", "--vllm-port", type=int, help="Port of vLLM.  [default: 8001]")
@click.option("--detach", is_flag=True, help="Run in the background; return once everything is ready.")
@options.as_json
@options.with_settings(options.read_settings)
def up(settings: Settings, detach: bool) -> None:
    """Start vLLM, proxy, trainer and learner of a project and supervise them.

    When it ends, for whatever reason, all of them end. Without a judge, calls are recorded and nothing is trained.

    \b
    Example:
      ratchet up --base-model Qwen/Qwen2.5-0.5B-Instruct --judge my_agent.judge:judge
    """
    from ratchet.supervisor import up as supervision

    if not detach:
        supervision.run_foreground(settings)
        return
    # The same command line without --detach: there is one way to start.
    running = supervision.run_detached(settings, [argument for argument in sys.argv[1:] if argument != "--detach"])
    named = supervision.names_of_agents(settings)
    lines = [f"base_url: {running['base_url']}   {named}   (`ratchet down` stops everything)"]
    show(running, lines + ([f"console: {running['console']}"] if running["console"] else []))


@click.command()
@options.project
@options.as_json
@options.with_settings(options.read_settings)
def down(settings: Settings) -> None:
    """Stop everything that `up` started. Succeeds if nothing runs.

    \b
    Example:
      ratchet down --project mail
    """
    from ratchet.supervisor import up as supervision

    stopped = supervision.down(settings)
    done = f"stopped {', '.join(stopped)}" if stopped else "nothing was running"
    show({"project": settings.project, "stopped": stopped}, [f"project {settings.project}: {done}"])


@click.command("reload")
@options.project
@options.as_json
@options.with_settings(options.read_settings)
def reload_agents(settings: Settings) -> None:
    """Apply changes of `agents` in ratchet.yaml to the running project: added agents join, removed ones leave.

    Other agents are served and trained meanwhile. Settings, judges and the base model are checked first: an error
    changes nothing. Only `agents` is applied; other keys that differ are printed, because they need a restart.

    \b
    Example:
      ratchet reload
    """
    from ratchet.supervisor import up as supervision

    done = supervision.reload_agents(settings, lambda text: click.echo(text, err=True))
    show(done, done.lines())


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
@options.with_settings(options.read_project_settings)
def status(settings: Settings, report: bool, png: Path | None, tensorboard: Path | None) -> None:
    """Show processes, ports, versions, trajectories by state, rounds and alarms; with --report, whether it learns.

    Several agents are shown in one table; --model shows one of them in full.

    \b
    Example:
      ratchet status --report --png learning_report.png
    """
    from ratchet.status import collect_status, status_lines, write_tensorboard

    if tensorboard is not None:
        points = write_tensorboard(options.one_agent(settings), tensorboard)
        click.echo(f"{points} points: tensorboard --logdir {tensorboard}")
    elif report:
        _report(options.one_agent(settings), png)
    elif png is not None:
        raise click.UsageError("--png needs --report")
    else:
        found = collect_status(settings)
        show(found, status_lines(found))


def _report(settings: Settings, png: Path | None) -> None:
    from ratchet.status import read_report, read_tools, report_lines, save_report_plot, tool_lines
    from ratchet.store.reports.learning_report import to_dict

    found, tools = read_report(settings), read_tools(settings)
    show(to_dict(found) | {"tools": tools}, [*report_lines(found), *tool_lines(tools)])
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
@options.setting(
    "tuner.attempts",
    "--attempts",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Attempts at the task.",
)
@options.concurrency
@options.proxy_url
@options.alias
@options.store_url
@options.project
@options.as_json
@options.with_settings(options.read_project_settings)
def doctor(settings: Settings, task: str | None, question: str | None, answer: str | None) -> int:
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
    for finding in _check_results(settings, task, _judge_example(question, answer)):
        findings.append(finding)
        if not prints_json():
            click.echo(strip_control_characters(finding.line()))
    if prints_json():
        print_json(findings)
    return 1 if any(finding.failed for finding in findings) else 0


def _announce(check: str) -> None:
    if not prints_json():
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


def _check_results(settings: Settings, task: str | None, example: JudgeExample | None) -> Iterator[CheckResult]:
    given = click.get_current_context().params
    if given["workflow"] is None and task is None:
        from ratchet.checks import doctor as doctor_checks
        from ratchet.trainer.settings.learner_settings import pinned

        proxy = settings.tuner.proxy_url if given["proxy"] else None
        os.environ.update(pinned(settings.learner.devices))  # it trains as the trainer would
        yield from doctor_checks.run_checks(settings, proxy, example, _announce)
        return
    from ratchet.checks import workflow_check

    settings = options.one_agent(settings)
    source = task or settings.tuner.tasks
    if source is None:
        raise click.UsageError("the workflow needs a task: give --task JSON or a file, or set tuner.tasks")
    yield from workflow_check.run_checks(settings, workflow_check.task_of(source, settings))


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of tasks and learner.")
@click.option("--real", is_flag=True, help="A real pretrained model, SmolLM2-135M-Instruct, learns to label reviews.")
@click.option(
    "--model",
    metavar="PATH",
    help="Folder or hub name in place of the tiny policy (needs a GPU), or with --real of the downloaded model.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Number format of vLLM and learner.")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Rounds of training tasks.  [default: 20; with --real no limit]"
)
@click.option(
    "--versions",
    type=click.IntRange(min=1),
    help="With --real: the training traffic ends once this version is live.  [default: 10]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="With --real: the longest time of training traffic.  [default: 12]",
)
@click.option("--concurrency", type=click.IntRange(min=1), help="Concurrent agents.  [default: 32; with --real 16]")
@click.option("--held-out-tasks", type=click.IntRange(min=1), help="Held-out tasks.  [default: 150; with --real 60]")
@click.option("--held-out-attempts", type=click.IntRange(min=1), help="Attempts each.  [default: 2; with --real 3]")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the state.  [default: .ratchet]")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="A setting of the demo; repeatable.")
def demo(real: bool, model: str | None, dtype: str | None, settings: tuple[str, ...], **given: Any) -> int:
    """Train an unmodified agent on the real vLLM and measure its improvement.

    Exits with 0 only if the success rate on held-out tasks rose significantly. Results: .ratchet/demo/result.json,
    with --real .ratchet/demo-real/result.json. The demo has its own settings: ratchet.yaml and RATCHET_* variables are
    ignored, except secrets; --set changes one.

    \b
    Example:
      ratchet demo --seed 2
      ratchet demo --real --dtype bfloat16
      ratchet demo --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from ratchet.demo.run import REAL_DEFAULTS, DemoOptions, run

    for name in ("versions", "minutes"):
        if given[name] and not real:
            raise click.UsageError(f"--{name} needs --real; without it, --rounds sets the length")
    formats: dict[tuple[str, ...], Any] = {("vllm", "dtype"): dtype, ("learner", "dtype"): dtype} if dtype else {}
    changes = formats | dict(map(_key_and_value, settings))
    chosen = {name: value for name, value in given.items() if value is not None}
    default = REAL_DEFAULTS if real else DemoOptions()
    return run(dataclasses.replace(default, base_model=model, changes=changes, **chosen))


def _key_and_value(text: str) -> tuple[tuple[str, ...], Any]:
    """Return key path and value of `vllm.max_num_seqs=8`; the value is YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--set {text}: give KEY=VALUE, such as --set learner.learning_rate=1e-4")
    try:
        return tuple(key.strip().split(".")), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise click.UsageError(f"--set {text}: the value is not YAML: {' '.join(str(error).split())}") from error


# `ratchet plan`: which settings fit which GPUs, by formula, before anything is loaded.

_GIB = 2**30
_MOST_GPUS = 512


def _gpus(text: str) -> tuple[int, int]:
    """Return number and bytes of GPUs of one kind, such as `8x80GB`. Raises BadParameter."""
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(\d+(?:\.\d+)?)\s*(?:[gG](?:i?[bB])?)?", text.strip())
    if match is None or not int(match[1] or 1) or not float(match[2]):
        raise click.BadParameter(f"{text!r} are no GPUs; write 8x80GB, or 24GB for one")
    if int(match[1] or 1) > _MOST_GPUS:
        raise click.BadParameter(f"{text!r}: a plan is for at most {_MOST_GPUS} GPUs")
    return int(match[1] or 1), round(float(match[2]) * _GIB)


@click.command()
@click.option("--base-model", required=True, metavar="PATH", help="Base model: a folder or a hub name.")
@click.option("--gpus", required=True, type=_gpus, metavar="NxGB", help="Number and memory of the GPUs: 8x80GB.")
@click.option(
    "--context",
    type=click.IntRange(min=1024),
    help="Tokens of the longest row, and of vLLM's context.  [default: 32768, or the model's own if it is less]",
)
@click.option(
    "--lora-r",
    type=click.IntRange(1, MAX_SERVABLE_RANK),
    default=16,
    show_default=True,
    help="Rank of the adapter, and the maximum that vLLM serves.",
)
@options.as_json
def plan(base_model: str, gpus: tuple[int, int], context: int | None, lora_r: int, **_: Any) -> None:
    """Plan the memory of vLLM and learner from a model's config.json, and print settings that fit.

    Loads no weights. All figures of GPU memory are for each GPU.

    \b
    Example:
      ratchet plan --base-model Qwen/Qwen2.5-7B-Instruct --gpus 8x80GB --context 32768
    """
    from ratchet.trainer.planning.model_shape import extends_context, read_config, read_shape
    from ratchet.trainer.planning.plan import PlanRequest, make_plan

    config = read_config(base_model)
    shape = read_shape(config)
    if context is not None and context > shape.max_positions and not extends_context(config):
        raise click.BadParameter(
            f"{context} tokens are more than the model's own {shape.max_positions} (max_position_embeddings), and vLLM "
            f"refuses that: plan for {shape.max_positions}, or set rope_scaling in the model's config.json",
            param_hint="'--context'",
        )
    number, size = gpus
    request = PlanRequest(number, size, context or min(32768, shape.max_positions), rank=lora_r)
    found = make_plan(shape, request)
    data = {"base_model": base_model, "concurrent_sequences": found.concurrent_sequences}
    settings = _settings(found, base_model)
    show(dataclasses.asdict(found) | data | {"settings": settings}, _lines(found, base_model, settings))


def _settings(found: Plan, base_model: str) -> dict[str, Any]:
    """Return the settings of a plan, as ratchet.yaml holds them."""
    option = found.learner.option
    vllm: dict[str, Any] = {"max_model_len": found.request.context}
    learner: dict[str, Any] = {"lora_r": found.request.rank}
    if not found.shared:
        vllm |= {"devices": _devices(0, found.vllm_gpus), "tensor_parallel_size": found.vllm_gpus}
        learner |= {"devices": _devices(found.vllm_gpus, found.learner_gpus), "num_processes": found.learner_gpus}
    vllm["gpu_memory_utilization"] = found.gpu_memory_utilization
    if option.sharding != "none":
        learner["sharding"] = option.sharding
    if option.activation_offload:
        learner["activation_offload"] = True
    if option.quantization != "none":
        learner["quantization"] = option.quantization
    learner |= {"token_budget": found.token_budget, "max_length": found.request.context}
    return {"base_model": base_model, "vllm": vllm, "learner": learner}


def _devices(first: int, number: int) -> str:
    return ",".join(str(index) for index in range(first, first + number))


def _lines(found: Plan, base_model: str, settings: dict[str, Any]) -> list[str]:
    import yaml

    request, serving, memory = found.request, found.serving, found.learner.memory
    where = "the same GPU" if found.shared else f"{found.learner_gpus} GPU(s)"
    return [
        f"{base_model}: {_count(found.parameters)} parameters, adapter of rank {request.rank}: "
        f"{_count(found.lora_parameters)}",
        f"vLLM on {found.vllm_gpus} GPU(s), {found.gpu_memory_utilization:.0%} of each: "
        + _parts(serving, ("weights", "adapters", "activations", "runtime"))
        + f", KV cache {found.kv_cache_bytes / _GIB:.1f} GiB: {found.concurrent_sequences} sequences of "
        f"{request.context} tokens",
        f"learner on {where}, {memory.total / _GIB:.1f} GiB of each: "
        + _parts(memory, ("weights", "adapter", "gradients", "optimizer", "activations", "runtime"))
        + (f"; {memory.host / _GIB:.1f} GiB of the host's memory" if memory.host else ""),
        "",
        f"learner's settings, with a row of {request.context} tokens:",
        *(_alternative(fit, "*" if fit.option == found.learner.option else " ") for fit in found.alternatives),
        "",
        "# ratchet.yaml",
        yaml.safe_dump(settings, sort_keys=False).rstrip(),
        "",
        "ratchet up --judge my_agent.judge:judge",
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _parts(memory: Any, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {getattr(memory, name) / _GIB:.1f}" for name in names) + " GiB"


def _alternative(fit: OptionFit, mark: str) -> str:
    rows = f"rows of up to {fit.max_row_length} tokens" if fit.max_row_length else "no row fits"
    verdict = "fits" if fit.fits else "does not fit"
    return f"{mark} {fit.option}: {fit.memory.total / _GIB:.1f} GiB, {verdict}; {rows}"
