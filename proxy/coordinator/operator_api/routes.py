"""The operator API under /api: calls, trajectories, groups, feedback, policies, training, alarms.

Lists are paged by key: `limit`, and `before` = the `next` of the previous page. Tokens are returned as lists on
request, at most `MAX_TOKENS` in one response, or those of one call. The store is read in threads.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.operator_api.agents import ReadAgents, add_agents
from ratchet.proxy.coordinator.operator_api.api_errors import ErrorResponse, add_error_handlers, status_of
from ratchet.proxy.coordinator.operator_api.audit_log import AuditLog, audited_routes
from ratchet.proxy.coordinator.operator_api.feedback import (
    BODY_LIMIT,
    WAITING_DETAIL,
    FeedbackBody,
    FeedbackIntake,
    parse_feedback,
)
from ratchet.proxy.coordinator.operator_api.json_responses import json_response, page_response, plain
from ratchet.proxy.coordinator.operator_api.list_filters import Limit, chosen_trajectories
from ratchet.proxy.coordinator.operator_api.releases import add_releases
from ratchet.proxy.coordinator.operator_api.reports import add_reports
from ratchet.proxy.errors import BadRequest, ProxyError, openai_error, to_openai_error
from ratchet.proxy.wire.asgi import CALLER, read_body
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.content.messages import path
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreError, StoreUnavailable
from ratchet.store.records import AnswerTraining, Call, Choice, JudgeRequest, unpack_halves, unpack_ids, unpack_logprobs
from ratchet.store.reports.version_reports import list_versions
from ratchet.store.states import CallState
from ratchet.store.store import Store

Settle = Callable[[float], Awaitable[bool]]

_SHIP_TIMEOUT = 5.0  # seconds
MAX_TOKENS = 250_000  # of one response
_FEEDBACK_BODY = {"content": {"application/json": {"schema": FeedbackBody.model_json_schema()}}, "required": True}
_LOST_AFTER = 3600.0  # seconds after which a call without an end no longer counts as in flight


class _ManualDecision(BaseModel):
    """A person's decision."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=2000)
    by: str = Field("operator", min_length=1, max_length=100)


class _ManualPromotion(_ManualDecision):
    """A promotion by hand; `rejected`: also of a rejected version."""

    rejected: bool = False


class _ManualRollback(_ManualDecision):
    """A rollback by hand; `now`: open trajectories of the rejected versions go on with the live one."""

    now: bool = False


def create_operator_api(
    store: Store,
    settle: Settle,
    linker: TrajectoryLinker,
    intake: FeedbackIntake,
    read_agents: ReadAgents,
    audit: AuditLog,
) -> FastAPI:
    """Return the operator application.

    Args:
        settle: waits some seconds until the store has everything recorded so far; returns whether it has.
        read_agents: returns the agents that this proxy serves.
    """
    # No docs pages: they run scripts of other servers, next to an API that reads everything. No redirects: they name
    # the host of the request, which a worker replaces.
    known = [Depends(_known_parameters)]
    api = FastAPI(
        title="Ratchet operator API", version="1", docs_url=None, redoc_url=None, redirect_slashes=False,
        dependencies=known, responses={"4XX": {"model": ErrorResponse}},
    )  # fmt: skip

    api.router.route_class = audited_routes(audit)

    @api.exception_handler(StoreError)
    async def on_store_error(_: Request, error: StoreError) -> Response:
        body = openai_error(str(error), type(error).__name__)
        return Response(body, status_of(error), media_type="application/json")

    @api.exception_handler(ProxyError)
    async def on_proxy_error(_: Request, error: ProxyError) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else None
        return Response(to_openai_error(error), error.status, headers, media_type="application/json")

    add_error_handlers(api)
    _add_calls(api, store)
    _add_endings(api, store, settle, linker)
    _add_feedback(api, store, intake)
    _add_policies(api, store)
    add_reports(api, store)
    add_releases(api, store)
    add_agents(api, store, read_agents)
    return api


