"""The rooms of a project as processes: the command of each, its environment, and how to see that it is ready.

Promises that the rooms get exactly the settings that `up` resolved, through one file without secrets; secrets reach
them by variable only, the password of the store among them. Starts nothing.
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

from ratchet import urls
from ratchet.settings import OTHER_VARIABLES, PREFIX, Settings
from ratchet.settings.masking import has_password, mask_arguments, mask_store_url, mask_variables
from ratchet.supervisor import gpu_memory, ports, vllm_command
from ratchet.supervisor.judge_check import check_judge
from ratchet.trainer.settings.devices import pinned

_PROBE_TIMEOUT = 3.0  # seconds
_DRAIN = 4.0  # seconds that running calls get when `up` stops
_TRAINER_READY = b"event=trainer_ready"


@dataclass(frozen=True, slots=True)
class Room:
    """One process to run: `ready` is asked until it says yes; `grace` is what it gets to end, in seconds."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready: Callable[[], bool]
    start_timeout_seconds: float
    grace: float
    heading: str = ""  # the first line of its log


@dataclass(frozen=True, slots=True)
class Plan:
    """What `up` starts: the rooms, where they listen, and what to tell the user about ports that had to move."""

    rooms: tuple[Room, ...]
    vllm: vllm_command.Engine
    vllm_url: str
    proxy_url: str
    notes: tuple[str, ...]
    settings: Settings  # with the ports that were chosen

    @property
    def console(self) -> str | None:
        """Where the operator's pages are; None where they are turned off."""
        return f"{self.proxy_url}/ui/" if self.settings.proxy_settings().console else None

    @property
    def base_url(self) -> str:
        """What agents set as their base_url."""
        return f"{self.proxy_url}/v1"


def plan(settings: Settings, *, config: Path) -> Plan:
    """Return the rooms of a project; `config` is where the resolved settings will be written.

    Raises VllmNotFound, GpuMemoryTooLow, BaseModelNotFound, PortInUse or SettingsError.
    """
    vllm_command.check_installed(settings)
    model = vllm_command.check_model(settings.base_model)
    if vllm_command.has_visible_gpu(settings):
        gpu_memory.check_gpu_memory(settings.vllm.devices, settings.vllm.gpu_memory_utilization)
    settings, notes = _with_ports(settings)
    if not vllm_command.is_folder(model):
        notes.append(f"base model {model}: no folder of that name here; taken as a hub name")
    proxy_url = urls.url(settings.proxy_settings().host, settings.proxy["port"])
    vllm_url = urls.url(settings.vllm.host, settings.vllm.port)
    vllm = vllm_command.plan(settings, settings.vllm.port)
    rooms = [_vllm_service(settings, vllm, vllm_url), _proxy_service(settings, proxy_url, config)]
    if settings.has_judge:
        check_judge(settings, _service_environment(settings))
        rooms.append(_trainer_service(settings, config))
    else:
        notes.append("no judge is named (trainer.judge): calls are recorded, nothing is trained")
    return Plan(tuple(rooms), vllm, vllm_url, proxy_url, tuple(notes), settings)


def write_resolved_settings(settings: Settings, file: Path) -> None:
    """Write the settings for the rooms, without what is secret: they get the store's password by variable."""
    content = settings.model_dump(mode="json")
    content["vllm"]["env"] = mask_variables(settings.vllm.env)
    content["vllm"]["extra_args"] = list(mask_arguments(settings.vllm.extra_args))
    content["store"] = settings.store and mask_store_url(settings.store)
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def _with_ports(settings: Settings) -> tuple[Settings, list[str]]:
    """Return the settings with free ports, and a note for each port that moved."""
    notes: list[str] = []
    proxy = settings.proxy_settings()
    proxy_port = ports.choose(
        "proxy", "proxy.port", proxy.host, proxy.port, fixed=settings.chosen("proxy", "port"), taken=set()
    )
    vllm = settings.vllm
    fixed = settings.chosen("vllm", "port")
    vllm_port = ports.choose("vllm", "vllm.port", vllm.host, vllm.port, fixed=fixed, taken={proxy_port})
    for name, wanted, got in (("proxy", proxy.port, proxy_port), ("vllm", vllm.port, vllm_port)):
        if wanted not in (got, 0):
            who = ports.holder(wanted)
            held = f"held by pid {who.pid}" if who else "taken"
            notes.append(f"{name}: port {wanted} is {held}; using {got}")
    changes = {
        "vllm": vllm.model_copy(update={"port": vllm_port}),
        # vLLM waits with its own end for the proxy's, so this bounds how long stopping takes.
        "proxy": {
            **settings.proxy,
            "port": proxy_port,
            "drain_timeout_seconds": min(proxy.drain_timeout_seconds, _DRAIN),
            "drain_delay_seconds": 0.0,
        },
    }
    return settings.model_copy(update=changes), notes


def _vllm_service(settings: Settings, vllm: vllm_command.Engine, url: str) -> Room:
    environment = _without_settings(os.environ) | dict(vllm.environment)
    return Room(
        name="vllm",
        command=vllm.arguments,
        environment={name: value for name, value in environment.items() if name not in OTHER_VARIABLES},
        ready=lambda: _answers(f"{url}/health"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        grace=8.0,
        heading=f"command: {vllm}",
    )


def _proxy_service(settings: Settings, url: str, config: Path) -> Room:
    return Room(
        name="proxy",
        command=(sys.executable, "-m", "ratchet", "--config", str(config), "proxy"),
        environment=_service_environment(settings),
        ready=lambda: _answers(f"{url}/health/ready"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        grace=_DRAIN + 4.0,
    )


def _trainer_service(settings: Settings, config: Path) -> Room:
    log = settings.state.log("trainer")
    return Room(
        name="trainer",
        command=(sys.executable, "-m", *_launcher(settings), "ratchet", "--config", str(config), "trainer"),
        environment=_service_environment(settings) | pinned(settings.trainer_devices),
        ready=lambda: _TRAINER_READY in log.read_bytes(),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        grace=10.0,
    )


def _launcher(settings: Settings) -> tuple[str, ...]:
    """Return what starts several processes of a module; nothing for one."""
    count = int(settings.trainer.get("num_processes") or 1)
    if count == 1:
        return ()
    chosen = {"num_processes": count, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    named = [text for name, value in (chosen | {"main_process_port": 0}).items() for text in (f"--{name}", str(value))]
    return ("accelerate.commands.launch", "--multi_gpu", *named, "-m")


def _service_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a room that uses the store."""
    environment = _without_settings(os.environ)
    if has_password(settings.store_url):
        environment[f"{PREFIX}STORE"] = settings.store_url
    return environment


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that the resolved settings already hold."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in OTHER_VARIABLES}


def _answers(url: str) -> bool:
    """Return whether a GET is answered with 200. Proxies of the environment are not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
