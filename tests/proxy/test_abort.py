"""A client that disconnects stops the upstream's work at once, and the generated tokens are recorded."""

from __future__ import annotations

import json
import socket
import statistics
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ratchet.store.records import unpack_ids
from ratchet.store.states import CallState
from ratchet.store.store import Store
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render
from tests.harness.proxy.servers import ProxyProcess, eventually, leave

TURNS = 20
SOON = 0.1  # seconds


def leave_in_the_middle(proxy: Proxy, vllm: ScriptedVllm, streamed: bool) -> float:
    """Call, close once the upstream is working; return the seconds until the upstream's connection is closed."""
    body = {
        "model": "agent",
        "stream": streamed,
        "messages": [{"role": "user", "content": "#tokens=2000 #delay=0.005"}],
    }
    payload = json.dumps(body).encode()
    address = urlsplit(proxy.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    under_way, left = len(vllm.calls), len(vllm.left_at)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(head + payload)
        eventually(lambda: len(vllm.calls) > under_way)
        if streamed:
            came = b""
            while b'"x"' not in came:
                came += (piece := client.recv(2**16))
                assert piece, came
        else:
            time.sleep(0.03)
    closed = time.monotonic()
    eventually(lambda: len(vllm.left_at) > left)
    return vllm.left_at[-1] - closed


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_before_the_first_token_is_an_aborted_call_without_choices(
    proxy: Proxy, vllm: ScriptedVllm, streamed: bool
) -> None:
    body = {"model": "agent", "stream": streamed, "messages": [{"role": "user", "content": "#wait=60"}]}
    leave(f"{proxy.url}/v1/chat/completions", body, lambda: vllm.calls)
    eventually(lambda: in_flight(proxy) == 0.0)
    proxy.settled()
    (call,) = proxy.store.calls.page(9)
    assert (str(call.state), call.status, call.error) == ("aborted", 499, "the client disconnected")
    assert (call.choices, call.completion_tokens, call.untrainable) == ((), 0, "no_prompt_token_ids")
    again = proxy.http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "hi"}]})
    assert again.status_code == 200


ANSWER = "An answer that is long enough to be stopped by its user in the middle of a sentence. " * 40


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_user_who_stops_an_answer_goes_on_in_the_same_trajectory(proxy: Proxy, dialect: str) -> None:
    """The client read more than it sends back, as the proxy received more than the client read."""
    path = "/v1/messages" if dialect == "messages" else "/v1/chat/completions"
    messages = [{"role": "user", "content": f"hi #say={ANSWER.replace(' ', '.')} #delay=0.01"}]
    body = {"model": "agent", "max_tokens": 200, "stream": True, "messages": messages}
    with proxy.http.stream("POST", path, json=body) as response:
        came = ""
        for line in response.iter_lines():
            came += line
            if came.count('"text_delta"' if dialect == "messages" else '"content":') > 20:
                break
    eventually(lambda: in_flight(proxy) == 0.0)
    proxy.settled()
    messages += [{"role": "assistant", "content": ANSWER[:10]}, {"role": "user", "content": "go on"}]
    again = proxy.http.post(path, json={"model": "agent", "max_tokens": 9, "messages": messages})
    assert again.headers["x-ratchet-trajectory"] == response.headers["x-ratchet-trajectory"]
    proxy.settled()
    call, stopped = proxy.store.calls.page(9)
    assert (stopped.state, call.parent_call, call.linked_by) == (CallState.ABORTED, stopped.id, "graph")
    assert (call.context, unpack_ids(call.prompt_ids)) == ("fork", tuple(render(messages)))
    assert why_untrainable(stopped, stopped.choices[0]) == "aborted"
    assert why_untrainable(call, call.choices[0]) is None


def in_flight(proxy: Proxy) -> float:
    lines = proxy.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("ratchet_upstream_in_flight{"))


@pytest.mark.alone
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_upstream_connection_is_closed_within_a_tenth_of_a_second(
    proxy: Proxy, vllm: ScriptedVllm, streamed: bool
) -> None:
    took = [leave_in_the_middle(proxy, vllm, streamed) for _ in range(TURNS)]
    print(f"median {1000 * statistics.median(took):.1f} ms, most {1000 * max(took):.1f} ms")
    assert statistics.median(took) < SOON / 4
    assert max(took) < SOON
    proxy.settled()
    calls = proxy.store.calls.page(100)
    assert [(call.state, call.status, call.error) for call in calls] == [
        (CallState.ABORTED, 499, "the client disconnected")
    ] * TURNS
    if streamed:
        for call in calls:
            (choice,) = call.choices
            assert choice.finish_reason is None
            assert 0 < len(choice.token_ids) == len(choice.logprobs) == 4 * call.completion_tokens
            assert set(unpack_ids(choice.token_ids)) == {ord("x")}


def _has_aborted(client: httpx.Client, count: int) -> bool:
    lines = client.get("/metrics").text.splitlines()
    aborted = (line for line in lines if line.startswith("ratchet_calls_total{") and 'state="aborted"' in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in aborted) == count


@pytest.mark.slow
def test_a_retry_after_leaving_a_quick_call_continues_the_same_trajectory(
    tmp_path: Path, vllm_url: str, store: Store
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    with httpx.Client(base_url=process.url, timeout=60) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        for number in range(10):
            body = {"model": "agent", "messages": [{"role": "user", "content": f"{number} #wait=0.01"}]}
            leave(f"{process.url}/v1/chat/completions", body | {"stream": number % 2 == 1}, lambda: True)
            eventually(partial(_has_aborted, client, number + 1))
            again = client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
            assert again.status_code == 200
    assert process.stop() == 0
    by_trajectory: dict[str, list[str]] = {}
    for call in store.calls.page(99):
        by_trajectory.setdefault(call.trajectory_id, []).append(str(call.state))
    assert list(by_trajectory.values()) == [["answered", "aborted"]] * 10