def _add_calls(api: FastAPI, store: Store) -> None:
    """Calls, trajectories and groups."""

    @api.get("/calls")
    def calls(
        limit: Limit = 100,
        before: str | None = None,
        trajectory: str | None = None,
        state: CallState | None = None,
        alias: str | None = None,
        tokens: bool = False,
    ) -> Response:
        """Calls, newest first. With `tokens`, also ids and logprobs; then a page may have fewer calls."""
        if before:
            store.calls.check_known(before)
        found = store.calls.page(limit, before, trajectory, state, alias, tokens=False)
        if not tokens:
            return page_response([_call(call, tokens=False) for call in found], limit)
        whole = store.calls.read_with_tokens(within(found))
        rows = [_call(whole[call.id]) for call in found if call.id in whole]
        return page_response(rows, limit if len(rows) == len(found) else len(rows))

    @api.get("/calls/{call_id}")
    def call(call_id: str) -> Response:
        """One call with its tokens, and what a round did with them: advantage, mismatch, or why they carry no loss."""
        found = _call(store.calls.read(call_id))
        return json_response(found | {"training": [_trained(one) for one in store.answer_training.of_calls([call_id])]})

    @api.get("/trajectories")
    def trajectories(
        chosen: Annotated[TrajectoryFilter, Depends(chosen_trajectories)], limit: Limit = 100, before: str | None = None
    ) -> Response:
        """Trajectories without content, newest first; those of a search by id, last first.

        Each has its `score`, null without a judge's score.
        """
        found = store.trajectories.page(limit, before, chosen=chosen)
        scores = store.groups.scores([one.id for one in found])
        return page_response([plain(one) | {"score": scores.get(one.id)} for one in found], limit)

    @api.get("/trajectories/{trajectory_id}")
    def trajectory(trajectory_id: str, tokens: bool = True) -> Response:
        """One trajectory with its calls, messages and every verdict.

        Its first calls have tokens, as many as a response may contain; those of later calls are null: see /calls/ID.
        """
        found = store.trajectories.read(trajectory_id, tokens=False)
        whole = store.calls.read_with_tokens(within(found.calls)) if tokens else {}
        calls = [_call(whole.get(call.id, call), call.id in whole) for call in found.calls]
        return json_response(
            plain(found.trajectory)
            | {"calls": calls, "messages": found.messages, "tools": found.tools}
            | {"feedback": [plain(one) for one in found.feedback]}
            | {"verdicts": [plain(verdict) for verdict in store.groups.verdicts_of(trajectory_id)]}
            | {"trained": store.lineage.versions_of([trajectory_id]).get(trajectory_id, ())}
            | {"sampled_messages": sampled_messages(found.messages, found.calls)}
            | {"complete": not store.trajectories.incomplete([trajectory_id])}
        )

    @api.get("/groups")
    def groups(limit: Limit = 100, before: str | None = None, alias: str | None = None) -> Response:
        """Groups, newest first."""
        return page_response([plain(group) for group in store.groups.page(limit, before, alias=alias)], limit)

    @api.get("/groups/{group_id}")
    def group(group_id: str) -> Response:
        """One group with its members' verdicts."""
        found = store.groups.get(group_id)
        verdicts = store.groups.verdicts(found.members)
        return json_response(plain(found) | {"verdicts": {name: plain(verdict) for name, verdict in verdicts.items()}})

    @api.get("/groups/{group_id}/judge-requests")
    def judge_requests(group_id: str) -> Response:
        """The judges' model requests for a group and the responses, verbatim, oldest first."""
        return page_response(
            [_judge_request(one) for one in store.groups.judge_requests(store.groups.get(group_id).id)]
        )


