"""The operator API under /api: what was recorded, judged and trained; feedback; trajectories finished and deleted.

Lists are pages by key: `limit`, and `before` = the `next` of the page before. Packed tokens come out as lists where
they are asked for, no more of them in one response than `MOST_TOKENS`, or one call's.
Reads the store in threads; never on the path of a call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.operator_api.api_errors import ErrorResponse, add_error_handlers
from ratchet.proxy.coordinator.operator_api.feedback import (
    BODY_LIMIT,
    WAITING_DETAIL,
    FeedbackBody,
    FeedbackIntake,
    parse_feedback,
)
from ratchet.proxy.coordinator.operator_api.overview import Overview
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.errors import BadRequest, ProxyError, openai_error, to_openai_error
from ratchet.proxy.wire.asgi import CALLER, read_body
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreError, StoreUnavailable
from ratchet.store.records import Call, Choice, JudgeRequest, unpack_ids, unpack_logprobs
from ratchet.store.records.base import Record
from ratchet.store.store import Store

_Limit = Annotated[int, Query(ge=1, le=1000)]
_SETTLE_SECONDS = 5.0
MOST_TOKENS = 250_000  # told in one response
_FEEDBACK_BODY = {"content": {"application/json": {"schema": FeedbackBody.model_json_schema()}}, "required": True}
_LOST_AFTER = 3600.0  # seconds after which a call without an end is not waited for


class _ManualDecision(BaseModel):
    """What a person decides, and why."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=2000)
    by: str = Field("operator", min_length=1, max_length=100)


class _ManualPromotion(_ManualDecision):
    """What is to be promoted; `rejected`: also a version that was rejected."""

    rejected: bool = False


_STATUS: dict[type[StoreError], int] = {RecordNotFound: 404, InvalidTransition: 409, StoreUnavailable: 503}


def create_operator_api(store: Store, shipper: Shipper, linker: TrajectoryLinker, desk: FeedbackIntake) -> FastAPI:
    """Return the operator application."""
    # No pages: they would run scripts of other servers beside an API that reads everything.
    known = [Depends(_known_parameters)]
    api = FastAPI(
        title="Ratchet operator API", version="1", docs_url=None, redoc_url=None, dependencies=known,
        responses={"4XX": {"model": ErrorResponse}},
    )  # fmt: skip

    @api.exception_handler(StoreError)
    async def refuse(_: Request, error: StoreError) -> Response:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        return Response(openai_error(str(error), type(error).__name__), status, media_type="application/json")

    @api.exception_handler(ProxyError)
    async def tell(_: Request, error: ProxyError) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else None
        return Response(to_openai_error(error), error.status, headers, media_type="application/json")

    add_error_handlers(api)
    _add_calls(api, store)
    _add_endings(api, store, shipper, linker)
    _add_feedback(api, store, desk)
    _add_policies(api, store)
    _add_reports(api, store)
    return api


