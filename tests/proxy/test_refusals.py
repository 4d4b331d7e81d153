"""Every route has a body limit, and every refusal has one shape without any value of the request."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ratchet.proxy.coordinator.operator_api.feedback import BODY_LIMIT
from tests.harness.proxy.running_proxy import Proxy, Start

SECRET = "sesame-7f3a"
AGENTS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings", "nowhere")


def operations(proxy: Proxy) -> list[tuple[str, str]]:
    """Every method and path of the operator API."""
    paths = proxy.http.get("/api/openapi.json").json()["paths"]
    return [(method.upper(), "/api" + path) for path, methods in paths.items() for method in methods]


@pytest.mark.slow
def test_no_route_of_the_operator_api_accepts_a_body_above_its_limit(proxy: Proxy) -> None:
    tried = operations(proxy)
    assert len(tried) > 15
    for method, path in tried:
        concrete = path.replace("{version}", "1")
        answer = proxy.http.request(method, concrete, content=b" " * (BODY_LIMIT + 1), params={"alias": "agent"})
        assert (answer.status_code, "at most" in answer.json()["error"]["message"]) == (413, True), (method, path)


def test_a_body_without_a_content_length_is_refused_at_the_limit(proxy: Proxy) -> None:
    pieces = (b" " * 2**20 for _ in range(16))
    answer = proxy.http.post("/api/policies/1/promote?alias=agent", content=pieces)
    assert (answer.status_code, set(answer.json())) == (413, {"error"})


@pytest.mark.parametrize("path", AGENTS)
def test_no_agents_route_accepts_a_body_above_the_limit(start: Start, path: str) -> None:
    proxy = start(max_body_bytes=4096)
    answer = proxy.http.post(f"/v1/{path}", content=b" " * 5000, headers={"content-type": "application/json"})
    assert (answer.status_code, "max_body_bytes" in answer.json()["error"]["message"]) == (413, True)


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("GET", "/api/calls?limit=0", {}, "limit"),
    ("GET", f"/api/calls?limit={SECRET}", {}, "limit"),
    ("GET", f"/api/policies/{SECRET}/decisions?alias=a", {}, "version"),
    ("GET", "/api/policies/1/decisions", {}, "alias"),
    ("POST", "/api/policies/1/promote?alias=agent", {"json": {"rason": SECRET}}, "reason"),
    ("POST", "/api/policies/1/promote?alias=agent", {"json": {"reason": "x", "bye": SECRET}}, "bye"),
    ("POST", "/api/policies/1/rollback?alias=agent", {"content": b'{"reason": "' + SECRET.encode()}, "body"),
    ("POST", "/api/policies/1/rollback?alias=agent", {"content": SECRET.encode()}, "body"),
    ("POST", "/api/policies/1/rollback?alias=agent", {}, "body"),
    ("POST", "/api/feedback", {"json": {"call_id": SECRET, "value": SECRET}}, "value"),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), WRONG)
def test_a_refusal_names_the_field_and_repeats_no_value(
    proxy: Proxy, method: str, path: str, body: dict[str, Any], field: str
) -> None:
    answer = proxy.http.request(method, path, headers={"content-type": "application/json"}, **body)
    assert answer.status_code in (400, 422)
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert field in answer.json()["error"]["message"]
    assert SECRET not in answer.text


def test_errors_have_the_documented_schema(proxy: Proxy) -> None:
    document = proxy.http.get("/api/openapi.json").json()
    assert "HTTPValidationError" not in str(document)
    for path in document["paths"].values():
        for operation in path.values():
            schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}


TEXTS = {  # a body with a text, and the field that the refusal names
    "/v1/chat/completions": (b'{"model":"agent","messages":[{"role":"user","content":%s}]}', "messages.0"),
    "/v1/completions": (b'{"model":"agent","prompt":%s}', "prompt"),
    "/v1/responses": (b'{"model":"agent","input":%s}', "input"),
    "/v1/messages": (b'{"model":"agent","max_tokens":9,"messages":[{"role":"user","content":%s}]}', "messages.0"),
    "/v1/messages/count_tokens": (b'{"model":"agent","messages":[{"role":"user","content":"x"},%s]}', "messages.1"),
}


@pytest.mark.parametrize("text", [b'"half \\ud83d"', b'"\\ude00\\ud83d"', b'"\xed\xa0\xbd"', b'"latin \xe9"'])
@pytest.mark.parametrize("path", TEXTS)
def test_text_that_is_not_unicode_is_refused_by_its_fields_name(proxy: Proxy, path: str, text: bytes) -> None:
    body, field = TEXTS[path]
    answer = proxy.http.post(path, content=body % text)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith(f"{field}: its text is not Unicode")
    assert answer.json().get("type") == ("error" if "messages" in path else None)


def test_other_bodies_with_half_a_character_stay_invalid_json(proxy: Proxy) -> None:
    for body in (b'{"model":"\\ud83d', b'["\\ud83d"]', b'{"messages":[\xff', b"\xff\xfe"):
        answer = proxy.http.post("/v1/messages", content=body)
        assert (answer.status_code, "not a JSON object" in answer.text) == (400, True), body


@pytest.mark.parametrize("path", [*TEXTS, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"\\ud83d":"\\ud83d"}', "the name of a field is not Unicode"),
        (b'{"\xff":1,"model":"agent"}', "the name of a field is not Unicode"),
        (b'{"model":"\xff"}', "model: its text is not Unicode"),
        (b'{"model":"\\ud83d"}', "model: its text is not Unicode"),
        (b'{"%s":"\xff","model":"\xff"}' % (b"n" * 10**5), "n" * 100 + ": its text is not Unicode"),
        (b'{"model":"\xff","x":"%s"}' % (b"x" * 2**20), "the body is not a JSON object"),
    ],
)
def test_no_text_makes_a_refusal_fail_itself(proxy: Proxy, path: str, body: bytes, message: str) -> None:
    answer = proxy.http.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": [1]}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": 5}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"system": [5]}, "system"),
    ],
)
def test_a_part_of_messages_with_another_type_is_refused_by_its_name(
    proxy: Proxy, fields: dict[str, Any], field: str
) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    answer = proxy.http.post("/v1/messages", json=body | fields)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    "field", ["messages", "system", "tools", "thinking", "output_config", "output_format", "tool_choice"]
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_field_of_messages_with_another_type_is_refused_by_its_name(proxy: Proxy, path: str, field: str) -> None:
    body = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    answer = proxy.http.post(path, json=body | {field: 5})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith(f"{field}: must be ")


@pytest.mark.parametrize("head", [b"", b"host: \r\n"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_without_a_host_is_refused_in_the_dialects_format(proxy: Proxy, path: str, head: bytes) -> None:
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST %s HTTP/1.1\r\n%sconnection: close\r\n\r\n" % (path.encode(), head))
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"message":"the request has no Host header' in answer
    assert (b'{"type":"error","error":{' in answer) == (path == "/v1/messages")
