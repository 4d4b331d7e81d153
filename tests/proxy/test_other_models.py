"""Other models by name: called with their own key in their dialect, recorded, never trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from starlette.types import Message, Receive, Scope, Send

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.model_list import ModelEntry
from ratchet.proxy.settings import ProxySettings, secret_values
from ratchet.store.records import Call
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served

KEY = "sk-judge-0123456789"
OPENAI_FIELDS = {
    "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "tools", "tool_choice", "prompt",
}  # fmt: skip
HI: Any = [{"role": "user", "content": "hi"}]


class PlainServer:
    """An OpenAI-compatible server that accepts only OpenAI's fields and one key."""

    def __init__(self) -> None:
        self.model = ScriptedVllm("gpt-judge")
        self.keys: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.model(scope, receive, send)
            return
        message = await receive()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers.append(headers)
        body = json.loads(message["body"] or b"{}")
        self.bodies.append(body)
        unknown = body.keys() - OPENAI_FIELDS - {"input"}
        if headers.get("authorization") != f"Bearer {KEY}":
            await answer(send, 401, f"Incorrect API key provided: {KEY[:8]}...")
        elif unknown:
            await answer(send, 400, f"Unrecognized request arguments: {sorted(unknown)}")
        else:
            await self.model(scope, _again(message, receive), send)


def _again(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def plain() -> Iterator[tuple[PlainServer, str]]:
    app = PlainServer()
    with served(app) as url:
        yield app, url


def entry(url: str, model: str = "openai/gpt-judge", name: str = "judge", key: str | None = "K") -> dict[str, Any]:
    params = {"model": model, "api_base": url} | ({"api_key": f"os.environ/{key}"} if key else {})
    return {"model_name": name, "litellm_params": params}


@pytest.fixture
def proxy(start: Start, plain: tuple[PlainServer, str]) -> Proxy:
    return start(model_list=[entry(plain[1])], model_keys={"K": KEY}, upstream_key="sk-for-our-vllm")


def only(proxy: Proxy) -> Call:
    proxy.settled()
    (call,) = proxy.store.calls.page(9)
    return call


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_another_model_answers_in_every_dialect_under_its_own_name_and_key(
    proxy: Proxy, plain: tuple[PlainServer, str], dialect: str, stream: bool
) -> None:
    agent = proxy.agent(key="the-clients-own")
    model: str | None = None
    if dialect == "chat" and stream:
        model = list(agent.chat.completions.create(model="judge", messages=HI, stream=True))[-1].model
    elif dialect == "chat":
        model = agent.chat.completions.create(model="judge", messages=HI).model
    elif dialect == "completions":
        model = agent.completions.create(model="judge", prompt="hi").model
    elif dialect == "responses" and stream:
        with agent.responses.stream(model="judge", input="hi") as events:
            model = events.get_final_response().model
    elif dialect == "responses":
        model = agent.responses.create(model="judge", input="hi").model
    else:
        with anthropic.Anthropic(base_url=proxy.url, api_key="the-clients-own", max_retries=0) as claude:
            fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {"top_k": 5}}
            messages: Any = [
                *HI,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
                *HI,
                {"role": "assistant", "content": "It"},
            ]
            fields |= {"model": "judge", "max_tokens": 2048, "messages": messages}
            if stream:
                with claude.messages.stream(**fields) as stream_events:
                    model = stream_events.get_final_message().model
            else:
                model = claude.messages.create(**fields).model
    assert model == "judge"
    server = plain[0]
    assert [body["model"] for body in server.bodies] == ["gpt-judge"]
    assert "reasoning" not in json.dumps(server.bodies[0].get("messages"))
    assert "our-vllm" not in str(server.headers)
    assert "the-clients-own" not in str(server.headers)
    call = only(proxy)
    assert (call.alias, call.state, call.untrainable, call.choices[0].token_ids) == (
        "judge",
        "answered",
        "other_model",
        b"",
    )
    assert (call.prompt_tokens > 0, call.completion_tokens > 0) == (True, True)
    assert proxy.store.trajectories.read(call.trajectory_id).trajectory.purpose == "other_model"


