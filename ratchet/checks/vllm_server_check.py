"""Whether a running vLLM can serve several adapters safely: its release, and its number of engines.

Before 0.26.0, a load that evicted an adapter in use let running requests continue with another adapter's weights (vLLM
issue 47724, mended by pull request 47725). A server with data parallelism loads an adapter on one of its engines only.
"""

from __future__ import annotations

import re

from ratchet.trainer.adapters.vllm_api import VllmServer

FIRST_SAFE_RELEASE = (0, 26)


def describe_problem(replica: VllmServer) -> tuple[str, str] | None:
    """Return what is wrong with a server, and the remedy; None if nothing is known to be. Raises EngineError."""
    release = replica.release()
    numbers = re.match(r"(\d+)\.(\d+)", release or "")
    if numbers and (int(numbers[1]), int(numbers[2])) < FIRST_SAFE_RELEASE:
        return (
            f"{replica.url} runs vLLM {release}, which may answer with another adapter's weights during a load",
            "install vLLM 0.26.0 or later (Ratchet is tested with 0.32.0)",
        )
    engines = replica.engines()
    if engines > 1:
        return (
            f"{replica.url} has {engines} engines (--data-parallel-size), and loads an adapter on one of them only",
            "start one server for each engine, without --data-parallel-size, and name each as a replica",
        )
    return None
