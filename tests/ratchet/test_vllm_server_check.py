"""The doctor refuses releases of vLLM that mix adapters up, and servers that load an adapter on one engine only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from ratchet.checks.doctor import describe_problem
from ratchet.trainer.adapters.vllm_api import VllmServer
from tests.harness.json_server import IncomingRequest, JsonServer


def problem(version: str | None, engines: Sequence[str] = ("0",)) -> str:
    """What is found at a scripted server."""
    gauges = [f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} 0.0' for engine in engines]

    def respond(request: IncomingRequest) -> tuple[int, Any]:
        if request.path == "/metrics":
            return 200, "\n".join(["# TYPE vllm:num_requests_running gauge", *gauges]) + "\n"
        return (200, {"version": version}) if version else (404, {"detail": "Not Found"})

    with contextlib.closing(JsonServer(respond)) as server, contextlib.closing(VllmServer(server.url)) as replica:
        return " ".join(describe_problem(replica) or ())


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.1.dev5+gabc", "1.0.0", None])
def test_a_release_with_the_mended_eviction_passes(version: str | None) -> None:
    assert problem(version) == ""


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.22.0+cpu"])
def test_an_older_release_is_refused_with_the_first_that_is_safe(version: str) -> None:
    found = problem(version)
    assert f"runs vLLM {version}" in found
    assert "install vLLM 0.26.0 or later" in found


def test_data_parallelism_is_refused_with_the_remedy() -> None:
    found = problem("0.32.0", ("0", "1"))
    assert "has 2 engines" in found
    assert "name each as a replica" in found
    assert problem("0.32.0", ()) == ""  # metrics are off
