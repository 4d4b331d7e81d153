"""JSON values are coerced as pydantic, and so vLLM, coerces them, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ratchet.proxy.wire import lax_values
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 0.0, -0.0, 1.5, 2.0, -3.0, 1e18, 1e300, 2**63, 2**70, float("inf"),
    float("nan"), "1", "0", "2", " 1 ", "\n5\t", "+1", "-3", "--1", "1_000", "_1", "1_", "1__0", "01", "0x1", "1e3",
    "1.0", "-1.00", "1.", ".0", "1.5", " 1.0 ", "1_0.0", "\uff11", "\u0663", "9" * 30, "9" * 4300, "9" * 4301, "true",
    "tRuE", "FALSE", "t", "F", "yes", "Yes", "y", "no", "N", "on", "ON", "off", " on", "on ", "", "enabled", "o\ufb00",
    "\u017f", [], {}, [1],
]  # fmt: skip


def by_pydantic(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:24])
def test_a_value_is_read_as_pydantic_reads_it(value: Any) -> None:
    assert (lax_values.lax_bool(value), lax_values.lax_int(value)) == (
        by_pydantic(bool, value),
        by_pydantic(int, value),
    )


HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 20},
}
TRUE = [1, 1.0, "1", "true", "True", "yes", "on"]


def post(proxy: Proxy, path: str, **fields: Any) -> Any:
    return proxy.http.post(path, json={"model": "agent", **BODIES[path], **fields})


def last_reason(proxy: Proxy) -> str | None:
    proxy.settled()
    return proxy.store.calls.page(1)[0].untrainable


@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_beam_search_and_echo_are_never_trained_in_any_spelling_of_true(
    proxy: Proxy, vllm: ScriptedVllm, path: str, true: Any
) -> None:
    for name, reason in (("use_beam_search", "beam_search"), ("echo", "echo")):
        assert post(proxy, path, **{name: true}).status_code == 200
        assert vllm.calls[-1][name] == true
        assert last_reason(proxy) == reason


@pytest.mark.slow
@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("path", BODIES)
def test_any_spelling_of_true_requests_a_stream(proxy: Proxy, path: str, true: Any) -> None:
    answer = post(proxy, path, stream=true)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert last_reason(proxy) is None


@pytest.mark.slow
@pytest.mark.parametrize("false", [0, "0", "false", "off", None])
@pytest.mark.parametrize("path", BODIES)
def test_any_spelling_of_false_requests_nothing(proxy: Proxy, path: str, false: Any) -> None:
    more: dict[str, Any] = {"echo": false, "use_beam_search": false} if "completions" in path else {}
    answer = post(proxy, path, stream=false, return_token_ids=false, **more)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.text.count('token_ids":') == answer.text.count('token_ids":null')
    assert last_reason(proxy) is None


@pytest.mark.parametrize("true", TRUE)
def test_ids_logprobs_and_usage_reach_the_client_that_requests_them(proxy: Proxy, true: Any) -> None:
    chat = post(proxy, "/v1/chat/completions", logprobs=true, return_token_ids=true).json()
    assert chat["prompt_token_ids"]
    assert chat["choices"][0]["logprobs"]["content"]
    assert post(proxy, "/v1/completions", return_token_ids=true).json()["choices"][0]["token_ids"]
    options = {"include_usage": true}
    assert '"usage":{' in post(proxy, "/v1/chat/completions", stream=True, stream_options=options).text


def test_any_spelling_of_false_turns_storing_off(proxy: Proxy) -> None:
    for store, status in (("false", 404), (0, 404), (1, 200)):
        name = post(proxy, "/v1/responses", store=store).json()["id"]
        assert post(proxy, "/v1/responses", previous_response_id=name).status_code == status


def test_values_that_are_no_boolean_are_left_to_vllm_to_refuse(proxy: Proxy) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert post(proxy, path, use_beam_search="perhaps").status_code == 400