def test_another_vllm_is_called_with_return_token_ids(start: Start, plain: tuple[PlainServer, str]) -> None:
    teacher = ScriptedVllm("org/teacher")
    with served(teacher) as url:
        proxy = start(model_list=[entry(url, "hosted_vllm/org/teacher", "teacher", key=None)])
        given = proxy.http.post("/v1/chat/completions", json={"model": "teacher", "messages": HI})
        assert (given.json()["model"], given.headers["x-ratchet-policy"]) == ("teacher", "teacher")
        assert teacher.calls[0]["model"] == "org/teacher"
    call = only(proxy)
    assert (call.untrainable, len(call.choices[0].token_ids) > 0) == (None, True)


def test_another_model_is_listed_and_named_in_errors_about_unknown_models(proxy: Proxy) -> None:
    assert [card["id"] for card in proxy.http.get("/v1/models").json()["data"]] == ["agent", "agent@0", "judge"]
    gone = proxy.http.post("/v1/chat/completions", json={"model": "jugde", "messages": HI})
    assert re.search("'judge'.* agent, judge", gone.json()["error"]["message"])


def test_a_judge_within_a_named_trajectory_is_recorded_beside_it(proxy: Proxy) -> None:
    for model in ("judge", "agent", "judge", "agent"):
        answer = proxy.http.post("/t/run-1/v1/chat/completions", json={"model": model, "messages": HI})
        assert answer.status_code == 200
    proxy.settled()
    runs = {run.id: (run.alias, run.purpose, run.calls) for run in proxy.store.trajectories.page(9)}
    assert runs == {"run-1": ("agent", "live", 2), "run-1~judge": ("judge", "other_model", 2)}


def test_a_dialogue_with_another_model_is_one_trajectory(proxy: Proxy) -> None:
    agent = proxy.agent()
    first = agent.chat.completions.create(model="judge", messages=HI).choices[0].message.model_dump(exclude_none=True)
    for model in ("judge", "agent"):  # the same messages to our own model are a separate trajectory
        agent.chat.completions.create(model=model, messages=[*HI, first, *HI])
    proxy.settled()
    assert {(run.alias, run.calls) for run in proxy.store.trajectories.page(9)} == {("judge", 2), ("agent", 1)}


def test_a_refused_key_is_an_upstream_error_that_shows_no_part_of_it(
    start: Start, plain: tuple[PlainServer, str]
) -> None:
    proxy = start(model_list=[entry(plain[1])], model_keys={"K": "sk-wrong"})
    given = proxy.http.post("/v1/chat/completions", json={"model": "judge", "messages": HI})
    assert (given.status_code, given.json()["error"]["code"]) == (502, "upstream_refused_key")
    assert "refused the key in K with 401" in given.json()["error"]["message"]
    assert "sk-" not in given.text


def test_entries_of_one_name_are_a_pool(start: Start, plain: tuple[PlainServer, str]) -> None:
    dead = "http://127.0.0.1:9"
    proxy = start(model_list=[entry(dead), entry(plain[1])], model_keys={"K": KEY})
    for number in range(40):  # equal beginnings would go to one server
        messages = [{"role": "user", "content": f"hi {number}"}]
        given = proxy.http.post("/v1/chat/completions", json={"model": "judge", "messages": messages})
        assert given.status_code == 200
    assert f'ratchet_upstream_up{{upstream="judge {dead}/v1"}} 0.0' in proxy.http.get("/metrics").text
    assert proxy.http.get("/health/ready").status_code == 200, "another model's server is not ours to wait for"


def test_another_model_may_have_its_own_timeout(start: Start, plain: tuple[PlainServer, str]) -> None:
    slow = entry(plain[1])
    slow["litellm_params"]["timeout"] = 0.2
    proxy = start(model_list=[slow], model_keys={"K": KEY})
    body = {"model": "judge", "messages": [{"role": "user", "content": "#tokens=100 #delay=0.05"}]}
    assert proxy.http.post("/v1/chat/completions", json=body).status_code == 504


