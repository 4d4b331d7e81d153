"""GET /v1/responses/{id} and /v1/responses/{id}/input_items: a response, rendered from its record.

Only the key that made a response can read it. The endpoint waits a moment for the record to reach the store. Fields
that are not recorded stay empty: `metadata` is {}, and `instructions` are the first system message of the input items.
Responses are deleted by an operator, with the whole trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.conversations.conversation_cache import ANSWER_SECONDS, is_recent
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.dialects.content_blocks import message_to_delta
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.dialects.responses_renderer import ResponseRenderer, response_id
from ratchet.proxy.dialects.responses_request import INPUT
from ratchet.proxy.errors import BadRequest, Forbidden, NotFound, NotReady, UpstreamDisconnected, not_looked_up
from ratchet.proxy.wire.asgi import KEY_ID, PATH, send_json
from ratchet.store.errors import RecordNotFound, StoreError
from ratchet.store.records import REDACTED, Call, CallStarted
from ratchet.store.states import CallState
from ratchet.store.store import Store

PREFIX = "/responses/"
_ITEMS = "/input_items"
_DELETED_BY = "responses are deleted by an operator, with their trajectory: DELETE /api/trajectories/{id}"
_MAX_ITEMS = 100
_DEFAULT_ITEMS = 20

Message = Mapping[str, Any]


class StoredResponse(msgspec.Struct, frozen=True):
    """A response in the store: its call, the messages of its prompt, its answer, and its tools in the chat format."""

    call: Call
    messages: tuple[Message, ...]
    answer: Message | None
    tools: Any


class StoredResponses:
    """The endpoint for stored responses."""

    def __init__(self, store: Store, lookups: RecordLookups) -> None:
        self._store = store
        self._lookups = lookups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name: str = scope[PATH].removeprefix(PREFIX)
        if scope["method"] == "DELETE":
            await self._find(name, scope[KEY_ID])
            raise Forbidden(_DELETED_BY)
        if scope["method"] not in ("GET", "HEAD"):
            raise NotFound(f"no route {scope['method']} {scope['path'][:200]}", code="unknown_route")
        query = {key: values[-1] for key, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        if query.get("stream", "false") == "true":
            raise BadRequest("a stored response cannot be streamed: leave out `stream`", param="stream")
        if name.endswith(_ITEMS):
            stored = await self._find(name.removesuffix(_ITEMS), scope[KEY_ID])
            await send_json(send, 200, _page(_input_items(stored), query))
        else:
            await send_json(send, 200, _response_object(await self._find(name, scope[KEY_ID])))

    async def _find(self, name: str, key_id: str | None) -> StoredResponse:
        patience = ANSWER_SECONDS if is_recent(name) else 0.0
        try:
            stored, settled = await self._lookups.wait_for(lambda: self._read(name, key_id), key_id, patience)
        except StoreError as error:
            raise not_looked_up(f"response {name!r}", error) from error
        if stored is None and patience and not settled:
            raise NotReady(f"response {name!r} is not in the store yet, if it was answered a moment ago: retry")
        if stored is None:
            raise NotFound(f"no response {name[:80]!r} is recorded", param="response_id")
        return stored

    def _read(self, name: str, key_id: str | None) -> StoredResponse | None:
        try:
            call = self._store.calls.read("call_" + name.removeprefix("resp_"))
            if call.dialect != "responses" or call.untrainable == REDACTED or call.state == CallState.STARTED:
                return None
            run = self._store.trajectories.read(call.trajectory_id)
        except RecordNotFound:
            return None
        if run.trajectory.key_id != key_id:
            return None
        path = self._store.trajectories.messages_to
        answer = path(call.choices[0].reply_node)[-1:] if call.choices else ()
        return StoredResponse(call, path(call.prompt_node), answer[0] if answer else None, run.tools)


def _response_object(stored: StoredResponse) -> Json:
    """Return the response object."""
    call = stored.call
    tools = [_tool(tool) for tool in stored.tools or ()]
    start = CallStarted(
        call_id=call.id,
        trajectory_id=call.trajectory_id,
        started_at=call.started_at,
        alias=call.alias,
        version=call.version,
        dialect=call.dialect,
        streamed=call.streamed,
        linked_by=call.linked_by,
        prompt_node=call.prompt_node,
    )
    renderer = ResponseRenderer(
        start, _body(call, tools), frozenset(t["name"] for t in tools if t["type"] == "custom"), {}
    )
    if stored.answer is not None:
        choice = {"message": stored.answer, "finish_reason": call.choices[0].finish_reason}
        usage = {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens}
        renderer.feed({"usage": usage, "choices": [message_to_delta(choice)]})
    if call.state == CallState.ANSWERED:
        renderer.finish()
    else:
        renderer.fail(UpstreamDisconnected(call.error or f"the call was {call.state}"))
    response = renderer.answer()
    return response | ({"completed_at": int(call.ended_at)} if response["completed_at"] and call.ended_at else {})


def _body(call: Call, tools: Sequence[Json]) -> Json:
    """Return the recorded fields of the request."""
    sampling = call.sampling
    follows = call.linked_by == "previous_response" and call.parent_call
    return {
        "tools": tools,
        "max_output_tokens": sampling.get("max_tokens"),
        "temperature": sampling.get("temperature"),
        "top_p": sampling.get("top_p"),
        "presence_penalty": sampling.get("presence_penalty"),
        "frequency_penalty": sampling.get("frequency_penalty"),
        "reasoning": {"effort": sampling["reasoning_effort"]} if sampling.get("reasoning_effort") else None,
        "previous_response_id": response_id(call.parent_call) if follows and call.parent_call else None,
    }


def _tool(tool: Json) -> Json:
    function = tool["function"]
    if function.get("parameters") == INPUT:
        return {"type": "custom", **{name: function[name] for name in ("name", "description") if name in function}}
    return {"type": "function", "parameters": None, **function}


def _input_items(stored: StoredResponse) -> list[Json]:
    """Return the prompt as items, oldest first."""
    items: list[Json] = []
    for message in stored.messages:
        items += _items(message)
    suffix = stored.call.id.removeprefix("call_")
    return [{"id": f"{_PREFIXES.get(item['type'], 'msg')}_{suffix}_in{n}", **item} for n, item in enumerate(items)]


_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _items(message: Message) -> list[Json]:
    role, content = message["role"], message.get("content")
    done = {"status": "completed"}
    if role == "tool":
        output = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output, **done}]
    items: list[Json] = []
    if thought := message.get("reasoning"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
    if content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        items.append({"type": "message", "role": role, "content": [_part(part, role) for part in parts], **done})
    calls = message.get("tool_calls") or ()
    return [*items, *({"type": "function_call", "call_id": c["id"], **c["function"], **done} for c in calls)]


def _part(part: Message, role: str) -> Json:
    if part["type"] == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")}
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}


def _page(items: list[Json], query: Mapping[str, str]) -> Json:
    """Return one page of items, newest first unless `order` is `asc`. Raises BadRequest."""
    limit = query.get("limit", str(_DEFAULT_ITEMS))
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_ITEMS:
        raise BadRequest(f"`limit` must be a number from 1 to {_MAX_ITEMS}", param="limit")
    ordered = items if query.get("order") == "asc" else items[::-1]
    if "after" in query:
        places = [place for place, item in enumerate(ordered) if item["id"] == query["after"]]
        if not places:
            raise BadRequest("`after` is not an item of this response", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": len(ordered) > len(page), **ends}
