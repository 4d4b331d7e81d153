"""What a measurement is pointed at: the model's name on both sides, and the proxy's process where it runs here.

A version is asked for by name, so that nothing of it is ever trained or judged: calls of an alias alone are live
traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from ratchet.errors import BenchmarkFailed
from ratchet.supervisor import ports

_PATIENCE = 30.0  # seconds
_LOCAL = ("127.0.0.1", "::1", "localhost")


def cards(url: str, key: str | None, remedy: str) -> list[dict[str, Any]]:
    """Return the models that a server lists. Raises BenchmarkFailed with the remedy."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=_PATIENCE, trust_env=False)
        return [dict(card) for card in answer.raise_for_status().json()["data"] if isinstance(card["id"], str)]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchmarkFailed(f"{url} does not list its models ({error}): {remedy}") from error


def proxy_model_name(model: str, listed: list[dict[str, Any]]) -> str:
    """Return what the proxy is asked for: of an alias its live version, by name. Raises BenchmarkFailed."""
    known = {card["id"]: card for card in listed}
    if model not in known:
        raise BenchmarkFailed(f"--model {model}: the proxy knows no such model; it knows {', '.join(known)}")
    live = (name for name, card in known.items() if card.get("parent") == model and card.get("state") == "live")
    return next(live, model)


def vllm_model_name(version: str, listed: list[dict[str, Any]]) -> str:
    """Return the name that vLLM knows a version by: its own, or of the base model whatever it is called there.

    Raises BenchmarkFailed where none fits.
    """
    names = [card["id"] for card in listed]
    if version in names:
        return version
    bases = [card["id"] for card in listed if not card.get("parent")]
    if version.endswith("@0") and bases:
        return str(bases[0])
    raise BenchmarkFailed(
        f"vLLM does not serve {version} under that name; it serves {', '.join(names)}: say which with --upstream-model"
    )


def cpu_seconds_of(url: str) -> Callable[[], float] | None:
    """Return what tells the CPU seconds of the process that listens at a URL; None where that cannot be seen."""
    parts = urlsplit(url)
    who = ports.port_holder(parts.port or 80) if parts.hostname in _LOCAL else None
    if who is None:
        return None
    process = psutil.Process(who.pid)

    def used() -> float:
        seconds = process.cpu_times()
        return float(seconds.user + seconds.system)

    return used
