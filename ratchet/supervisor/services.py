"""The services of a project as processes: command, environment and readiness check of each. Starts nothing.

A run on models of `model_list` alone needs the proxy only (`plan_models_only`).

The services read the settings that `up` resolved from one file without secrets. Secrets, including the store's
password, reach them by environment variable only. `python -P` keeps the working folder off their module path: a user's
own logging.py or proxy/ replaces no module of theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic import BaseModel

from ratchet.errors import CliError
from ratchet.proxy.model_list import check_keys
from ratchet.settings.masking import has_password, mask_arguments, mask_store_url, mask_variables
from ratchet.settings.project_settings import OTHER_VARIABLES, PREFIX, Settings, local_url
from ratchet.settings.setting_errors import listed
from ratchet.store.store import open_store
from ratchet.supervisor import preflight_checks, process_guard, vllm_command
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import LearnerAccess, LearnerCommand
from ratchet.trainer.settings.learner_settings import pinned
from ratchet.trainer.settings.trainer_settings import TrainerSettings

_PROBE_TIMEOUT = 3.0  # seconds
_DRAIN_TIMEOUT = 4.0  # seconds that running calls get when `up` stops
_STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
_PORT_TRIES = 200
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
    if (warning := vllm_command.describe_thrashing(settings)) is not None:
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


def _planned_memory(settings: Settings) -> preflight_checks.PlannedMemory:
    """Return the settings with vLLM's share of its GPU. Raises CliError."""
    if not vllm_command.has_visible_gpu(settings):
        return preflight_checks.PlannedMemory(settings)
    planned = preflight_checks.plan_memory(settings)
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
    if settings.agents:
        content.pop("model", None)
    else:
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
    own, log = {TOKEN_VARIABLE: token} if token else {}, settings.state.log("trainer")
    trainer = Service(
        name="trainer",
        command=_ratchet(config, "trainer"),
        environment=service_environment(settings) | own,
        ready=lambda: _TRAINER_READY in log.read_bytes(),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=_STOP_SECONDS,
        starts_after=("vllm", "learner") if starts_learner else ("vllm",),
    )
    if not starts_learner:
        return [trainer]
    url = settings.learner.url or ""
    learner = Service(
        name="learner",
        command=_ratchet(config, "learner"),
        environment=_learner_environment(settings) | own,
        ready=lambda: _answers(f"{url}/health"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=_STOP_SECONDS,
        starts_after=("vllm",) if shared else (),
        stops_for="vllm" if shared else "",
    )
    return [learner, trainer]


def _with_ports(settings: Settings, *, starts_learner: bool, starts_vllm: bool = True) -> tuple[Settings, list[str]]:
    """Return the settings with free ports, and a note for each port that changed.

    `learner.url` becomes that of the learner that `up` starts.
    """
    notes: list[str] = []
    taken: set[int] = set()

    def chosen(name: str, host: str, wanted: int) -> int:
        fixed = settings.is_set(name, "port")
        got = choose_port(name, f"{name}.port", host, wanted, fixed=fixed, taken=taken)
        if wanted not in (got, 0):
            owner = port_holder(wanted)
            notes.append(f"{name}: port {wanted} is {f'used by pid {owner[0]}' if owner else 'in use'}; using {got}")
        taken.add(got)
        return got

    proxy, vllm = settings.proxy, settings.vllm
    changes: dict[str, Any] = {
        # vLLM stops after the proxy, so this limits how long stopping takes.
        "proxy": {
            "workers": settings.given_in("proxy").get("workers", "auto"),
            "port": chosen("proxy", proxy.host, proxy.port),
            "drain_timeout_seconds": min(proxy.drain_timeout_seconds, _DRAIN_TIMEOUT),
            "drain_delay_seconds": 0.0,
        },
    }
    if starts_vllm:
        changes["vllm"] = {"port": chosen("vllm", vllm.host, vllm.port)}
    if starts_learner:
        learner = settings.learner
        # Nobody needs to know a port that the user did not set.
        port = chosen("learner", learner.host, learner.port if settings.is_set("learner", "port") else 0)
        changes["learner"] = {"port": port, "url": local_url(learner.host, port)}
    return settings.changed(**changes), notes


def _vllm_service(settings: Settings, vllm: vllm_command.VllmCommand, url: str) -> Service:
    environment = environment_without_settings() | dict(vllm.environment)
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
        command=_ratchet(config, "proxy", *options),
        environment=service_environment(settings),
        ready=lambda: _answers(f"{url}/health/ready"),
        start_timeout_seconds=settings.vllm.start_timeout_seconds,
        stop_timeout_seconds=_DRAIN_TIMEOUT + 4.0,
    )