def _add_calls(api: FastAPI, store: Store) -> None:
    """What was recorded: calls, trajectories, and the groups that they are judged in."""

    @api.get("/calls")
    def calls(
        limit: _Limit = 100,
        before: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
        tokens: bool = False,
    ) -> Response:
        """Calls, newest first; with `tokens` their ids and logprobs, and then fewer on a page where they are many."""
        found = store.calls.page(limit, before, trajectory, state, tokens=False)
        if not tokens:
            return _page([_call(call, tokens=False) for call in found], limit)
        whole = store.calls.read_with_tokens(within(found))
        rows = [_call(whole[call.id]) for call in found if call.id in whole]
        return _page(rows, limit if len(rows) == len(found) else len(rows))

    @api.get("/calls/{call_id}")
    def call(call_id: str) -> Response:
        """One call with its tokens."""
        return _json(_call(store.calls.read(call_id)))

    @api.get("/trajectories")
    def trajectories(
        chosen: Annotated[TrajectoryFilter, Depends(_chosen)], limit: _Limit = 100, before: str | None = None
    ) -> Response:
        """Trajectories without content, newest first; those of a search in the order of their ids, the last first.

        Each with the `score` that counts, null where no judge gave one.
        """
        found = store.trajectories.page(limit, before, chosen=chosen)
        scores = store.groups.scores([one.id for one in found])
        return _page([_plain(one) | {"score": scores.get(one.id)} for one in found], limit)

    @api.get("/trajectories/{trajectory_id}")
    def trajectory(trajectory_id: str, tokens: bool = True) -> Response:
        """One trajectory with its calls, messages and every verdict.

        Tokens are told of its first calls, as many as a response may hold; the others' are null, and at /calls/ID.
        """
        found = store.trajectories.read(trajectory_id, tokens=False)
        whole = store.calls.read_with_tokens(within(found.calls)) if tokens else {}
        calls = [_call(whole.get(call.id, call), call.id in whole) for call in found.calls]
        return _json(
            _plain(found.trajectory)
            | {"calls": calls, "messages": found.messages, "tools": found.tools}
            | {"feedback": [_plain(said) for said in found.feedback]}
            | {"verdicts": [_plain(verdict) for verdict in store.groups.verdicts_of(trajectory_id)]}
            | {"trained": store.lineage.versions_of([trajectory_id]).get(trajectory_id, ())}
            | {"complete": not store.trajectories.incomplete([trajectory_id])}
        )

    @api.get("/groups")
    def groups(limit: _Limit = 100, before: str | None = None) -> Response:
        """Groups, newest first."""
        return _page([_plain(group) for group in store.groups.page(limit, before)], limit)

    @api.get("/groups/{group_id}")
    def group(group_id: str) -> Response:
        """One group with its members' verdicts."""
        found = store.groups.get(group_id)
        verdicts = store.groups.verdicts(found.members)
        return _json(_plain(found) | {"verdicts": {name: _plain(verdict) for name, verdict in verdicts.items()}})

    @api.get("/groups/{group_id}/judge-requests")
    def judge_requests(group_id: str) -> Response:
        """What judges asked about a group and what came back, word for word, oldest first."""
        return _page([_judge_request(one) for one in store.groups.judge_requests(store.groups.get(group_id).id)])


def _add_endings(api: FastAPI, store: Store, shipper: Shipper, linker: TrajectoryLinker) -> None:
    """How trajectories end: finished by hand, or deleted."""

    @api.post("/trajectories/{trajectory_id}/finish")
    async def finish(trajectory_id: str) -> Response:
        """Seal a trajectory: it is complete. Waits until every call of it that has ended is in the store."""
        if not await shipper.settle(_SETTLE_SECONDS):
            raise StoreUnavailable("the store has not taken all calls yet; finish the trajectory again in a moment")
        sealed = await run_in_threadpool(store.trajectories.seal, trajectory_id, time.time())
        linker.forget_trajectory(trajectory_id)
        return _json(_plain(sealed))

    @api.delete("/trajectories/{trajectory_id}")
    async def delete(trajectory_id: str) -> Response:
        """Delete a trajectory and its successors for good. Takes seconds: the proxies must know of it first."""
        chosen = TrajectoryFilter(id=trajectory_id)
        if not await shipper.settle(_SETTLE_SECONDS):
            raise StoreUnavailable("the store has not taken all calls yet; delete the trajectory again in a moment")
        if await run_in_threadpool(store.deletions.calls_in_flight, chosen, time.time() - _LOST_AFTER):
            raise InvalidTransition(f"a call of trajectory {trajectory_id} is under way: delete it when it has ended")
        linker.forget_trajectory(trajectory_id)
        done = await run_in_threadpool(store.deletions.delete, chosen, "operator")
        if not done.trajectory_count:
            raise RecordNotFound(f"no trajectory {trajectory_id}")
        return _json(_plain(done))

    @api.get("/deletions")
    def deletions() -> Response:
        """What was deleted, without its content, and the policies that had learnt it; the latest first."""
        return _page([_plain(found) for found in store.deletions.all()])