def _add_endings(api: FastAPI, store: Store, settle: Settle, linker: TrajectoryLinker) -> None:
    """Finishing and deleting trajectories."""

    @api.post("/trajectories/{trajectory_id}/finish")
    async def finish(trajectory_id: str) -> Response:
        """Seal a trajectory. Waits until all its ended calls are in the store."""
        if not await settle(_SHIP_TIMEOUT):
            raise StoreUnavailable("not all calls are in the store yet; finish the trajectory again in a moment")
        sealed = await run_in_threadpool(store.trajectories.seal, trajectory_id, time.time())
        linker.forget_trajectory(trajectory_id)
        return json_response(plain(sealed))

    @api.delete("/trajectories/{trajectory_id}")
    async def delete(trajectory_id: str) -> Response:
        """Delete a trajectory and its successors permanently. Takes seconds: all proxies must notice it first."""
        chosen = TrajectoryFilter(id=trajectory_id)
        if not await settle(_SHIP_TIMEOUT):
            raise StoreUnavailable("not all calls are in the store yet; delete the trajectory again in a moment")
        if await run_in_threadpool(store.deletions.calls_in_flight, chosen, time.time() - _LOST_AFTER):
            raise InvalidTransition(
                f"trajectory {trajectory_id} has a call in flight: delete it when the call has ended"
            )
        linker.forget_trajectory(trajectory_id)
        done = await run_in_threadpool(store.deletions.delete, chosen, "operator")
        linker.forget_trajectory(trajectory_id)  # again: a restore may have begun in between
        if not done.trajectory_count:
            raise RecordNotFound(f"no trajectory {trajectory_id}")
        return json_response(plain(done))

    @api.get("/deletions")
    def deletions() -> Response:
        """Deletions, without content, and the policies that were trained on the deleted data; latest first."""
        return page_response([plain(found) for found in store.deletions.all()])


def _add_feedback(api: FastAPI, store: Store, intake: FeedbackIntake) -> None:
    """Giving and listing feedback."""

    @api.post("/feedback", status_code=201, openapi_extra={"requestBody": _FEEDBACK_BODY})
    async def give_feedback(request: Request) -> Response:
        """Give feedback on a trajectory or an answer: 201 once it is durable, 202 if its call is not stored yet."""
        body = parse_feedback(await read_body(request.receive, BODY_LIMIT))
        key = request.headers.get("idempotency-key")
        received = body.record(request.scope[CALLER], key[:200] if key else None, time.time())
        place = await intake.record(received)
        trajectory, call = place or (None, None)
        state = "placed" if place else "waiting"
        fields = {"id": received.id, "trajectory_id": trajectory, "call_id": call, "state": state}
        return json_response(fields, 201) if place else json_response(fields | {"detail": WAITING_DETAIL}, 202)

    @api.get("/feedback")
    def feedback(
        limit: Limit = 100, before: str | None = None, trajectory: str | None = None, alias: str | None = None
    ) -> Response:
        """Feedback, newest first, each with the policies that its trajectory trained."""
        found = store.feedback.page(limit, before, trajectory, alias)
        trained = store.lineage.versions_of(list({one.trajectory_id for one in found if one.trajectory_id}))
        return page_response(
            [plain(one) | {"trained": trained.get(one.trajectory_id or "", ())} for one in found], limit
        )


