"""`ratchet proxy` and `ratchet trainer`: one service without a supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ratchet import options


@click.command()
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="A vLLM replica; repeat for more.")
@options.alias
@options.store_url
@click.option("--config", type=click.Path(path_type=Path), help="Settings file; the same as before the command.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on.  [default: 8000]")
@click.option("--capture", type=click.Choice(["strict", "relaxed"]), help="Durability of calls.  [default: strict]")
@click.option("--journal", type=click.Path(path_type=Path), help="Folder of the journal, one per proxy.")
@options.project
@click.pass_context
def proxy(
    context: click.Context,
    upstreams: tuple[str, ...],
    model: str | None,
    store: str | None,
    config: Path | None,
    host: str | None,
    port: int | None,
    capture: str | None,
    journal: Path | None,
    project: str | None,
) -> int:
    """Run only the proxy, for vLLM replicas that run elsewhere.

    \b
    Example:
      ratchet proxy --upstream http://127.0.0.1:8001 --model mail --store mail.db --port 8000
    """
    values: dict[str, Any] = {"project": project, "model": model, "store": store}
    values |= {"proxy.host": host, "proxy.port": port, "proxy.capture": capture}
    context.obj = config or context.obj
    settings = options.read_settings(context, values)
    derived: dict[str, Any] = {"upstreams": upstreams, "journal": journal}
    own = settings.proxy_settings(**{key: value for key, value in derived.items() if value})
    from ratchet.proxy.server import serve
    from ratchet.proxy.telemetry import logs

    logs.configure_logging(own.log_format, own.log_level)
    return serve(own, lambda url: click.echo(f"base_url: {url}/v1   model: {own.model}", err=True))


@click.command()
@options.store_url
@options.alias
@options.base_model
@options.judge
@click.option("--vllm", multiple=True, metavar="URL", help="A vLLM replica; repeat for more.")
@options.project
@click.pass_context
def trainer(
    context: click.Context,
    store: str | None,
    model: str | None,
    base_model: str | None,
    judge: str | None,
    vllm: tuple[str, ...],
    project: str | None,
) -> int:
    """Run only the trainer, for a proxy and vLLM replicas that run elsewhere.

    \b
    Example:
      ratchet trainer --store mail.db --model mail --base-model ./model --judge mail.judge:judge --vllm http://127.0.0.1:8001
    """
    values: dict[str, Any] = {"project": project, "model": model, "store": store, "base_model": base_model}
    values["trainer.judge"] = judge
    settings = options.read_settings(context, values)
    if not settings.has_judge:
        raise click.UsageError("no judge is set: give --judge module:function or a YAML file, or set trainer.judge")
    from ratchet.proxy.telemetry import logs
    from ratchet.supervisor.vllm_command import check_model
    from ratchet.trainer.settings.value_types import pinned

    derived: dict[str, Any] = {"vllm": vllm} if vllm else {}
    own = settings.trainer_settings(base_model=check_model(settings.base_model), **derived)
    os.environ.update(pinned(own.devices))  # before anything imports torch
    logs.configure_logging(own.log_format, own.log_level, _above_bars if sys.stderr.isatty() else None)
    from ratchet.trainer.process import run
    from ratchet.tuner.selection.release_evaluation import WorkflowEvaluator

    return run(own, make_workflow_evaluator=WorkflowEvaluator)


def _above_bars(line: str) -> None:
    """Write a log line to the terminal, above progress bars."""
    from ratchet.trainer.observability.progress import print_line

    print_line(line.rstrip("\n"))
