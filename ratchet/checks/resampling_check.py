"""Check that resampling works: vLLM reports its load, and the proxy accepts the trainer's own key.

A check of `ratchet doctor`, run if `trainer.resample.samples` is set. It sends no request that generates a token.
"""

from __future__ import annotations

import os
from typing import Any

from ratchet.checks.check_result import CheckResult, no_project
from ratchet.settings.project_settings import Settings

_NAME = "resampling"


def is_resampling_enabled(settings: Settings) -> bool:
    """Return whether the trainer samples further answers to recorded prompts."""
    return bool((settings.trainer.get("resample") or {}).get("samples"))


def check_resampling(settings: Settings, running: dict[str, Any]) -> CheckResult:
    """Return the result for a running project."""
    import ssl

    import httpx

    from ratchet.trainer.adapters.vllm_api import load_of
    from ratchet.trainer.controller.collect.resampling.resample_call import KEY_VARIABLE

    if "vllm_url" not in running:
        return no_project(_NAME, running)
    load = load_of([running["vllm_url"]], os.environ.get("RATCHET_UPSTREAM_API_KEY"))
    if load.unknown is not None:
        return CheckResult(_NAME, False, load.unknown, "remove --disable-log-stats from vllm.extra_args")
    key = os.environ.get(KEY_VARIABLE, "none")
    try:
        answer = httpx.get(
            f"{running['base_url']}/models",
            headers={"authorization": f"Bearer {key}"},
            timeout=30,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
    except httpx.HTTPError as error:
        return CheckResult(_NAME, False, f"{running['base_url']} does not answer: {error}", "look at the proxy's log")
    if answer.status_code != httpx.codes.OK:
        seen = f"the proxy refuses the trainer's key ({answer.status_code})"
        return CheckResult(
            _NAME, False, seen, f"`ratchet keys create --name resampling`, and start with {KEY_VARIABLE}=KEY"
        )
    return CheckResult(
        _NAME, True, f"vLLM runs {load.running} calls now, {load.waiting} wait; the proxy accepts the key"
    )