def _add_feedback(api: FastAPI, store: Store, desk: FeedbackIntake) -> None:
    """What people say, and what was said."""

    @api.post("/feedback", status_code=201, openapi_extra={"requestBody": _FEEDBACK_BODY})
    async def say(request: Request) -> Response:
        """Say how good a trajectory or an answer was: 201 once it is durable, 202 where its call is waited for."""
        body = parse_feedback(await read_body(request.receive, BODY_LIMIT))
        key = request.headers.get("idempotency-key")
        said = body.record(request.scope[CALLER], key[:200] if key else None, time.time())
        place = await desk.take(said)
        trajectory, call = place or (None, None)
        told = {"id": said.id, "trajectory_id": trajectory, "call_id": call, "state": "placed" if place else "waiting"}
        return _json(told, 201) if place else _json(told | {"detail": WAITING_DETAIL}, 202)

    @api.get("/feedback")
    def feedback(limit: _Limit = 100, before: str | None = None, trajectory: str | None = None) -> Response:
        """What was said, newest first, each with the policies that its trajectory had part in."""
        found = store.feedback.page(limit, before, trajectory)
        trained = store.lineage.versions_of(list({said.trajectory_id for said in found if said.trajectory_id}))
        return _page([_plain(said) | {"trained": trained.get(said.trajectory_id or "", ())} for said in found], limit)


def _add_policies(api: FastAPI, store: Store) -> None:
    """Versions, what was decided about them, and decisions by hand."""

    @api.get("/policies")
    def policies(alias: str | None = None) -> Response:
        """Every policy version, oldest first, each with the newest decision, and whether it learnt what was deleted."""
        decided = {key: _plain(decision) for key, decision in store.decisions.latest(alias).items()}
        learnt = {(one.alias, one.version) for one in store.deletions.versions_with_deleted_data()}
        names = [((policy.alias, policy.version), policy) for policy in store.policies.all(alias)]
        return _page(
            [_plain(one) | {"decision": decided.get(name), "trained_on_deleted": name in learnt} for name, one in names]
        )

    @api.get("/policies/{version}/decisions")
    def decisions(version: int, alias: str) -> Response:
        """Every decision about a version with its evidence, newest first."""
        return _page([_plain(decision) for decision in store.decisions.decisions_of(alias, version)])

    @api.get("/policies/{version}/prompt")
    def prompt(version: int, alias: str) -> Response:
        """The prompt that the proxy swaps in for a version; null where it has none."""
        name = store.policies.get(alias, version).prompt_id
        return _json({"prompt": _plain(store.prompts.get(name)) if name else None})

    @api.post("/policies/{version}/promote")
    def promote(version: int, alias: str, order: _ManualPromotion) -> Response:
        """Make a version live by hand; one that was rejected only with `rejected`."""
        made = store.policies.promote_manually(
            alias, version, by=order.by, reason=order.reason, rejected=order.rejected
        )
        return _json(_plain(made))

    @api.post("/policies/{version}/rollback")
    def rollback(version: int, alias: str, order: _ManualDecision) -> Response:
        """Go back to a version by hand: it is live, and every later one is rejected."""
        rejected = store.policies.roll_back_manually(alias, version, by=order.by, reason=order.reason)
        return _page([_plain(policy) for policy in rejected])


