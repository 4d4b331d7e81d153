"""The services of a project as processes: command, environment and readiness check of each. Starts nothing.

The services read the settings that `up` resolved from one file without secrets. Secrets, including the store's
password, reach them by environment variable only. `python -P` keeps the working folder off their module path: a user's
own logging.py or proxy/ replaces no module of theirs.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ratchet.settings.masking import has_password, mask_arguments, mask_store_url, mask_variables
from ratchet.settings.project_settings import OTHER_VARIABLES, PREFIX, Settings, local_url
from ratchet.supervisor import ports, preflight_checks, vllm_command
from ratchet.trainer.settings.value_types import pinned

_PROBE_TIMEOUT = 3.0  # seconds
_DRAIN_TIMEOUT = 4.0  # seconds that running calls get when `up` stops
_TRAINER_READY = b"event=trainer_ready"


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run. `ready` is polled until it returns True."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready: Callable[[], bool]
    start_timeout_seconds: float
    stop_timeout_seconds: float  # from SIGTERM to SIGKILL
    heading: str = ""  # the first line of its log


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What `up` starts: the services, their URLs, and notes for the user, such as ports that changed."""

    services: tuple[Service, ...]
    vllm: vllm_command.VllmCommand
    vllm_url: str
    proxy_url: str
    notes: tuple[str, ...]
    settings: Settings  # with the chosen ports

    @property
    def console(self) -> str | None:
        """The URL of the console; None if it is turned off."""
        return f"{self.proxy_url}/ui/" if self.settings.proxy_settings().console else None

    @property
    def base_url(self) -> str:
        """The base_url for agents."""
        return f"{self.proxy_url}/v1"


def plan_services(settings: Settings, *, config: Path) -> LaunchPlan:
    """Return the services of a project; the resolved settings will be in the file `config`.

    Raises VllmNotFound, GpuMemoryTooLow, BaseModelNotFound, PortInUse or SettingsError.
    """
    vllm_command.check_installed(settings)
    model = vllm_command.check_model(settings.base_model)
    if vllm_command.has_visible_gpu(settings):
        preflight_checks.check_gpu_memory(settings.vllm.devices, settings.vllm.gpu_memory_utilization)
    settings, notes = _with_ports(settings)
    if not vllm_command.is_folder(model):
        notes.append(f"base model {model}: no such folder; using it as a hub name")
    proxy_url = local_url(settings.proxy_settings().host, settings.proxy["port"])
    vllm_url = local_url(settings.vllm.host, settings.vllm.port)
    vllm = vllm_command.build_command(settings, settings.vllm.port)
    services = [_vllm_service(settings, vllm, vllm_url), _proxy_service(settings, proxy_url, config)]
    if settings.has_judge:
        preflight_checks.check_judge(settings, _service_environment(settings))
        services.append(_trainer_service(settings, config))
    else:
        notes.append("no judge is set (trainer.judge): calls are recorded, nothing is trained")
    return LaunchPlan(tuple(services), vllm, vllm_url, proxy_url, tuple(notes), settings)


def write_resolved_settings(settings: Settings, file: Path) -> None:
    """Write the settings for the services, without secrets: they get the store's password by variable."""
    content = settings.model_dump(mode="json")
    content["vllm"]["env"] = mask_variables(settings.vllm.env)
    content["vllm"]["extra_args"] = list(mask_arguments(settings.vllm.extra_args))
    content["store"] = settings.store and mask_store_url(settings.store)
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def _with_ports(settings: Settings) -> tuple[Settings, list[str]]:
    """Return the settings with free ports, and a note for each port that changed."""
    notes: list[str] = []
    proxy = settings.proxy_settings()
    proxy_port = ports.choose_port(
        "proxy", "proxy.port", proxy.host, proxy.port, fixed=settings.is_set("proxy", "port"), taken=set()
    )
    vllm = settings.vllm
    fixed = settings.is_set("vllm", "port")
    vllm_port = ports.choose_port("vllm", "vllm.port", vllm.host, vllm.port, fixed=fixed, taken={proxy_port})
    for name, wanted, got in (("proxy", proxy.port, proxy_port), ("vllm", vllm.port, vllm_port)):
        if wanted not in (got, 0):
            owner = ports.port_holder(wanted)
            used = f"used by pid {owner.pid}" if owner else "in use"
            notes.append(f"{name}: port {wanted} is {used}; using {got}")
    changes = {
        "vllm": vllm.model_copy(update={"port": vllm_port}),
        # vLLM stops after the proxy, so this limits how long stopping takes.
        "proxy": {
            **settings.proxy,
            "port": proxy_port,
            "drain_timeout_seconds": min(proxy.drain_timeout_seconds, _DRAIN_TIMEOUT),
            "drain_delay_seconds": 0.0,
        },
    }
    return settings.model_copy(update=changes), notes


def _vllm_service(settings: Settings, vllm: vllm_command.VllmCommand, url: str) -> Service:
    environment = _without_settings(os.environ) | dict(vllm.environment)
    return Service(
        name="vllm",
        command=vllm.arguments,
        environment={name: value for name, value in environment.items() if name not in OTHER_VARIABLES},
        ready=lambda: _answers(f"{url}/health"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=8.0,
        heading=f"command: {vllm}",
    )


def _proxy_service(settings: Settings, url: str, config: Path) -> Service:
    return Service(
        name="proxy",
        command=(sys.executable, "-P", "-m", "ratchet", "--config", str(config), "proxy"),
        environment=_service_environment(settings),
        ready=lambda: _answers(f"{url}/health/ready"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=_DRAIN_TIMEOUT + 4.0,
    )


def _trainer_service(settings: Settings, config: Path) -> Service:
    log = settings.state.log("trainer")
    return Service(
        name="trainer",
        command=(sys.executable, "-P", "-m", *_launcher(settings), "ratchet", "--config", str(config), "trainer"),
        environment=_service_environment(settings) | pinned(settings.trainer_devices),
        ready=lambda: _TRAINER_READY in log.read_bytes(),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=10.0,
    )


def _launcher(settings: Settings) -> tuple[str, ...]:
    """Return the launcher of several trainer processes; nothing for one process."""
    count = int(settings.trainer.get("num_processes") or 1)
    if count == 1:
        return ()
    chosen = {"num_processes": count, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    named = [text for name, value in (chosen | {"main_process_port": 0}).items() for text in (f"--{name}", str(value))]
    return ("accelerate.commands.launch", "--multi_gpu", *named, "-m")


def _service_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a service that opens the store."""
    environment = _without_settings(os.environ)
    if has_password(settings.store_url):
        environment[f"{PREFIX}STORE"] = settings.store_url
    return environment


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables whose values the resolved settings hold."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in OTHER_VARIABLES}


def _answers(url: str) -> bool:
    """Return whether a GET returns 200. Ignores HTTP proxies from the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
