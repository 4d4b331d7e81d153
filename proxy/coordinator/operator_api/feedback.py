"""Receives feedback on answers and trajectories, and acknowledges it once it is durable.

Promises: acknowledged feedback is in the journal (fdatasync), whether the store is up or not, and is shipped like a
call, once per id. An unknown target is a 404, unless the store is down or another proxy has not shipped its journal:
then the feedback waits until the call is stored. An agent's key gives feedback on its own trajectories only; those of
other keys do not exist for it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError, model_validator

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.errors import BadRequest, NotFound, NotReady
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.redaction.redactor import Redactor
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.calls.feedback import CALL, RESPONSE, TRAJECTORY, Place
from ratchet.store.errors import StoreUnavailable
from ratchet.store.ids import new_id
from ratchet.store.records import Feedback
from ratchet.store.statistics import MAX_SCORE, SCORE_RANGE
from ratchet.store.store import Store

BODY_LIMIT = 2**20
WAITING_DETAIL = (
    "recorded; its target is not in the store yet, because the store is down or a proxy has not shipped its journal: "
    "the feedback is placed when its call is stored, and is listed as waiting in `ratchet feedback list` until then"
)
_VALUES = f'give a number {SCORE_RANGE}, true, false, "up" or "down"'
# What `FeedbackBody._check` requires, as a JSON schema.
_ONE_TARGET: list[Any] = [
    {"required": [name], "properties": {name: {"type": "string"}}}
    for name in ("trajectory_id", "call_id", "response_id")
]
_SOME_CONTENT: list[Any] = [
    {"required": ["value"], "properties": {"value": {"not": {"type": "null"}}}},
    {"required": ["comment"], "properties": {"comment": {"minLength": 1}}},
    {"required": ["demonstration"], "properties": {"demonstration": {"type": "string"}}},
]
_TIMEOUT = 3.0  # seconds for a call to reach the store, from here or from another proxy, before its id is unknown


class FeedbackBody(BaseModel):
    """The body of `POST /api/feedback`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True,
        json_schema_extra={"oneOf": _ONE_TARGET, "anyOf": _SOME_CONTENT},
    )  # fmt: skip

    trajectory_id: str | None = Field(None, min_length=1, max_length=128, description="a whole trajectory")
    call_id: str | None = Field(
        None, min_length=1, max_length=64, description="one call, as the header x-ratchet-call names it"
    )
    response_id: str | None = Field(
        None, min_length=1, max_length=128, description="one answer, by the `id` that the client got with it"
    )
    value: StrictBool | StrictInt | StrictFloat | Literal["up", "down"] | None = Field(
        None, description="how good it was: a number, true or false, up or down"
    )
    comment: str = Field("", max_length=10_000, description="a comment")
    demonstration: str | None = Field(
        None, max_length=200_000, min_length=1, description="the answer that would be right"
    )
    end_user: str | None = Field(
        None, max_length=200, description="source gives it; more feedback of the same user is a revision"
    )
    idempotency_key: str | None = Field(None, max_length=200, description="sending the same key again changes nothing")

    @model_validator(mode="after")
    def _check(self) -> FeedbackBody:
        if sum(name is not None for name in (self.trajectory_id, self.call_id, self.response_id)) != 1:
            raise ValueError("name one of trajectory_id, call_id and response_id")
        if self.value is None and not self.comment and self.demonstration is None:
            raise ValueError("give a value, a comment or a demonstration")
        if not isinstance(self.value, str | None) and not -MAX_SCORE <= self.value <= MAX_SCORE:
            raise ValueError(f"value must be {SCORE_RANGE}")
        return self

    def record(self, caller: Caller, idempotency_key: str | None, now: float) -> Feedback:
        """Return the record."""
        kinds = ((TRAJECTORY, self.trajectory_id), (CALL, self.call_id), (RESPONSE, self.response_id))
        kind, target = next((kind, name) for kind, name in kinds if name is not None)
        key = self.idempotency_key or idempotency_key
        source = "operator" if caller.operator else f"key:{caller.key_id}" if caller.key_id else "anyone"
        return Feedback(
            id=_derived_id(source, key) if key else new_id("fb"),
            kind=kind,
            target=_plain(target),
            source=_plain(f"user:{self.end_user}") if self.end_user else source,
            given_at=now,
            key_id=caller.key_id,
            trusted=caller.operator,
            value={"up": 1.0, "down": 0.0}[self.value] if isinstance(self.value, str) else _number(self.value),
            comment=_plain(self.comment),
            demonstration=_plain(self.demonstration) if self.demonstration else None,
        )


def parse_feedback(body: bytes) -> FeedbackBody:
    """Parse a body. Raises BadRequest, which names the field."""
    try:
        return FeedbackBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        reason = _VALUES if field == "value" else first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{field}: {reason}" if field else reason, param=field) from error


class FeedbackIntake:
    """Records feedback. Belongs to the event loop's thread; the store is read in another."""

    def __init__(
        self, store: Store, journal: Journal, lookups: RecordLookups, redactor: Redactor | None, metrics: ProxyMetrics
    ) -> None:
        self._store = store
        self._journal = journal
        self._lookups = lookups
        self._redactor = redactor
        self._metrics = metrics

    async def record(self, feedback: Feedback) -> Place | None:
        """Make feedback durable; return where it belongs, None if its call is not stored yet.

        Raises NotFound, NotReady, RateLimited.
        """
        place = await self._find(feedback)
        if not await self._journal.commit(self._redactor.redact_feedback(feedback) if self._redactor else feedback):
            raise NotReady(
                "the journal cannot be written, so this feedback is not recorded: send it again in a moment, with the "
                "same idempotency_key"
            )
        self._metrics.feedback.labels("waiting" if place is None else "placed").inc()
        return place

    async def _find(self, feedback: Feedback) -> Place | None:
        """Return where feedback belongs; None if it has to wait. Raises NotFound."""

        def look() -> Place | None:
            return self._store.feedback.target_of(feedback)

        try:
            place, certain = await self._lookups.wait_for(look, feedback.key_id, _TIMEOUT)
        except StoreUnavailable:
            return None
        if place is None and certain:
            raise NotFound(
                f"no {feedback.kind} {feedback.target!r} is known: send the `id` of an answer as response_id, "
                "the header x-ratchet-call as call_id, or x-ratchet-trajectory as trajectory_id",
                param=f"{feedback.kind}_id",
                code="unknown_target",
            )
        return place


def _plain(text: str) -> str:
    """Replace the characters that PostgreSQL cannot store."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _derived_id(source: str, key: str) -> str:
    return "fb_" + blake2b(f"{source}\0{key}".encode(), digest_size=16).hexdigest()
