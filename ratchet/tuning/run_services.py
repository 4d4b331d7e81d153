"""The services that rollouts need: those of the running project, else started for a block.

Commands and Python use this alike. Rollouts on models of `model_list` need the proxy only, and no base model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.setting_errors import listed
from ratchet.supervisor.up import attach_or_start, read_run_state
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.context import open_store, proxy_of

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings

_HEALTH_TIMEOUT = 5.0  # seconds


@contextmanager
def run_services(
    settings: Settings, caller: RunCaller, models: Collection[str], check: Callable[[], object]
) -> Iterator[None]:
    """Use the proxy that the settings name or that runs; else start what the models need, and nothing that trains.

    models  those that serve the rollouts, as `model_list` or an agent's versions are named
    check   called before anything is started; raises what would end the run later

    Raises InvalidArgument if nothing runs and the models need a base model that is not set; CliError and ProxyError if
    the services cannot be started.
    """
    running = read_run_state(settings.state)
    if settings.tuner_settings().proxy_url or (not running and _proxy_runs(settings)):
        yield
        return
    models_only = bool(models) and set(models) <= set(settings.listed_models)
    if not running:
        if not models_only and settings.base_model is None:
            raise InvalidArgument(_nothing_runs(settings))
        check()
    without_judge = {key: value for key, value in settings.trainer.items() if key != "judge"}
    serving = settings.model_copy(update={"trainer": without_judge})
    stop = caller.check if caller.in_python else None
    with attach_or_start(serving, print_note, stop, models_only=models_only):
        yield


def serves_agent(settings: Settings) -> bool:
    """Return whether the rollouts' proxy serves, or will serve, an agent's versions beside `model_list`."""
    if settings.base_model is not None or settings.tuner_settings().proxy_url:
        return True
    running = read_run_state(settings.state)
    return running.get("vllm_url") is not None if running else _proxy_runs(settings)


def _nothing_runs(settings: Settings) -> str:
    remedy = (
        "start it with `ratchet up`, change to its folder, give --config PATH of its ratchet.yaml, or set base_model "
        "to start it for this run (in Python config=, base_model=)"
    )
    if settings.listed_models:
        remedy += f"; models of model_list need neither: {listed(settings.listed_models)}"
    return f"project {settings.project} does not run in {Path.cwd()}: {remedy}"


def _proxy_runs(settings: Settings) -> bool:
    """Return whether a proxy that was started by itself answers; one of another project has another store."""
    from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
    from ratchet.store.errors import StoreError

    try:
        with open_store(settings.store_url, create=False) as store:
            running = store.proxy_instances.running(None, time.time() - PROXY_TIMEOUT_SECONDS)
    except StoreError:
        return False
    return bool(running) and _answers(proxy_of(settings))


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health/live", timeout=_HEALTH_TIMEOUT, trust_env=False).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
