"""POST /v1/messages/count_tokens: how long the prompt of such a call would be, by vLLM's own template and tokenizer.

Asks vLLM's /tokenize with the translated messages, so that the count is that of the inner chat call: with the prompt
and on the model of the rollout that the path, a header or the key names, else with the version's prompt.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlan, Rollouts
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.dialects import anthropic_request, inner_request
from ratchet.proxy.dialects.dialect import read_body_with
from ratchet.proxy.errors import BadRequest, UpstreamDisconnected
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.asgi import JSON, KEY_ID, headers_of, send_bytes, send_json
from ratchet.proxy.wire.body_bounds import BodyBounds, read_json
from ratchet.proxy.wire.error_shapes import ANTHROPIC
from ratchet.proxy.worker.http import request_identity
from ratchet.proxy.worker.http.disconnect_watch import DisconnectWatch
from ratchet.store.content.prompt_substitution import with_prompt
from ratchet.store.records import family_of

PATH = "/tokenize"


class CountTokensEndpoint:
    """The endpoint. Nothing is generated, so nothing is recorded."""

    def __init__(
        self,
        policies: PolicyCache,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        rollouts: Rollouts,
        bounds: BodyBounds,
    ) -> None:
        self._policies = policies
        self._rollouts = rollouts
        self._upstream = upstream
        self._pool = pool
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await read_json(receive, self._bounds)
        plan, family = await self._planned(scope)
        body = await read_body_with(lambda read: self._body(read, plan, family), asked)
        with DisconnectWatch(receive) as watch:
            try:
                status, answer = await self._ask(body)
            except asyncio.CancelledError:
                if not watch.left:
                    raise
                watch.forgive()
                return
            watch.stop()
            if status == 200:
                await send_json(send, 200, {"input_tokens": _count(answer)})
            else:
                await send_bytes(send, status, ANTHROPIC.encode_upstream_error(status, answer)[0], [JSON])

    async def _planned(self, scope: Scope) -> tuple[RolloutPlan | None, str | None]:
        """Return the plan of the rollout that is named, and the family of the task that is known. Raises NotReady."""
        headers = headers_of(scope)
        name, task = request_identity.trajectory_outside_body(scope, headers), request_identity.labels(headers)[0]
        plan = await self._rollouts.find_plan(name, scope[KEY_ID]) if name else None
        if plan is not None and plan.model is not None and "@" in plan.model:
            await self._policies.refresh_if_unknown(plan.model)
        task = plan.task if plan else task
        return plan, family_of(task, "") if task else None

    def _body(self, body: bytes, plan: RolloutPlan | None, family: str | None) -> bytes:
        fields = inner_request.decode(body)
        inner_request.require(fields, "model")
        asked = fields["model"]
        alias, version = self._policies.resolve_model(
            plan.model_for(asked, self._policies.other_models) if plan else asked
        )
        if alias in self._policies.other_models:
            raise BadRequest(f"the tokens of {alias}, a model of another server, cannot be counted here", param="model")
        version = self._policies.live_version(alias) if version is None else version
        counted = anthropic_request.count_body(fields, self._policies.served_name(alias, version))
        prompt = plan.prompt if plan and plan.prompt else self._policies.prompt_of(alias, version)
        counted["messages"] = with_prompt(counted["messages"], prompt, family)
        return msgspec.json.encode(counted)

    async def _ask(self, body: bytes) -> tuple[int, bytes]:
        answer = await self._pool.ask("", lambda replica: self._upstream.post_json(replica.url, PATH, body))
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()


def _count(answer: bytes) -> int:
    try:
        told: Any = msgspec.json.decode(answer, type=dict[str, Any])["count"]
        return int(told)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise UpstreamDisconnected(f"the upstream's /tokenize did not answer with a count: {error}") from error