def _ratchet(config: Path, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "ratchet", "--config", str(config), *words)


def service_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a service that opens the store."""
    environment = environment_without_settings()
    if has_password(settings.store_url):
        environment[f"{PREFIX}STORE"] = settings.store_url
    return environment


def _learner_environment(settings: Settings) -> dict[str, str]:
    return environment_without_settings() | pinned(settings.learner.devices)


def environment_without_settings() -> dict[str, str]:
    """Return the environment without the variables whose values the resolved settings hold."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in OTHER_VARIABLES}


def _answers(url: str) -> bool:
    """Return whether a GET of a child returns 200. Ignores HTTP proxies, and whose name a certificate has."""
    try:
        return httpx.get(url, timeout=_PROBE_TIMEOUT, trust_env=False, verify=False).status_code == httpx.codes.OK
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def run_with_learner(settings: Settings, first: TrainerSettings, run: Callable[[LearnerAccess], int]) -> int:
    """Run `ratchet trainer` with its learner, which ends with it if it is a child; return the exit code.

    `first` are the settings of one of its agents. The code is 1 if the learner cannot be used.
    """
    store = open_store(first.store)
    try:
        with LearnerAccess(first, store, _plan_learner_child(settings)) as learner:
            code = run(learner)
        return 1 if learner.failure is not None else code
    finally:
        store.close()


def _plan_learner_child(settings: Settings) -> LearnerCommand | None:
    """Return how the trainer starts its learner, under the process guard; None if `learner.url` names one.

    Raises CliError if the port that the user set is in use.
    """
    process = settings.learner
    if process.url is not None:
        return None
    settings.state.make(min_free_disk_mb=settings.min_free_disk_mb)
    fixed = settings.is_set("learner", "port")
    wanted = process.port if fixed else 0  # nobody needs to know it
    port = choose_port("learner", "learner.port", process.host, wanted, fixed=fixed, taken=set())
    config = settings.state.resolved.with_name("learner.json")
    changed = settings.changed(learner={"port": port})
    write_resolved_settings(changed, config)
    guard = (sys.executable, "-I", "-S", str(Path(process_guard.__file__)), str(_STOP_SECONDS))
    return LearnerCommand(
        arguments=(*guard, *_ratchet(config, "learner")),
        environment=_learner_environment(settings),
        url=local_url(process.host, port),
        log=settings.state.log("learner"),
        max_restarts=settings.max_restarts,
    )


# Ports: another program may take a free port before the service binds it; the service then fails with its own message.


def choose_port(name: str, setting: str, host: str, port: int, *, fixed: bool, taken: set[int]) -> int:
    """Return the port for a service: `port` if it is free, else the next free one unless the user set it.

    0 takes any free port. `taken` are ports that other services of this project will use. Raises CliError, naming
    the process on the port.
    """
    if port == 0:
        while port in taken or port == 0:
            with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
                port = int(probe.getsockname()[1])
        return port
    if port not in taken and is_free(host, port):
        return port
    if fixed:
        owner = port_holder(port)
        reason = f"used by pid {owner[0]} ({owner[1][:200]})" if owner else "used by a process of another user"
        if port in taken:
            reason = "used by another service of this project"
        raise CliError(f"{name}: port {port} is {reason}; stop it, or set {setting} to a free port")
    for candidate in range(port + 1, port + _PORT_TRIES):
        if candidate not in taken and is_free(host, candidate):
            return candidate
    raise CliError(f"{name}: no free port from {port} to {port + _PORT_TRIES - 1}; set {setting} to a free port")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `host:port` now, and no other one is about to.

    vLLM binds its port when it starts and listens minutes later; another server that listens there meanwhile makes it
    wait for ever. Such a port can be bound with SO_REUSEADDR only, as one whose last connections are in TIME_WAIT,
    which counts as free.
    """
    return _can_listen(host, port, reuse=True) and (_can_listen(host, port, reuse=False) or _has_connections(port))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_listen(host: str, port: int, *, reuse: bool) -> bool:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _has_connections(port: int) -> bool:
    """Return whether connections of this port are known to the system, also closed ones in TIME_WAIT."""
    try:
        return any(tuple(one.laddr)[1:2] == (port,) for one in psutil.net_connections(kind="tcp"))
    except psutil.Error:
        return True


def port_holder(port: int) -> tuple[int, str] | None:
    """Return pid and command of the process that listens on a port; None if there is none or it is not visible."""
    try:
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.pid and tuple(one.laddr)[1:2] == (port,):
                with contextlib.suppress(psutil.Error):
                    return one.pid, " ".join(psutil.Process(one.pid).cmdline())
                return one.pid, "a process of another user"
    except psutil.Error:
        return None
    return None
