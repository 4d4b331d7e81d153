"""The upstream of the hostile campaign: a scripted vLLM that always behaves correctly and records leaked secrets.

It rejects what its script cannot parse with 400, as vLLM does. With `scale_out` it renders, generates and derenders.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ratchet.proxy.wire.asgi import JSON, replay_body, send_bytes
from tests.harness.proxy.scripted_scale_out import DERENDER, DETOKENIZE, GENERATE, ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import ScriptedVllm

_OF_TOKENS = (GENERATE, DERENDER, DETOKENIZE)  # requests that the proxy itself composes
_REFUSED = b'{"error": {"message": "not JSON", "type": "BadRequestError"}}'
_KEPT = ("model", "logprobs", "return_token_ids", "stream", "stream_options")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class HostileUpstream:
    """The ASGI application."""

    def __init__(self, upstream_key: str, *, scale_out: bool = False) -> None:
        self._vllm = ScriptedScaleOut() if scale_out else ScriptedVllm()
        self._scale_out = scale_out
        self._upstream_key = upstream_key
        self.secrets: list[str] = []
        self.leaks: list[str] = []
        self.probes = 0  # GET /v1/models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._vllm(scope, receive, send)
            return
        body, message = b"", await receive()
        while True:
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
            message = await receive()
        head = repr((scope["path"], scope["query_string"], scope["headers"])).replace(self._upstream_key, "")
        self.leaks += [
            f"to the upstream: {one} in {scope['path']}" for one in self.secrets if one.encode() in body or one in head
        ]
        self._clear_script()
        self.probes += scope["path"] == "/v1/models"
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["path"] not in _OF_TOKENS:
                body = _simplified(body, whole=self._scale_out)
            await self._vllm(scope, replay_body(body, receive), tracked_send)
        except _UNREADABLE:
            if started:
                raise
            await send_bytes(send, 400, _REFUSED, [JSON])

    def _clear_script(self) -> None:
        """Free the script's records, which would count as memory growth."""
        for kept in ("calls", "paths", "queries", "generated", "rendered"):
            getattr(self._vllm, kept, []).clear()


def _simplified(body: bytes, *, whole: bool) -> bytes:
    """Return a valid body for the script with the same directive; `whole` keeps the messages."""
    request: Any = json.loads(body) if body else {}
    request = request if isinstance(request, dict) else {}
    prompt = str(request.get("messages") or request.get("prompt"))
    words = prompt[prompt.index("#say=") :].split("'")[0] if "#say=" in prompt else "#say=fine"
    kept = {name: request[name] for name in _KEPT if name in request}
    if "prompt" in request:
        kept["prompt"] = words
    else:
        kept["messages"] = (
            request["messages"] if whole and "messages" in request else [{"role": "user", "content": words}]
        )
    return json.dumps({**kept, "input": "x"}).encode()