def test_embeddings_pass_through_but_no_other_route_uses_our_key(proxy: Proxy, plain: tuple[PlainServer, str]) -> None:
    given = proxy.http.post("/v1/embeddings", json={"model": "judge", "input": "a"})
    assert plain[0].bodies == [{"model": "gpt-judge", "input": "a"}]
    assert given.json()["path"] == "/v1/embeddings"
    for path in ("/v1/fine_tuning/jobs", "/v1/files", "/v1/images/generations"):
        assert proxy.http.post(path, json={"model": "judge"}).json()["error"]["code"] == "unknown_route"
    count = {"model": "judge", "messages": HI}
    assert "cannot be counted" in proxy.http.post("/v1/messages/count_tokens", json=count).json()["error"]["message"]
    assert len(plain[0].bodies) == 1


def test_errors_of_another_model_have_the_dialects_format(proxy: Proxy) -> None:
    failing: Any = [{"role": "user", "content": "#status=429"}]
    with (
        anthropic.Anthropic(base_url=proxy.url, api_key="k", max_retries=0) as claude,
        pytest.raises(anthropic.RateLimitError) as limit,
    ):
        claude.messages.create(model="judge", max_tokens=9, messages=failing)
    assert limit.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.RateLimitError):
        proxy.agent().chat.completions.create(model="judge", messages=failing)


# --- settings -------------------------------------------------------------------------------------------------


def settings(*entries: Any, environ: dict[str, str] | None = None) -> ProxySettings:
    values: Any = {"upstreams": ("http://127.0.0.1:1",), "model": "agent", "store": "-", "journal": "j"}
    models = tuple(map(ModelEntry.model_validate, entries))
    return ProxySettings(**values, model_list=models, **secret_values(environ or {}, models))


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"model": "openai/a", "api_key": "sk-secret"}, "os.environ/NAME_OF_THE_VARIABLE"),
        ({"model": "anthropic/claude"}, "write openai/NAME"),
        ({"model": "Qwen/Qwen3"}, "write openai/NAME"),
        ({"model": "hosted_vllm/a"}, "needs api_base"),
        ({"model": "openai/a", "api_base": "localhost:1"}, "is not a URL"),
        ({"model": "openai/a", "api_base": "http://me:sk-secret@host/v1"}, "must be a plain URL"),
        ({"model": "openai/a", "rpm": 3}, "rpm: unknown"),
    ],
)
def test_a_wrong_entry_names_the_remedy_and_shows_no_secret(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(pydantic.ValidationError) as error:
        settings({"model_name": "judge", "litellm_params": params})
    assert complaint in str(error.value)
    assert "sk-secret" not in str(error.value)


def test_the_trained_alias_cannot_be_another_model() -> None:
    with pytest.raises(pydantic.ValidationError, match="agent is the name of "):
        settings(entry("http://h", name="agent"))


def test_a_key_is_read_from_its_variable_and_never_shown(start: Start) -> None:
    read = settings(entry("http://h"), environ={"K": KEY})
    assert read.model_keys["K"].get_secret_value() == KEY
    assert KEY not in repr(read) + str(read.model_dump(mode="json"))
    with pytest.raises(ProxyError, match="from the variable K, which is not set"):
        start(model_list=[entry("http://h")])


@pytest.mark.parametrize(
    ("given", "base"),
    [("http://h:1", "http://h:1/v1"), ("http://h/v1/", "http://h/v1"), ("https://h/api/v4", "https://h/api/v4")],
)
def test_a_base_without_a_path_gets_the_usual_one(given: str, base: str) -> None:
    assert ModelEntry.model_validate(entry(given)).litellm_params.base == base


def test_a_litellm_file_serves(tmp_path: Any) -> None:
    from ratchet.settings.load_settings import load

    file = tmp_path / "litellm.yaml"
    file.write_text(
        "model_list:\n- model_name: judge\n  litellm_params:\n    model: openai/gpt\n    api_key: os.environ/K\n"
        "  model_info: {input_cost_per_token: 0.0000004}\n"
    )
    read = load(file, environ={"K": KEY}).proxy
    assert read.model_list[0].litellm_params.base == "https://api.openai.com/v1"
    assert read.model_keys["K"].get_secret_value() == KEY
    file.write_text(file.read_text().replace("os.environ/K", KEY))
    from ratchet.errors import SettingsError

    with pytest.raises(SettingsError, match=r"litellm\.yaml: model_list\.0\.litellm_params\.api_key: ") as e:
        load(file, environ={})
    assert KEY not in str(e.value)
