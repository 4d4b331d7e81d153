"""`ratchet proxy`, `ratchet trainer` and `ratchet learner`: one service without a supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.trainer.controller.process import ControllerProcess
    from ratchet.trainer.learner_client import LearnerAccess
    from ratchet.trainer.settings.trainer_settings import TrainerSettings


def _use_config(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    context.obj = file or context.obj


@click.command()
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="A vLLM replica; repeat for more.")
@click.option("--models-only", is_flag=True, help="Serve only the models of `model_list`: no agent, no vLLM.")
@options.alias
@options.store_url
@click.option(
    "--config", type=click.Path(path_type=Path), expose_value=False, callback=_use_config,
    help="Settings file; also accepted before the command.",
)  # fmt: skip
@options.setting("proxy.host", "--host", help="Address to listen on.  [default: 127.0.0.1]")
@options.setting("proxy.port", "--port", type=int, help="Port to listen on.  [default: 8000]")
@options.setting(
    "proxy.workers", "--workers", metavar="NUMBER|auto", help="Processes that serve the port.  [default: 1]"
)
@options.setting(
    "proxy.coordinator", "--coordinator", metavar="URL", help="Coordinators of other machines, separated by commas."
)
@options.setting(
    "proxy.coordinator_listen", "--coordinator-listen", metavar="ADDRESS:PORT",
    help="Also serve workers of other machines.",
)  # fmt: skip
@options.setting(
    "proxy.capture", "--capture", type=click.Choice(["strict", "relaxed"]),
    help="Durability of calls.  [default: strict]",
)  # fmt: skip
@click.option("--journal", type=click.Path(path_type=Path), help="Folder of the journal, one per proxy.")
@options.project
@options.with_settings(options.read_settings)
@click.pass_context
def proxy(
    context: click.Context, settings: Settings, upstreams: tuple[str, ...], models_only: bool, journal: Path | None
) -> int:
    """Run only the proxy, for vLLM replicas that run elsewhere.

    It applies changes of `agents` in the settings file while it runs.

    \b
    Example:
      ratchet proxy --upstream http://127.0.0.1:8001 --model mail --store mail.db --port 8000
    """
    if models_only and (upstreams or context.params["model"]):
        raise click.UsageError("--models-only serves no agent: leave --upstream and --model out")
    from ratchet.proxy.server import SetAgents
    from ratchet.proxy.supervisor.supervisor import serve
    from ratchet.proxy.telemetry import logs
    from ratchet.settings.project_settings import with_values

    own = settings.proxy_of_models if models_only else settings.proxy
    if upstreams:
        own = settings.proxy_before(upstreams)
    if journal:
        own = with_values(own, "proxy", journal=journal)
    logs.configure_logging(own.log_format, own.log_level)
    os.umask(0o077)  # what it and its processes write is readable by its owner only: journal, store, state folder

    def follow_agents(set_agents: SetAgents) -> None:
        _follow(context, settings, lambda changed: set_agents(tuple(changed.agents_by_name)))

    names = ", ".join(own.agents or dict.fromkeys(entry.model_name for entry in own.model_list))
    return serve(
        own,
        lambda url: click.echo(f"base_url: {url}/v1   model: {names}", err=True),
        None if models_only else follow_agents,
    )


@click.command()
@options.store_url
@options.alias
@options.base_model
@options.judge
@click.option("--vllm", multiple=True, metavar="URL", help="A vLLM replica; repeat for more.")
@options.project
@options.with_settings(options.read_settings)
@click.pass_context
def trainer(context: click.Context, settings: Settings, vllm: tuple[str, ...]) -> int:
    """Run only the trainer of all agents, for a proxy and vLLM replicas that run elsewhere.

    It starts its learner, unless `learner.url` names one. It applies changes of `agents` in the settings file while it
    runs.

    \b
    Example:
      ratchet trainer --store mail.db --model mail --base-model ./model --judge mail.judge:judge --vllm http://127.0.0.1:8001
    """
    if not settings.has_judge:
        raise click.UsageError("no judge is set: give --judge module:function or a YAML file, or set trainer.judge")
    from ratchet.proxy.telemetry import logs
    from ratchet.settings.project_settings import with_values
    from ratchet.supervisor.vllm_command import check_model

    own: dict[str, Any] = {"base_model": check_model(settings.base_model)} | ({"vllm": vllm} if vllm else {})

    def agents_of(changed: Settings) -> dict[str, TrainerSettings]:
        """Return the settings of the agents that have a judge."""
        judged = {name: agent for name, agent in changed.agents_by_name.items() if agent.has_judge}
        return {name: with_values(agent, "trainer", **own) for name, agent in judged.items()}

    agents = agents_of(settings)
    first = next(iter(agents.values()))
    logs.configure_logging(first.log_format, first.log_level, _above_bars if sys.stderr.isatty() else None)
    from ratchet.supervisor.services import run_with_learner
    from ratchet.trainer.controller.process import run
    from ratchet.tuner.selection import WorkflowEvaluator

    def run_agents(learner: LearnerAccess) -> int:
        def follow_agents(process: ControllerProcess) -> None:
            learner.call_on_failure(process.stop)
            _follow(context, settings, lambda changed: process.set_agents(agents_of(changed)))

        return run(agents, learner.learner_of, WorkflowEvaluator, follow_agents)

    return run_with_learner(settings, first, run_agents)


@click.command()
@options.base_model
@options.setting(
    "learner.host", "--host", help="Address to listen on; any but loopback requires RATCHET_LEARNER_TOKEN."
)
@options.setting("learner.port", "--port", type=int, help="Port to listen on; 0: any free one.  [default: 8002]")
@options.project
@options.with_settings(options.read_settings)
def learner(settings: Settings) -> int:
    """Run only the learner, for trainers that run elsewhere. If it spans several machines, run this on each.

    The trainers reach it at `learner.url` with the same RATCHET_LEARNER_TOKEN.

    \b
    Example:
      RATCHET_LEARNER_TOKEN=secret ratchet learner --base-model ./model --host 0.0.0.0 --port 8002
    """
    from ratchet.proxy.telemetry import logs
    from ratchet.supervisor.vllm_command import check_model
    from ratchet.trainer.learner import launch
    from ratchet.trainer.settings.learner_settings import pinned

    model = check_model(settings.base_model)
    own = settings.learner
    os.environ.update(pinned(own.devices))  # before anything imports torch
    torchrun = launch.torchrun_command(own, os.environ, (sys.executable, "-P", "-m", "ratchet", *sys.argv[1:]))
    if torchrun is not None:
        os.execv(torchrun[0], torchrun)
    logs.configure_logging(settings.trainer.log_format, settings.trainer.log_level)
    settings.state.make(min_free_disk_mb=settings.min_free_disk_mb)
    from ratchet.trainer.learner_service.process import LearnerFolders, run

    state, adapters, first = settings.state, settings.adapters, next(iter(settings.agents_by_name))
    kept = () if adapters.store is None or adapters.is_remote else (Path(adapters.store),)
    url = adapters.store if adapters.is_remote else None
    folders = LearnerFolders(
        state.learner, state.base_digests(first), (state.models, *kept), url, adapters.max_cache_bytes
    )
    return run(model, own, folders)


def _follow(context: click.Context, settings: Settings, apply: Callable[[Settings], object]) -> None:
    """Apply the agents of the settings file whenever it changes, until the process ends."""
    from ratchet.settings.agents_watch import AgentsWatch

    file = options.settings_file(context)
    if file is not None and context.params["model"] is None:  # an option names the one agent: no other one joins
        AgentsWatch(file, settings, lambda: options.read_settings(context), apply).start()


def _above_bars(line: str) -> None:
    """Write a log line to the terminal, above progress bars."""
    from ratchet.trainer.observability.progress import print_line

    print_line(line.rstrip("\n"))
