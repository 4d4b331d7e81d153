"""POST /v1/responses: OpenAI's item-based dialect, around an inner chat call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ratchet.proxy.dialects import chat, inner_request, responses_request
from ratchet.proxy.dialects.content_blocks import BlockEncoder
from ratchet.proxy.dialects.conversation import Conversations, ConversationTurn
from ratchet.proxy.dialects.dialect import ParsedRequest, parsed_request, read_body_with
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.dialects.responses_renderer import ResponseRenderer
from ratchet.proxy.errors import BodyTooLarge
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.error_shapes import OPENAI
from ratchet.proxy.wire.request_body import FollowedCall
from ratchet.store.records import CallStarted


class Responses:
    """The Responses dialect."""

    name = "responses"
    path = chat.PATH
    shape = OPENAI

    def __init__(self, conversations: Conversations, bounds: BodyBounds) -> None:
        self._conversations = conversations
        self._bounds = bounds

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request. Raises BadRequest; NotFound for an unknown previous response."""
        fields = await read_body_with(inner_request.decode, body, self._bounds)
        if isinstance(fields.get("input"), list) and b"item_reference" in body:
            fields["input"] = await self._with_items(fields["input"], key_id)
        name = fields.get("previous_response_id")
        previous = await self._conversations.find_turn(str(name), key_id) if name else None
        return await read_body_with(lambda _: self._read(fields, previous), body)

    async def _with_items(self, items: list[Any], key_id: str | None) -> list[Any]:
        """Replace item references by their items. Raises NotFound, NotReady, BodyTooLarge."""
        names = [str(item.get("id")) if responses_request.is_reference(item) else None for item in items]
        known = await self._conversations.find_items([name for name in names if name], key_id)
        sizes = {name: len(msgspec.json.encode(item)) for name, item in known.items()}
        if sum(sizes[name] for name in names if name) > self._bounds.body:
            raise BodyTooLarge(
                f"the items that `input` refers to are larger than {self._bounds.body} bytes (the proxy's setting "
                "max_body_bytes)"
            )
        return [known[name] if name else item for name, item in zip(names, items, strict=True)]

    def _read(self, body: Json, previous: ConversationTurn | None) -> ParsedRequest:
        added = responses_request.added_messages(body)
        before = previous.conversation(has_instructions=bool(body.get("instructions"))) if previous else []
        self._bounds.check_messages(len(before) + len(added))
        request = responses_request.read(body, added, before)
        names = responses_request.custom_names(body), responses_request.namespaces(body)
        if previous:
            request.follows = FollowedCall(previous.trajectory_id, previous.call_id, previous.alias, previous.purpose)

        def make_encoder(start: CallStarted) -> BlockEncoder:
            capture = chat.make_capture(request, start)
            renderer = ResponseRenderer(start, body, *names)
            if lax_values.lax_bool(body.get("store")) is False:
                return BlockEncoder(capture, renderer)
            return RememberingEncoder(
                capture, renderer, lambda answer: self._conversations.add_response(start, [*added, answer], previous)
            )

        return parsed_request(request, make_encoder)


class RememberingEncoder(BlockEncoder):
    """An encoder that stores a successful answer for `previous_response_id`."""

    __slots__ = ("_add_response",)

    def __init__(self, capture: Capture, renderer: ResponseRenderer, add_response: Callable[[Json], None]) -> None:
        super().__init__(capture, renderer)
        self._add_response = add_response

    def whole(self, body: bytes) -> bytes:
        """Encode a response that did not stream. Raises UpstreamDisconnected."""
        encoded = super().whole(body)
        self._add_response(self.capture.choices[0].message())
        return encoded

    def end(self) -> bytes:
        """Return the events that end the stream: as failed, if the engine did not complete its answer."""
        if self.capture.cut() is None and self.capture.choices:
            self._add_response(self.capture.choices[0].message())
        return super().end()
