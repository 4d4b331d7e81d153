"""POST /v1/messages/count_tokens: the length of a prompt, by vLLM's own template and tokenizer.

Sends the translated messages to vLLM's /tokenize, so the count is that of the inner chat call: with the model and the
prompt of the rollout that the path, a header or the key names, else with the version's prompt.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.admission import planned_model
from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlan, RolloutPlans
from ratchet.proxy.coordinator.versions.policy_cache import Access, PolicyCache
from ratchet.proxy.dialects import anthropic_request, inner_request
from ratchet.proxy.dialects.dialect import read_body_with
from ratchet.proxy.errors import BadRequest, UpstreamDisconnected
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.asgi import CALLER, JSON, KEY_ID, headers_of, send_bytes, send_json
from ratchet.proxy.wire.body_bounds import BodyBounds, read_json
from ratchet.proxy.wire.error_shapes import ANTHROPIC
from ratchet.proxy.worker.http import request_identity
from ratchet.proxy.worker.http.disconnect_watch import DisconnectWatch
from ratchet.store.content.messages import with_prompt
from ratchet.store.records import family_of

_TOKENIZE = "/tokenize"


class CountTokensEndpoint:
    """The endpoint. Nothing is generated, so nothing is recorded."""

    def __init__(
        self,
        policies: PolicyCache,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        rollouts: RolloutPlans,
        bounds: BodyBounds,
    ) -> None:
        self._policies = policies
        self._rollouts = rollouts
        self._upstream = upstream
        self._pool = pool
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = await read_json(receive, self._bounds)
        plan, family = await self._find_plan(scope)
        access = scope[CALLER].access
        body = await read_body_with(lambda body: self._translate(body, plan, family, access), received)
        with DisconnectWatch(receive) as watch:
            try:
                status, response = await self._tokenize(body)
            except asyncio.CancelledError:
                if not watch.client_left:
                    raise
                watch.uncancel_task()
                return
            watch.stop()
            if status == 200:
                await send_json(send, 200, {"input_tokens": _count(response)})
            else:
                await send_bytes(send, status, ANTHROPIC.encode_upstream_error(status, response)[0], [JSON])

    async def _find_plan(self, scope: Scope) -> tuple[RolloutPlan | None, str | None]:
        """Return the plan of the named rollout, and the task family. Raises NotReady."""
        headers = headers_of(scope)
        name = request_identity.trajectory_outside_body(scope, headers)
        plan = await self._rollouts.find_plan(name, scope[KEY_ID]) if name else None
        if plan is not None and plan.model is not None and "@" in plan.model:
            await self._policies.refresh_if_unknown(plan.model)
        task = plan.task if plan else request_identity.read_labels(headers)[0]
        return plan, family_of(task, "") if task else None

    def _translate(self, body: bytes, plan: RolloutPlan | None, family: str | None, access: Access) -> bytes:
        """Return the body for /tokenize. Raises BadRequest, NotFound, NotReady."""
        fields = inner_request.decode(body)
        model, is_helper = planned_model(fields.get("model") or self._policies.only_agent(access), plan, self._policies)
        alias, version = self._policies.resolve_model(model, access)
        if alias in self._policies.other_models:
            raise BadRequest(f"the tokens of {alias}, a model of another server, cannot be counted here", param="model")
        version = self._policies.live_version(alias) if version is None else version
        translated = anthropic_request.count_body(fields, self._policies.served_name(alias, version))
        prompt = plan.prompt if plan and not is_helper else None
        prompt = prompt or self._policies.prompt_of(alias, version)
        translated["messages"] = with_prompt(translated["messages"], prompt, family)
        return msgspec.json.encode(translated)

    async def _tokenize(self, body: bytes) -> tuple[int, bytes]:
        response = await self._pool.send("", lambda replica: self._upstream.post_json(replica.url, _TOKENIZE, body))
        try:
            return response.status, await response.read()
        finally:
            response.close()


def _count(response: bytes) -> int:
    try:
        count: Any = msgspec.json.decode(response, type=dict[str, Any])["count"]
        return int(count)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise UpstreamDisconnected(f"the upstream's /tokenize returned no count: {error}") from error
