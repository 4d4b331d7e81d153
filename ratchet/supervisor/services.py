"""The services of a project as processes: command, environment and readiness check of each. Starts nothing.

A run on models of `model_list` alone needs the proxy only (`plan_models_only`).

The services read the settings that `up` resolved from one file without secrets. Secrets, including the store's
password, reach them by environment variable only. `python -P` keeps the working folder off their module path: a user's
own logging.py or proxy/ replaces no module of theirs.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ratchet.proxy.model_list import check_keys
from ratchet.settings.masking import has_password, mask_arguments, mask_store_url, mask_variables
from ratchet.settings.project_settings import OTHER_VARIABLES, PREFIX, Settings, local_url
from ratchet.settings.setting_errors import listed
from ratchet.supervisor import memory_checks, ports, preflight_checks, vllm_command
from ratchet.supervisor.adapter_slots import describe_thrashing
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.settings.learner_settings import pinned

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
    starts_after: tuple[str, ...] = ()  # services that are ready before this one starts
    # The service that starts without this one: they share a GPU, whose free memory that one measures when it starts.
    stops_for: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What `up` starts: the services, their URLs, and notes for the user, such as ports that changed."""

    services: tuple[Service, ...]
    vllm: vllm_command.VllmCommand  # without arguments if the proxy serves `model_list` alone
    vllm_url: str | None  # None: the same
    proxy_url: str
    notes: tuple[str, ...]
    settings: Settings  # with the chosen ports
    learner_url: str | None = None  # None: nothing is trained
    learner_token: str | None = None  # of a learner that `up` starts, unless the user set one

    @property
    def console(self) -> str | None:
        """The URL of the console; None if it is turned off."""
        return f"{self.proxy_url}/ui/" if self.settings.proxy.console else None

    @property
    def base_url(self) -> str:
        """The base_url for agents."""
        return f"{self.proxy_url}/v1"


def plan_services(settings: Settings, *, config: Path) -> LaunchPlan:
    """Return the services of a project; the resolved settings will be in the file `config`.

    Raises CliError, ProxyError or SettingsError.
    """
    vllm_command.check_installed(settings)
    model = vllm_command.check_model(settings.base_model)
    check_keys(settings.model_list, os.environ)
    memory = _planned_memory(settings)
    starts_learner = settings.has_judge and settings.learner.url is None
    settings, notes = _with_ports(memory.settings, starts_learner=starts_learner)
    notes += memory.notes
    if not vllm_command.is_folder(model):
        notes.append(f"base model {model}: no such folder; using it as a hub name")
    if (warning := describe_thrashing(settings)) is not None:
        notes.append(warning)
    proxy_url = _proxy_url(settings)
    vllm_url = local_url(settings.vllm.host, settings.vllm.port)
    vllm = vllm_command.build_command(settings, settings.vllm.port)
    notes += vllm.notes
    services = [_vllm_service(settings, vllm, vllm_url), _proxy_service(settings, proxy_url, config)]
    token = secrets.token_urlsafe(32) if starts_learner and not os.environ.get(TOKEN_VARIABLE) else None
    if settings.has_judge:
        preflight_checks.check_judges(settings, service_environment(settings))
        services += _training_services(settings, config, token, starts_learner=starts_learner, shared=memory.shared)
        if without := [name for name, agent in settings.agents_by_name.items() if not agent.has_judge]:
            notes.append(f"no judge is set for {listed(without)}: calls are recorded, nothing is trained")
    else:
        notes.append("no judge is set (trainer.judge): calls are recorded, nothing is trained")
    learner_url = settings.learner.url if settings.has_judge else None
    return LaunchPlan(tuple(services), vllm, vllm_url, proxy_url, tuple(notes), settings, learner_url, token)


def plan_models_only(settings: Settings, *, config: Path) -> LaunchPlan:
    """Return the plan of a proxy that serves `model_list` alone. Raises CliError, ProxyError or SettingsError."""
    check_keys(settings.model_list, os.environ)
    settings, notes = _with_ports(settings, starts_learner=False, starts_vllm=False)
    url = _proxy_url(settings)
    service = _proxy_service(settings, url, config, "--models-only")
    return LaunchPlan((service,), vllm_command.VllmCommand((), {}), None, url, tuple(notes), settings)


def _proxy_url(settings: Settings) -> str:
    own = settings.proxy
    return local_url(own.host, own.port, tls=own.tls_certificate is not None)


def _planned_memory(settings: Settings) -> memory_checks.PlannedMemory:
    """Return the settings with vLLM's share of its GPU. Raises CliError."""
    if not vllm_command.has_visible_gpu(settings):
        return memory_checks.PlannedMemory(settings)
    planned = memory_checks.plan_memory(settings)
    share = planned.settings.vllm.gpu_memory_utilization
    if share is not None:
        preflight_checks.check_gpu_memory(planned.settings.vllm.devices, share)
    return planned


