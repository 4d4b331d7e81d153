"""A scripted engine with adapters. If it `mixes`, concurrent calls of the base model are answered by an adapter."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send


class MixingEngine:
    """Base logprobs are whole numbers; an adapter's are half a nat lower."""

    def __init__(self, *, mixes: bool) -> None:
        self.loaded: list[str] = []
        self.max_tokens = 0  # tokens that a call of an adapter asked for
        self._mixes = mixes
        self._busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = await Request(scope, receive).body()
            answer = await self._answer(scope["path"], json.loads(body) if body else {})
            await JSONResponse(answer)(scope, receive, send)

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/load_lora_adapter":
            self.loaded.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.loaded.remove(body["lora_name"])
        elif path == "/v1/models":
            return {"data": [{"id": name} for name in self.loaded]}
        elif path == "/v1/chat/completions":
            self.max_tokens = max(self.max_tokens, body["max_tokens"])
            self._busy += 1
            await asyncio.sleep(0.3)
            self._busy -= 1
            return {"choices": [{"message": {}}] * body["n"], "usage": {"completion_tokens": 2}}
        elif path == "/v1/completions":
            adapted = body["model"] in self.loaded or (self._mixes and self._busy > 0)
            top = {"token_id:7": -1.5 if adapted else -1.0, "token_id:8": -2.5 if adapted else -2.0}
            return {"choices": [{"index": place, "logprobs": {"top_logprobs": [top]}}
                                for place in range(len(body["prompt"]))]}  # fmt: skip
        return {}
