"""POST /v1/chat/completions: vLLM's own dialect. Bodies pass unchanged, except for fields that only OpenAI knows."""

from __future__ import annotations

from ratchet.proxy.dialects.dialect import ParsedRequest, parsed_request, policy_name, read_body_with
from ratchet.proxy.dialects.vllm_fields import with_vllm_fields
from ratchet.proxy.errors import ProxyError, UpstreamError, to_openai_error
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.error_shapes import OPENAI
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.records import OTHER, CallStarted

PATH = "/v1/chat/completions"


class Chat:
    """The Chat Completions dialect."""

    name = "chat"
    path = PATH
    shape = OPENAI

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request. Raises BadRequest, BodyTooLarge."""
        return await read_body_with(lambda body: _read(self._bounds, body, key_id or ""), body)


def _read(bounds: BodyBounds, body: bytes, key_id: str) -> ParsedRequest:
    request = with_vllm_fields(request_body.read_within(bounds, body, key_id))
    return parsed_request(request, lambda start: PassthroughEncoder(make_capture(request, start)))


def make_capture(request: ChatRequest, start: CallStarted) -> Capture:
    """Return the capture of a chat call."""
    return Capture(
        policy_name(start),
        asks_ids=request.asks_ids,
        asks_logprobs=request.asks_logprobs,
        asks_usage=request.asks_usage,
        lenient=start.purpose == OTHER,
    )


class PassthroughEncoder:
    """Passes vLLM's response on; the capture has cleared what the client did not request.

    An answer that vLLM itself calls incomplete (`finish_reason: abort`) is passed on as it is.
    """

    __slots__ = ("capture",)

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def whole(self, body: bytes) -> bytes:
        """Encode a response that did not stream. Raises UpstreamDisconnected."""
        answer = self.capture.whole(body)
        if (cut := self._unsaid_cut()) is not None:
            raise cut
        return answer

    def chunk(self, data: bytes) -> bytes | None:
        """Return the client's event for one streamed chunk."""
        chunk = self.capture.chunk(data)
        return None if chunk is None else b"data: " + chunk + b"\n\n"

    def end(self) -> bytes:
        """Return the last event: an error, if the engine did not complete its answer and did not say so."""
        cut = self._unsaid_cut()
        return b"data: [DONE]\n\n" if cut is None else self.failed(cut)

    def _unsaid_cut(self) -> UpstreamError | None:
        return None if self.capture.says_cut() else self.capture.cut()

    def failed(self, error: ProxyError) -> bytes:
        """Return the error as an event."""
        return b"data: " + to_openai_error(error) + b"\n\n"