def write_resolved_settings(settings: Settings, file: Path) -> None:
    """Write the settings for the services, without secrets: they get the store's password by variable."""
    masked = {
        "env": mask_variables(settings.vllm.env),
        "extra_args": list(mask_arguments(settings.vllm.extra_args)),
    }
    content = {
        **settings.given,
        "base_model": settings.base_model,
        "store": settings.store and mask_store_url(settings.store),
        "vllm": {**settings.given_in("vllm"), **masked},
    }
    if not settings.agents:
        content["model"] = settings.model
    temporary = file.with_suffix(".new")  # running services watch the file: it is replaced as a whole
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(content, default=_plain, indent=1))
    temporary.replace(file)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _training_services(
    settings: Settings, config: Path, token: str | None, *, starts_learner: bool, shared: bool
) -> list[Service]:
    """Return trainer and learner; the trainer alone if the learner runs elsewhere. `token`: None for the user's.

    `shared`: learner and vLLM use the same GPU. vLLM counts what others allocate while it measures its KV cache as its
    own, and ends if they free memory meanwhile. The trainer starts last: it would report that nothing answers.
    """
    own = {TOKEN_VARIABLE: token} if token else {}
    if not starts_learner:
        return [replace(_trainer_service(settings, config, {}), starts_after=("vllm",))]
    learner = _learner_service(settings, settings.learner.url or "", config, own)
    if shared:
        learner = replace(learner, starts_after=("vllm",), stops_for="vllm")
    return [learner, replace(_trainer_service(settings, config, own), starts_after=("vllm", "learner"))]


def _with_ports(settings: Settings, *, starts_learner: bool, starts_vllm: bool = True) -> tuple[Settings, list[str]]:
    """Return the settings with free ports, and a note for each port that changed.

    `learner.url` becomes that of the learner that `up` starts.
    """
    notes: list[str] = []
    proxy = settings.proxy
    proxy_port = ports.choose_port(
        "proxy", "proxy.port", proxy.host, proxy.port, fixed=settings.is_set("proxy", "port"), taken=set()
    )
    vllm, vllm_port = settings.vllm, settings.vllm.port
    if starts_vllm:
        fixed = settings.is_set("vllm", "port")
        vllm_port = ports.choose_port("vllm", "vllm.port", vllm.host, vllm.port, fixed=fixed, taken={proxy_port})
    changes: dict[str, Any] = {
        "vllm": {"port": vllm_port},
        # vLLM stops after the proxy, so this limits how long stopping takes.
        "proxy": {
            "workers": settings.given_in("proxy").get("workers", "auto"),
            "port": proxy_port,
            "drain_timeout_seconds": min(proxy.drain_timeout_seconds, _DRAIN_TIMEOUT),
            "drain_delay_seconds": 0.0,
        },
    }
    chosen = [("proxy", proxy.port, proxy_port), ("vllm", vllm.port, vllm_port)]
    if starts_learner:
        learner = settings.learner
        fixed = settings.is_set("learner", "port")
        taken = {proxy_port, vllm_port}
        wanted = learner.port if fixed else 0  # nobody needs to know it
        port = ports.choose_port("learner", "learner.port", learner.host, wanted, fixed=fixed, taken=taken)
        chosen.append(("learner", wanted, port))
        changes["learner"] = {"port": port, "url": local_url(learner.host, port)}
    for name, wanted, got in chosen:
        if wanted not in (got, 0):
            owner = ports.port_holder(wanted)
            used = f"used by pid {owner.pid}" if owner else "in use"
            notes.append(f"{name}: port {wanted} is {used}; using {got}")
    return settings.changed(**changes), notes


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


def _proxy_service(settings: Settings, url: str, config: Path, *options: str) -> Service:
    return Service(
        name="proxy",
        command=(sys.executable, "-P", "-m", "ratchet", "--config", str(config), "proxy", *options),
        environment=service_environment(settings),
        ready=lambda: _answers(f"{url}/health/ready"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=_DRAIN_TIMEOUT + 4.0,
    )


def _learner_service(settings: Settings, url: str, config: Path, token: Mapping[str, str]) -> Service:
    return Service(
        name="learner",
        command=learner_command(config),
        environment=learner_environment(settings) | dict(token),
        ready=lambda: _answers(f"{url}/health"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=10.0,
    )


def learner_command(config: Path) -> tuple[str, ...]:
    """Return the command of a learner with the resolved settings in `config`."""
    return (sys.executable, "-P", "-m", "ratchet", "--config", str(config), "learner")


def learner_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a learner, without its token."""
    return _without_settings(os.environ) | pinned(settings.learner.devices)


def _trainer_service(settings: Settings, config: Path, token: Mapping[str, str]) -> Service:
    log = settings.state.log("trainer")
    return Service(
        name="trainer",
        command=(sys.executable, "-P", "-m", "ratchet", "--config", str(config), "trainer"),
        environment=service_environment(settings) | dict(token),
        ready=lambda: _TRAINER_READY in log.read_bytes(),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=10.0,
    )


def service_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a service that opens the store."""
    environment = _without_settings(os.environ)
    if has_password(settings.store_url):
        environment[f"{PREFIX}STORE"] = settings.store_url
    return environment


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables whose values the resolved settings hold."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in OTHER_VARIABLES}


def _answers(url: str) -> bool:
    """Return whether a GET of a child returns 200. Ignores HTTP proxies, and whose name a certificate has."""
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    )
    try:
        with opener.open(url, timeout=_PROBE_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