def _add_reports(api: FastAPI, store: Store) -> None:
    """How training, tools and alarms stand."""
    looking = Overview(store)

    @api.get("/overview")
    def overview() -> Response:
        """Is it learning? By alias: scores by version, before and after, canary, works under way; rounds, alarms."""
        return _json(looking.read())

    @api.get("/training")
    def training(alias: str | None = None, limit: _Limit = 100, before: str | None = None) -> Response:
        """Training rounds, newest first, and how many trajectories are in each state."""
        found = store.rounds.page(alias, limit, before)
        return _json(
            {
                "rounds": [_plain(one) for one in found],
                "next": found[-1].id if len(found) == limit else None,
                "trajectories": store.trajectories.counts(),
                "dropped": store.trajectories.drop_counts(),
                "dropped_groups": store.groups.drop_counts(alias),
            }
        )

    @api.get("/tools")
    def tools(alias: str | None = None, version: int | None = None) -> Response:
        """How often each tool was called under each policy version, by outcome and result; most called first."""
        return _page([_plain(tally) for tally in store.tools.counts_by_version(alias, version)])

    @api.get("/alarms")
    def alarms(standing: bool = False) -> Response:
        """Alarms, the latest first."""
        return _page([_plain(alarm) for alarm in (store.alarms.active() if standing else store.alarms.all())])


def within(calls: Sequence[Call]) -> list[str]:
    """Return the first calls whose tokens one response may hold together, the first one whatever it has: ids."""
    ends = {call.id: call.prompt_tokens + call.completion_tokens for call in calls}
    chosen: list[str] = []
    total = 0
    for call in calls:
        known = ends.get(call.parent_call or "", 0) if call.context == "exact" else 0  # told with the call before
        total += max(0, ends[call.id] - known)
        if chosen and total > MOST_TOKENS:
            break
        chosen.append(call.id)
    return chosen


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _page(rows: list[dict[str, Any]], limit: int | None = None) -> Response:
    """Answer with a list; `next` is what `before` has to be for the page that follows, null where none does."""
    return _json({"data": rows, "next": rows[-1]["id"] if limit and len(rows) == limit else None})


def _known_parameters(request: Request) -> None:
    """Refuse a query parameter that the route does not have: a misspelt filter would choose everything."""
    if not request.query_params:
        return
    route = request.scope["route"].path
    told = request.scope["app"].openapi()["paths"].get(route, {}).get(request.method.lower(), {})
    names = sorted(one["name"] for one in told.get("parameters", ()) if one["in"] == "query")
    if unknown := sorted(set(request.query_params) - set(names)):
        there_are = ", ".join(names) or "none"
        raise BadRequest(
            f"unknown query parameter {unknown[0]!r}; /api{route} has these: {there_are}", param=unknown[0]
        )


def _chosen(
    state: str | None = None,
    alias: str | None = None,
    version: int | None = None,
    task: str | None = None,
    key: str | None = None,
    tag: str | None = None,
    since: float | None = None,
    until: float | None = None,
    search: str | None = None,
) -> TrajectoryFilter:
    """Read the filter: equal to what is given; opened from `since` on and before `until`; an id that begins so."""
    return TrajectoryFilter(state, alias, version, task, key, tag, since, until, search)


def _plain(record: Record) -> dict[str, Any]:
    return msgspec.structs.asdict(record)


def _judge_request(one: JudgeRequest) -> dict[str, Any]:
    return _plain(one) | {
        "request": one.request.decode("utf-8", "replace"),
        "response": one.response.decode("utf-8", "replace"),
    }


def _call(call: Call, tokens: bool = True) -> dict[str, Any]:
    """Return a call as JSON can hold it; its ids and logprobs where `tokens` says so."""
    shown = [_tokens(choice) if tokens else {"token_ids": None, "logprobs": None} for choice in call.choices]
    choices = [_plain(choice) | told for choice, told in zip(call.choices, shown, strict=True)]
    return _plain(call) | {"prompt_ids": unpack_ids(call.prompt_ids) if tokens else None, "choices": choices}


def _tokens(choice: Choice) -> dict[str, Any]:
    return {"token_ids": unpack_ids(choice.token_ids), "logprobs": unpack_logprobs(choice.logprobs)}
