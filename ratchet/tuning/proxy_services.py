"""The services that rollouts need: those of the running project, else started for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import InvalidArgument
from ratchet.output.terminal import print_note
from ratchet.supervisor.up import attach_or_start, read_run_state
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.context import proxy_of

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings

_HEALTH_TIMEOUT = 5.0  # seconds


@contextmanager
def proxy_services(settings: Settings, caller: RunCaller) -> Iterator[None]:
    """Use the proxy that the settings name or that runs; else start vLLM and proxy, and nothing that trains.

    Raises InvalidArgument if nothing runs and no base model is set.
    """
    if settings.tuner_settings().proxy_url or read_run_state(settings.state) or _answers(proxy_of(settings)):
        yield
        return
    if settings.base_model is None:
        raise InvalidArgument(
            f"project {settings.project} does not run in {Path.cwd()}: start it with `ratchet up`, change to its "
            "folder, give config=PATH of its ratchet.yaml, or give base_model= to start it for this call"
        )
    without_judge = {key: value for key, value in settings.trainer.items() if key != "judge"}
    serving = settings.model_copy(update={"trainer": without_judge})
    with attach_or_start(serving, announce=print_note, check=caller.check):
        yield


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health/live", timeout=_HEALTH_TIMEOUT, trust_env=False).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
