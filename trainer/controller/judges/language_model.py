"""A language model that judges ask: any OpenAI-compatible chat endpoint, with or without /v1 in its URL.

Promises: whatever is asked and answered is kept as an exchange, failed tries too, without the key; an answer that does
not say what it must is asked for again with the reason, at most `attempts` times; a busy or broken endpoint is asked
again after a pause. Speaks the plainest form that the endpoint understands: a JSON schema, else JSON, else words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from ratchet.store.ids import new_id
from ratchet.store.records import JudgeRequest
from ratchet.trainer.errors import JudgeUnavailable
from ratchet.trainer.settings.judge_specs import ModelSpec

_T = TypeVar("_T")
_LONGEST_PAUSE = 30.0  # seconds
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)

Message = dict[str, Any]


@dataclass(slots=True)
class JudgeModelSession:
    """The tries to get one usable answer, as they are made."""

    judge: str
    group_id: str | None
    judge_requests: list[JudgeRequest] = field(default_factory=list)

    @property
    def cost(self) -> float | None:
        """The price of all tries; None where it is unknown."""
        costs = [one.cost for one in self.judge_requests]
        return None if None in costs else sum(cost or 0.0 for cost in costs)

    @property
    def last(self) -> str | None:
        """The id of the newest exchange."""
        return self.judge_requests[-1].id if self.judge_requests else None


class LanguageModel:
    """One model at one endpoint. May be asked by several threads."""

    def __init__(
        self,
        spec: ModelSpec,
        key: str | None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._sleep = sleep
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=httpx.Timeout(spec.timeout_seconds, connect=10.0), headers=headers)
        self._urls = urls_of(spec.base_url)
        self._forms = ["json_schema", "json_object", "words"]  # what the endpoint has not refused yet

    def ask(
        self,
        question: Sequence[Message],
        schema: Mapping[str, Any],
        read: Callable[[Any], _T],
        interview: JudgeModelSession,
    ) -> _T:
        """Return what `read` makes of the answer's JSON; it raises ValueError with what is wrong.

        Raises JudgeUnavailable when no try gave a usable answer.
        """
        messages = list(question)
        problem = "no attempt was made"
        for attempt in range(self.spec.max_attempts):
            try:
                text = self._once(messages, schema, interview)
            except _Unavailable as busy:
                problem = str(busy)
                self._pause(busy, attempt)
                continue
            try:
                return read(extract_json(text))
            except ValueError as wrong:
                problem = f"its answer is unusable: {wrong}"
                interview.judge_requests[-1] = msgspec.structs.replace(interview.judge_requests[-1], error=problem)
                messages = [
                    *question,
                    {"role": "assistant", "content": text[:20_000]},
                    {"role": "user", "content": f"That cannot be used: {wrong}. Answer again, with the JSON alone."},
                ]
        raise self._unanswered(problem)

    def say(self, messages: Sequence[Message], interview: JudgeModelSession, temperature: float | None = None) -> str:
        """Return an answer's text, in whatever form. Raises JudgeUnavailable when no try gave one."""
        problem = "no attempt was made"
        for attempt in range(self.spec.max_attempts):
            try:
                text = self._once(messages, None, interview, temperature)
            except _Unavailable as busy:
                problem = str(busy)
                self._pause(busy, attempt)
                continue
            if text.strip():
                return text
            problem = "its answer is empty"
        raise self._unanswered(problem)

    def _unanswered(self, problem: str) -> JudgeUnavailable:
        return JudgeUnavailable(f"{self.spec.model} at {self.spec.base_url}, {self.spec.max_attempts} tries: {problem}")

    def _pause(self, busy: _Unavailable, attempt: int) -> None:
        if attempt + 1 < self.spec.max_attempts:
            self._sleep(busy.pause if busy.pause is not None else min(_LONGEST_PAUSE, 0.5 * 2.0**attempt))

    def _once(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        interview: JudgeModelSession,
        temperature: float | None = None,
    ) -> str:
        """Ask once, without a `schema` for an answer in any form; return the answer's text. Raises _Unavailable."""
        body: dict[str, Any] = {"model": self.spec.model, "messages": list(messages)}
        temperature = self.spec.temperature if self.spec.temperature is not None else temperature
        if temperature is not None:
            body["temperature"] = temperature
        while True:
            form = self._forms[0]
            asked = body | (_answer_form(form, schema) if schema is not None else {})
            began = time.perf_counter()
            status, answer, pause = self._post(asked)
            exchange = self._exchange(interview, asked, status, answer, time.perf_counter() - began)
            interview.judge_requests.append(exchange)
            if status == 400 and len(self._forms) > 1 and "response_format" in asked:
                self._forms.remove(form)  # the endpoint does not know this form of answer
                continue
            if status != 200:
                raise _Unavailable(exchange.error or f"status {status}", pause, hopeless=status not in _BUSY)
            return _content(answer)

    def _post(self, body: Mapping[str, Any]) -> tuple[int, str, float | None]:
        """Return (status, text, seconds to wait); status 0 where nothing answered."""
        try:
            answer = self._http.post(self._urls[0], json=body)
            if answer.status_code in (404, 405) and len(self._urls) > 1:
                other = self._http.post(self._urls[1], json=body)
                if other.status_code not in (404, 405):
                    self._urls = self._urls[1:]
                    answer = other
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return 0, f"{type(error).__name__}: {error}", None
        return answer.status_code, answer.text, _retry_after(answer.headers)

    def _exchange(
        self, interview: JudgeModelSession, body: Mapping[str, Any], status: int, answer: str, seconds: float
    ) -> JudgeRequest:
        usage = _usage(answer) if status == 200 else {}
        taken, given = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        spec = self.spec
        priced = spec.input_cost_per_million is not None and spec.output_cost_per_million is not None
        return JudgeRequest(
            id=new_id("exch"),
            group_id=interview.group_id,
            judge=interview.judge,
            url=self._urls[0],
            request=msgspec.json.encode(body),
            response=answer.encode()[:1_000_000],
            status=status,
            error=None if status == 200 else f"status {status}: {answer[:500]}" if status else answer[:500],
            prompt_tokens=taken,
            completion_tokens=given,
            cost=(taken * (spec.input_cost_per_million or 0.0) + given * (spec.output_cost_per_million or 0.0)) / 1e6
            if priced
            else None,
            latency=seconds,
            requested_at=self._clock(),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class _Unavailable(Exception):
    def __init__(self, reason: str, pause: float | None, *, hopeless: bool) -> None:
        super().__init__(reason)
        self.pause = 0.0 if hopeless else pause


def urls_of(base_url: str) -> list[str]:
    """Return where chat completions may be, the likelier first."""
    straight = f"{base_url}/chat/completions"
    versioned = f"{base_url}/v1/chat/completions"
    if re.search(r"/v\d+\w*(/|$)", base_url):
        return [straight]
    return [versioned, straight]


def extract_json(text: str) -> Any:
    """Return the JSON object in an answer, in code fences or after thoughts as well. Raises ValueError."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError("it holds no JSON object")
    try:
        return msgspec.json.decode(text[start : end + 1])
    except msgspec.DecodeError as error:
        raise ValueError(f"its JSON cannot be read: {error}") from error


def _answer_form(form: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if form == "json_schema":
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": dict(schema), "strict": True},
            }
        }
    return {"response_format": {"type": "json_object"}} if form == "json_object" else {}


def _content(answer: str) -> str:
    """Return the text of a chat completion, "" where there is none: the reader says what is wrong with it."""
    try:
        return str(msgspec.json.decode(answer)["choices"][0]["message"]["content"] or "")
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""


def _usage(answer: str) -> dict[str, Any]:
    try:
        usage = msgspec.json.decode(answer).get("usage")
    except (msgspec.DecodeError, AttributeError):
        return {}
    return usage if isinstance(usage, dict) else {}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return min(_LONGEST_PAUSE, max(0.0, float(headers["retry-after"])))
    except (KeyError, ValueError):
        return None
