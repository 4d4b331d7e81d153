"""Variants of client requests: HEAD probes, slashes, other methods, compressed bodies, vendors' headers."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import openai
import pytest
from backports import zstd

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.proxy.errors import BadRequest, BodyTooLarge
from ratchet.proxy.worker.http.decompression import decompressed_body
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm

BODY: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "#say=hello"}]}


def test_a_head_request_is_answered_like_the_get_without_its_body(proxy: Proxy, vllm: ScriptedVllm) -> None:
    for path in ("/v1/models", "/models", "/v1/models/agent", "/health/live"):
        got, head = proxy.http.get(path), proxy.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
    assert proxy.http.head("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_extra_trailing_slashes_change_nothing(proxy: Proxy, slashes: str) -> None:
    assert proxy.http.get(f"/v1/models{slashes}").json() == proxy.http.get("/v1/models").json()
    assert proxy.http.get(f"/v1/models/agent{slashes}").json()["id"] == "agent"
    for path in ("/v1/chat/completions", "/chat/completions", "/t/run-7/v1/chat/completions"):
        answer = proxy.http.post(path + slashes, json=BODY)
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert answer.headers["x-ratchet-trajectory"] == "run-7"


def test_a_path_is_decoded_once(proxy: Proxy) -> None:
    answers = [proxy.http.post(f"/t/run{dash}7/v1/chat/completions", json=BODY) for dash in ("%2D", "%252D")]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[0].headers["x-ratchet-trajectory"] == "run-7"


@pytest.mark.parametrize("base", ["/v1", "/v1/", "", "/"])
def test_a_base_url_may_have_any_usual_ending(proxy: Proxy, base: str) -> None:
    client = proxy.agent(path=base)
    assert client.chat.completions.create(**BODY).choices[0].message.content == "hello"
    assert client.models.retrieve("agent").id == "agent"


@pytest.mark.parametrize("base", ["/v1/", "//v1", "/v1/v1", "/v1//v1/", "/t/run-8//v1", "/t/run-8/v1/v1"])
def test_a_base_url_that_duplicates_part_of_the_path_is_accepted(proxy: Proxy, vllm: ScriptedVllm, base: str) -> None:
    assert proxy.http.post(f"{proxy.url}{base}/chat/completions", json=BODY).status_code == 200
    answer = proxy.http.post(f"{proxy.url}{base}/messages", json={**BODY, "max_tokens": 9})
    assert answer.json()["content"][0]["text"] == "hello"
    assert answer.headers["x-ratchet-trajectory"].startswith("run-8") == base.startswith("/t/")
    assert proxy.http.get(f"{proxy.url}{base}/messages").status_code == 405
    before = len(vllm.paths)
    for closed in (
        "load_lora_adapter",
        "../v1/load_lora_adapter",
        "%2e%2e/load_lora_adapter",
        "nothing/chat/completions",
    ):
        assert proxy.http.post(f"{proxy.url}{base}/{closed}", json={}).status_code in (403, 404), closed
    assert len(vllm.paths) == before


def azure(proxy: Proxy, **options: Any) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(api_version="2024-10-21", max_retries=0, **{"azure_endpoint": proxy.url} | options)


def test_a_client_of_azure_openai_uses_its_paths_and_its_key_header(start: Start, store: Store) -> None:
    key = new_key()
    store.keys.create("azure", hash_key(key.encode()), KeyScope.AGENT)
    proxy = start()
    with azure(proxy, api_key=key) as client:
        assert client.chat.completions.create(**BODY).choices[0].message.content == "hello"
        assert client.responses.create(model="agent", input="#say=hello").output_text == "hello"
        with client.chat.completions.create(**BODY, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
        assert client.models.retrieve("agent").id == "agent"
    with openai.OpenAI(base_url=f"{proxy.url}/openai/v1/", api_key=key, max_retries=0) as newer:
        assert newer.chat.completions.create(**BODY).choices[0].message.content == "hello"
        assert newer.responses.create(model="agent", input="#say=hello").output_text == "hello"
    with azure(proxy, api_key="unknown") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(**BODY)
    proxy.settled()
    assert [(call.alias, call.status) for call in store.calls.page(10)] == [("agent", 200)] * 5


def test_a_deployment_of_azure_openai_is_the_model_whatever_the_body_names(proxy: Proxy) -> None:
    with azure(proxy, api_key="x", azure_deployment="agent@0") as client:
        for model in ("gpt-5", "", None):
            answer = client.chat.completions.create(**BODY | {"model": model})
            assert (answer.model, answer.choices[0].message.content) == ("agent@0", "hello")
    with azure(proxy, api_key="x", azure_endpoint=f"{proxy.url}/t/run-9") as client:
        answer = client.chat.completions.with_raw_response.create(**BODY)
        assert answer.headers["x-ratchet-trajectory"] == "run-9"
    with azure(proxy, api_key="x") as client, pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(**BODY | {"model": "nobody/2"})
    deployment = "/openai/deployments/agent/chat/completions"
    assert proxy.http.post(deployment, content=b"{}").status_code == 400
    assert proxy.http.get(deployment).status_code == 405
    for path in ("/openai/api/agents", "/openai/deployments/agent/embeddings", "/openai/deployments", "/openai"):
        assert proxy.http.get(path).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST, OPTIONS"),
        ("HEAD", "/v1/responses", "POST, OPTIONS"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/messages", "POST, OPTIONS"),
        ("PATCH", "/api/trajectories/x", "DELETE, GET, HEAD, OPTIONS"),
        ("GET", "/api/trajectories/x/finish", "POST, OPTIONS"),
    ],
)
def test_another_method_is_refused_and_not_forwarded_to_vllm(
    proxy: Proxy, vllm: ScriptedVllm, method: str, path: str, allow: str
) -> None:
    before = len(vllm.paths)
    answer = proxy.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert method == "HEAD" or allow in answer.json()["error"]["message"]
    options = proxy.http.request("OPTIONS", path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allow, b"")
    assert path not in vllm.paths[before:]


def test_headers_of_the_vendors_are_accepted(proxy: Proxy) -> None:
    headers = {"OpenAI-Beta": "assistants=v2", "OpenAI-Organization": "o", "anthropic-beta": "x", "HTTP-Referer": "y"}
    assert proxy.http.post("/v1/chat/completions?beta=true", json=BODY, headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
def test_a_compressed_body_is_read_and_recorded(proxy: Proxy, encoding: str, pack: Any) -> None:
    answer = post(proxy, pack(json.dumps(BODY).encode()), encoding)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert proxy.last_call().untrainable is None


@pytest.mark.slow
def test_a_compressed_body_is_bounded_and_a_broken_one_is_refused(start: Start) -> None:
    proxy = start(max_body_bytes=100_000)
    bomb = post(proxy, gzip.compress(b" " * 50_000_000), "gzip")
    assert (bomb.status_code, "max_body_bytes" in bomb.text) == (413, True)
    whole_body = json.dumps(BODY | {"user": "x" * 50_000}).encode()
    whole = gzip.compress(json.dumps(BODY).encode())
    assert "ends too early" in post(proxy, whole[:-4], "gzip").text
    members = [gzip.compress(part) for part in (whole_body[:9], b"", whole_body[9:4_000], whole_body[4_000:])]
    assert post(proxy, b"".join(members) + b"\0" * 100, "gzip").status_code == 200
    assert "ends too early" in post(proxy, b"".join(members)[:-4], "gzip").text
    assert "max_body_bytes" in post(proxy, gzip.compress(b" " * 30_000_000) * 3, "gzip").text
    assert post(proxy, b"{}", "gzip").status_code == 400
    foreign = post(proxy, b"x", "br")
    assert (foreign.status_code, "send the body as gzip or zstd" in foreign.text) == (415, True)


def test_a_body_of_zstd_is_bounded_in_size_parts_and_memory() -> None:
    frames = [zstd.compress(part) for part in (b"ab", b"", b"c")]
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"xyz"
    assert decompressed_body(b"".join([frames[0], skipped, *frames[1:]]), 3, "zstd") == b"abc"
    whole = zstd.compress(b" " * 10_000_000)
    with pytest.raises(BodyTooLarge, match="max_body_bytes"):
        decompressed_body(whole, 9_999_999, "zstd")
    for broken, says in ((whole[:-1], "ends too early"), (frames[0] + b"x", "be read"), (b"abcd", "be read")):
        with pytest.raises(BadRequest, match=says):
            decompressed_body(broken, 10_000_000, "zstd")
    wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 24})
    with pytest.raises(BadRequest, match="memory"):
        decompressed_body(wide.compress(b"a" * 99) + wide.flush(), 99, "zstd")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_a_body_of_very_many_parts_is_refused(encoding: str, pack: Any) -> None:
    assert decompressed_body(pack(b"") * 4095 + pack(b"x"), 1, encoding) == b"x"
    with pytest.raises(BadRequest, match="4096 parts"):
        decompressed_body(pack(b"") * 4096 + pack(b"x"), 1, encoding)


def post(proxy: Proxy, content: bytes, encoding: str) -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return proxy.http.post("/v1/chat/completions", content=content, headers=headers)


def test_a_body_with_a_byte_order_mark_is_read(proxy: Proxy) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(BODY).encode()
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = content.replace(b'"messages"', b'"max_tokens": 9, "messages"')
        assert proxy.http.post(path, content=body, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {}), ("/v1/messages", BODY), ("/v1/models/nobody", None), ("/x", {})]
)
def test_a_refusal_has_a_request_id(proxy: Proxy, path: str, body: Any) -> None:
    method = "GET" if body is None else "POST"
    refused = proxy.http.request(method, path, json=body)
    assert refused.status_code in (400, 404)
    assert refused.headers["x-request-id"].startswith("req_")
    assert refused.headers["x-request-id"] == refused.headers["request-id"]
    again = proxy.http.request(method, path, json=body, headers={"x-request-id": "mine-7"})
    assert again.headers["x-request-id"] == "mine-7"


@pytest.mark.parametrize(("header", "shape"), [({}, {"message", "type", "param", "code"}),
                                               ({"anthropic-version": "2023-06-01"}, {"message", "type"})])  # fmt: skip
def test_an_unknown_route_gets_a_404_in_the_clients_format(
    proxy: Proxy, header: dict[str, str], shape: set[str]
) -> None:
    answer = proxy.http.post("/v1/nowhere", json={"model": "agent"}, headers=header)
    assert (answer.status_code, set(answer.json()["error"])) == (404, shape)
    assert "no route /v1/nowhere" in answer.json()["error"]["message"]
