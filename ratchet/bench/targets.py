"""The targets of a benchmark: the model's name in the proxy and in vLLM, and the proxy's process on this machine.

Calls name a version, so they are never judged or trained; calls to an alias are live traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil

from ratchet.errors import BenchmarkFailed
from ratchet.supervisor import ports
from ratchet.trainer.adapters.vllm_api import list_models
from ratchet.trainer.errors import TrainerError

_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


def cards(url: str, key: str | None, remedy: str) -> list[dict[str, Any]]:
    """Return the models that a server lists. Raises BenchmarkFailed with the remedy."""
    try:
        return list_models(url, key)
    except TrainerError as error:
        raise BenchmarkFailed(f"{url} does not list its models ({error.__cause__ or error}): {remedy}") from error


def proxy_model_name(model: str, listed: list[dict[str, Any]]) -> str:
    """Return the model name for the proxy: the live version of an alias. Raises BenchmarkFailed."""
    known = {card["id"]: card for card in listed}
    if model not in known:
        raise BenchmarkFailed(f"--model {model}: the proxy knows no such model; it knows {', '.join(known)}")
    live = (name for name, card in known.items() if card.get("parent") == model and card.get("state") == "live")
    return next(live, model)


def vllm_model_name(version: str, listed: list[dict[str, Any]]) -> str:
    """Return vLLM's name of a version: its own, or the base model's for version 0. Raises BenchmarkFailed."""
    names = [card["id"] for card in listed]
    if version in names:
        return version
    bases = [card["id"] for card in listed if not card.get("parent")]
    if version.endswith("@0") and bases:
        return str(bases[0])
    raise BenchmarkFailed(
        f"vLLM does not serve {version} under that name; it serves {', '.join(names)}: choose one with --upstream-model"
    )


def cpu_seconds_of(url: str) -> Callable[[], float] | None:
    """Return a function for the CPU seconds of the process that listens at a URL; None if it cannot be found."""
    parts = urlsplit(url)
    owner = ports.port_holder(parts.port or 80) if parts.hostname in _LOCAL_HOSTS else None
    if owner is None:
        return None
    process = psutil.Process(owner.pid)

    def used() -> float:
        seconds = process.cpu_times()
        return float(seconds.user + seconds.system)

    return used
