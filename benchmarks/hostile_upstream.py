"""The upstream of the hostile campaign: a scripted vLLM that behaves whatever reaches it, and notes secrets it saw.

What its script cannot read it refuses with 400, as vLLM does. With `scale_out` it renders, generates and derenders.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ratchet.proxy.wire.asgi import JSON, replay_body, send_bytes
from tests.harness.proxy.scripted_scale_out import DERENDER, DETOKENIZE, GENERATE, ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import ScriptedVllm

_OF_TOKENS = (GENERATE, DERENDER, DETOKENIZE)  # what the proxy writes by itself
_REFUSED = b'{"error": {"message": "not JSON", "type": "BadRequestError"}}'
_KEPT = ("model", "logprobs", "return_token_ids", "stream", "stream_options")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class Upstream:
    """The ASGI application."""

    def __init__(self, upstream_key: str, *, scale_out: bool = False) -> None:
        self._vllm = ScriptedScaleOut() if scale_out else ScriptedVllm()
        self._scale_out = scale_out
        self._upstream_key = upstream_key
        self.secrets: list[str] = []
        self.leaks: list[str] = []
        self.looks = 0  # questions for the models

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
        self._forget()
        self.looks += scope["path"] == "/v1/models"
        begun = False

        async def told(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if scope["path"] not in _OF_TOKENS:
                body = _plain(body, whole=self._scale_out)
            await self._vllm(scope, replay_body(body, receive), told)
        except _UNREADABLE:
            if begun:
                raise
            await send_bytes(send, 400, _REFUSED, [JSON])

    def _forget(self) -> None:
        """Keep the script's own memory out of the figures."""
        for kept in ("calls", "paths", "queries", "generated", "rendered"):
            getattr(self._vllm, kept, []).clear()


def _plain(body: bytes, *, whole: bool) -> bytes:
    """Return a body that asks the same of a model, with plain words unless `whole`."""
    asked: Any = json.loads(body) if body else {}
    asked = asked if isinstance(asked, dict) else {}
    said = str(asked.get("messages") or asked.get("prompt"))
    words = said[said.index("#say=") :].split("'")[0] if "#say=" in said else "#say=fine"
    kept = {name: asked[name] for name in _KEPT if name in asked}
    if "prompt" in asked:
        kept["prompt"] = words
    else:
        kept["messages"] = asked["messages"] if whole and "messages" in asked else [{"role": "user", "content": words}]
    return json.dumps({**kept, "input": "x"}).encode()