def _add_policies(api: FastAPI, store: Store) -> None:
    """Versions, decisions about them, and manual decisions."""

    @api.get("/policies")
    def policies(alias: str | None = None) -> Response:
        """Policy versions, oldest first, each with its newest decision, and whether its data was deleted."""
        return page_response(
            [
                plain(one) | {"decision": decision and plain(decision), "trained_on_deleted": deleted}
                for one, decision, deleted in list_versions(store, alias)
            ]
        )

    @api.get("/policies/{version}/decisions")
    def decisions(version: int, alias: str) -> Response:
        """The decisions about a version with their evidence, newest first."""
        return page_response([plain(decision) for decision in store.decisions.decisions_of(alias, version)])

    @api.get("/policies/{version}/prompt")
    def prompt(version: int, alias: str) -> Response:
        """The system prompt of a version; null without one."""
        name = store.policies.get(alias, version).prompt_id
        return json_response({"prompt": plain(store.prompts.get(name)) if name else None})

    @api.post("/policies/{version}/promote")
    def promote(version: int, alias: str, order: _ManualPromotion) -> Response:
        """Make a version live; a rejected one only with `rejected`."""
        promoted = store.policies.promote_manually(
            alias, version, by=order.by, reason=order.reason, rejected=order.rejected
        )
        return json_response(plain(promoted))

    @api.post("/policies/{version}/rollback")
    def rollback(version: int, alias: str, order: _ManualRollback) -> Response:
        """Roll back to a version: it becomes live, and all later ones are rejected; `now` moves their trajectories."""
        rejected = store.policies.roll_back_manually(alias, version, by=order.by, reason=order.reason, now=order.now)
        return page_response([plain(policy) for policy in rejected])

    @api.post("/policies/{version}/hold")
    def hold(version: int, alias: str, order: _ManualDecision) -> Response:
        """Hold a candidate or the version in its ramp: only a person promotes it."""
        return json_response(plain(store.policies.hold_manually(alias, version, by=order.by, reason=order.reason)))

    @api.post("/policies/{version}/pin")
    def pin(version: int, alias: str, order: _ManualDecision) -> Response:
        """Pin the live version: it serves all new trajectories, and nothing is released until it is unpinned."""
        return json_response(plain(store.policies.pin_manually(alias, version, by=order.by, reason=order.reason)))

    @api.post("/policies/{version}/unpin")
    def unpin(version: int, alias: str, order: _ManualDecision) -> Response:
        """Unpin the live version: the release goes on."""
        return json_response(plain(store.policies.unpin(alias, version, by=order.by, reason=order.reason)))


def within(calls: Sequence[Call]) -> list[str]:
    """Return the ids of the first calls whose tokens fit into one response, at least one."""
    ends = {call.id: call.prompt_tokens + call.completion_tokens for call in calls}
    chosen: list[str] = []
    total = 0
    for call in calls:
        known = ends.get(call.parent_call or "", 0) if call.context == "exact" else 0  # returned with the parent
        total += max(0, ends[call.id] - known)
        if chosen and total > MAX_TOKENS:
            break
        chosen.append(call.id)
    return chosen


def _known_parameters(request: Request) -> None:
    """Reject unknown query parameters: a misspelled filter would match everything. Raises BadRequest."""
    if not request.query_params:
        return
    route = request.scope["route"].path
    schema = request.scope["app"].openapi()["paths"].get(route, {}).get(request.method.lower(), {})
    names = sorted(one["name"] for one in schema.get("parameters", ()) if one["in"] == "query")
    if unknown := sorted(set(request.query_params) - set(names)):
        known = ", ".join(names) or "none"
        raise BadRequest(f"unknown query parameter {unknown[0]!r}; /api{route} has: {known}", param=unknown[0])


def sampled_messages(messages: Sequence[Mapping[str, Any]], calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return which answer each sampled message is: its place among the messages, the call and the choice."""
    answers = {choice.reply_node: (call.id, choice.index) for call in calls for choice in call.choices}
    found = ((place, answers.get(one.hash)) for place, one in enumerate(path(messages)))
    return [{"message": place, "call_id": answer[0], "choice": answer[1]} for place, answer in found if answer]


def _trained(one: AnswerTraining) -> dict[str, Any]:
    return plain(one) | {"mismatch": unpack_halves(one.mismatch), "advantages": unpack_halves(one.advantages)}


def _judge_request(one: JudgeRequest) -> dict[str, Any]:
    return plain(one) | {
        "request": one.request.decode("utf-8", "replace"),
        "response": one.response.decode("utf-8", "replace"),
    }


def _call(call: Call, tokens: bool = True) -> dict[str, Any]:
    """Return a call as JSON values; its ids and logprobs are null without `tokens`."""
    no_tokens = {"token_ids": None, "logprobs": None}
    choices = [plain(choice) | (_tokens(choice) if tokens else no_tokens) for choice in call.choices]
    return plain(call) | {"prompt_ids": unpack_ids(call.prompt_ids) if tokens else None, "choices": choices}


def _tokens(choice: Choice) -> dict[str, Any]:
    return {"token_ids": unpack_ids(choice.token_ids), "logprobs": unpack_logprobs(choice.logprobs)}
