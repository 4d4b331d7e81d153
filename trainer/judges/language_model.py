"""A language model that judges ask, through the `openai` client: any OpenAI-compatible URL, with or without /v1.

Guarantees: every request and response is recorded as a JudgeRequest, failed ones included, without the API key. An
answer that cannot be used is requested again with the reason; a busy endpoint is asked again after a pause; at most
`max_attempts` in total. The client's own retries are off, because they would not be recorded. The request asks for a
JSON schema; if the endpoint refuses that, for JSON; else for text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from ratchet.store.errors import install_hint
from ratchet.store.ids import new_id
from ratchet.store.records import JudgeRequest
from ratchet.trainer.errors import JudgeAway, JudgeError, JudgeUnavailable, QuestionTooLong
from ratchet.trainer.judges.judgement import DraftVerdict
from ratchet.trainer.settings.judge_specs import ModelSpec

# Which errors of a judge's endpoint are outages: trajectories wait for them, and no attempt of the judge is counted.
#
# An outage is no connection, a refused credential (401, 403), a limit (429) and a gateway or server that takes no
# request (502, 503, 504). Everything else may be caused by what was asked, and would come back: it is an attempt. That
# includes 500, 400 and a time-out while the endpoint answers.

_UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError")  # by name: `openai` brings a copy of httpx
_REFUSED = (401, 403)
_LIMITED = 429
_AWAY = (502, 503, 504)


def ask_unless_away(away: str | None, ask: Callable[[], DraftVerdict]) -> tuple[DraftVerdict, str | None]:
    """Return the draft verdict of `ask`, and why the endpoint is away; if it was `away` before, it is not asked."""
    if away is None:
        try:
            return ask(), None
        except JudgeAway as error:
            away = str(error)
    return DraftVerdict.failed(away), away


def is_unreached(error: BaseException | None) -> bool:
    """Return whether an error of httpx says that no connection was made, so that nothing was sent."""
    return type(error).__name__ in _UNREACHED


def remedy_of(status: int | None, credential: str, address: str) -> str | None:
    """Return the remedy of an outage; None for other errors.

    status      of the response; None: no connection
    credential  what to do if it is refused
    address     the setting that names the endpoint
    """
    if status in _REFUSED:
        return credential
    if status == _LIMITED:
        return "a limit of the endpoint is reached: raise it there, or lower the judge's `concurrency`"
    if status is None or status in _AWAY:
        return f"see that the endpoint is up and `{address}` is right"
    return None


_T = TypeVar("_T")
_CONNECT_TIMEOUT = 10.0  # seconds
_MAX_RESPONSE_BYTES = 1_000_000  # recorded of one response
_MAX_PAUSE = 30.0  # seconds
_MAX_PASSES = 30  # over the text of an answer, in search of its JSON
_DECODER = json.JSONDecoder()
_THOUGHT = re.compile("</?think>")
_TOO_LONG = re.compile(r"context[ _](length|window|size)|(prompt|input|request) is too (long|large)", re.IGNORECASE)
_MAX_HALVINGS = 3  # of a question's budget
_NO_ROUTE = (404, 405)
_RETRYABLE = (0, 408, 409, 425, 429, 500, 502, 503, 504)  # 0: no response

Message = dict[str, Any]


@dataclass(slots=True)
class JudgeModelSession:
    """The requests made for one usable answer."""

    judge: str
    group_id: str | None
    judge_requests: list[JudgeRequest] = field(default_factory=list)

    @property
    def cost(self) -> float | None:
        """The price of all requests; None if it is unknown."""
        costs = [one.cost for one in self.judge_requests]
        return None if None in costs else sum(cost or 0.0 for cost in costs)

    @property
    def last(self) -> str | None:
        return self.judge_requests[-1].id if self.judge_requests else None


def key_of_model(spec: ModelSpec, environ: Mapping[str, str]) -> str | None:
    """Return the model's API key, None without one. Raises JudgeError if the variable of the settings is not set.

    The default variable may be unset: a server of one's own needs no key.
    """
    if spec.api_key_env is None:
        return None
    key = environ.get(spec.api_key_env) or None
    if key is None and spec.api_key_env != ModelSpec.model_fields["api_key_env"].default:
        raise JudgeError(
            f"the API key of {spec.model} is in the variable {spec.api_key_env}, which is not set: set it, or name "
            "another variable (api_key_env)"
        )
    return key


class LanguageModel:
    """One model at one endpoint. Thread-safe. Raises JudgeError if the package `openai` is missing."""

    def __init__(
        self,
        spec: ModelSpec,
        key: str | None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise JudgeError(f"a judge's or reflection model needs openai: {install_hint('trainer')}") from error
        self.spec = spec
        self._clock = clock
        self._sleep = sleep
        self._openai = openai
        # Nothing that the environment holds for OpenAI itself is sent elsewhere: no key, no account.
        names = ("OpenAI-Organization", "OpenAI-Project", *(() if key else ("Authorization",)))
        self._omitted_headers = {name: openai.Omit() for name in names}
        self._base_urls = base_urls(spec.base_url)
        self._client = openai.OpenAI(
            api_key=key or "none",
            base_url=self._base_urls[0],
            timeout=openai.Timeout(spec.timeout_seconds, connect=_CONNECT_TIMEOUT),
            max_retries=0,
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )
        self._formats = ["json_schema", "json_object", "text"]  # those that the endpoint has not refused

    def ask(
        self,
        question: Sequence[Message],
        schema: Mapping[str, Any],
        read: Callable[[Any], _T],
        session: JudgeModelSession,
    ) -> _T:
        """Return what `read` makes of the answer's JSON; `read` raises ValueError with the reason if it is unusable.

        Raises JudgeUnavailable if no attempt gave a usable answer, JudgeAway if the endpoint takes none now,
        QuestionTooLong.
        """
        return self._attempt(question, schema, lambda text: read_object(text, read), session)

    def say(self, messages: Sequence[Message], session: JudgeModelSession, temperature: float | None = None) -> str:
        """Return an answer's text, in any format. Raises JudgeUnavailable if no attempt gave one."""
        return self._attempt(messages, None, _non_empty, session, temperature)

    def _attempt(
        self,
        question: Sequence[Message],
        schema: Mapping[str, Any] | None,
        read: Callable[[str], _T],
        session: JudgeModelSession,
        temperature: float | None = None,
    ) -> _T:
        messages, problem, remedy = list(question), "", None
        for attempt in range(self.spec.max_attempts):
            try:
                text = self._request(messages, schema, session, temperature)
            except _Busy as busy:
                problem, remedy = str(busy), busy.remedy
                if attempt + 1 < self.spec.max_attempts:
                    self._sleep(min(_MAX_PAUSE, 0.5 * 2.0**attempt if busy.retry_after is None else busy.retry_after))
                continue
            try:
                return read(text)
            except ValueError as error:
                problem, remedy = f"its answer is unusable: {error}", None
                session.judge_requests[-1] = msgspec.structs.replace(session.judge_requests[-1], error=problem)
                if schema is not None:
                    messages = [
                        *question,
                        {"role": "assistant", "content": text[:20_000]},
                        {
                            "role": "user",
                            "content": f"That cannot be used: {error}. Answer again, with the JSON alone.",
                        },
                    ]
        raise self._unavailable(problem, remedy)

    def close(self) -> None:
        self._client.close()

    def _unavailable(self, problem: str, remedy: str | None) -> JudgeUnavailable:
        """Return the error; with a `remedy`, that of an outage."""
        text = f"{self.spec.model} at {self.spec.base_url}, up to {self.spec.max_attempts} attempts: {problem}"
        return JudgeUnavailable(text) if remedy is None else JudgeAway(f"{text}; {remedy}")

    def _remedy(self, response: _Response) -> str | None:
        variable = self.spec.api_key_env
        return remedy_of(
            None if response.unreached else response.status,
            "no key was sent: name the variable of the API key (api_key_env) and restart"
            if variable is None
            else f"set the API key that it accepts in {variable} (`api_key_env` names the variable) and restart",
            "base_url",
        )

    def _request(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        session: JudgeModelSession,
        temperature: float | None,
    ) -> str:
        """Return the text of an answer, in any format without a `schema`. Raises _Busy or JudgeUnavailable."""
        body: dict[str, Any] = {"model": self.spec.model, "messages": list(messages)}
        temperature = self.spec.temperature if self.spec.temperature is not None else temperature
        if temperature is not None:
            body["temperature"] = temperature
        while True:
            format_ = self._formats[0]
            request = body | (_response_format(format_, schema) if schema is not None else {})
            started = time.perf_counter()
            response = self._post(request)
            status = response.status
            record = self._record(session, request, status, response.text, time.perf_counter() - started)
            session.judge_requests.append(record)
            if status in (400, 413) and _TOO_LONG.search(response.text):
                raise QuestionTooLong(
                    f"{self.spec.model} at {self.spec.base_url}: {record.error}; lower context_tokens"
                )
            if status == 400 and len(self._formats) > 1 and "response_format" in request:
                if format_ in self._formats:  # another thread may have removed it
                    self._formats.remove(format_)
                continue
            if status in _RETRYABLE:
                raise _Busy(record.error, response.retry_after, self._remedy(response))
            if status != 200:
                raise self._unavailable(record.error or "", self._remedy(response))
            return _content(response.text)

    def _post(self, body: Mapping[str, Any]) -> _Response:
        result = self._create(self._base_urls[0], body)
        if result.status in _NO_ROUTE and len(self._base_urls) > 1:
            other = self._create(self._base_urls[1], body)
            if other.status not in _NO_ROUTE:
                self._base_urls = self._base_urls[1:]
                return other
        return result

    def _create(self, base_url: str, body: Mapping[str, Any]) -> _Response:
        completions = self._client.with_options(base_url=base_url).chat.completions.with_raw_response
        try:
            response = completions.create(**body, extra_headers=self._omitted_headers)
        except self._openai.APIStatusError as error:
            return _Response(error.status_code, error.response.text, _retry_after(error.response.headers))
        except self._openai.APIConnectionError as error:
            text = f"{type(error).__name__}: {error.__cause__ or error}"
            return _Response(0, text, unreached=is_unreached(error.__cause__))
        return _Response(response.status_code, response.text)

    def _record(
        self, session: JudgeModelSession, body: Mapping[str, Any], status: int, response: str, seconds: float
    ) -> JudgeRequest:
        usage = _usage(response) if status == 200 else {}
        prompt_tokens, completion_tokens = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
        input_cost, output_cost = self.spec.input_cost_per_million, self.spec.output_cost_per_million
        cost = None
        if input_cost is not None and output_cost is not None:
            cost = (prompt_tokens * input_cost + completion_tokens * output_cost) / 1e6
        return JudgeRequest(
            id=new_id("exch"),
            group_id=session.group_id,
            judge=session.judge,
            url=f"{self._base_urls[0]}/chat/completions",
            request=msgspec.json.encode(body),
            response=response.encode()[:_MAX_RESPONSE_BYTES],
            status=status,
            error=None if status == 200 else f"status {status}: {response[:500]}" if status else response[:500],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=cost,
            latency=seconds,
            requested_at=self._clock(),
        )


class _Response(NamedTuple):
    """What an endpoint answered; status 0: no response came. `retry_after`: seconds; `unreached`: nothing was sent."""

    status: int
    text: str
    retry_after: float | None = None
    unreached: bool = False


class _Busy(Exception):
    def __init__(self, reason: str | None, retry_after: float | None, remedy: str | None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.remedy = remedy  # of an outage


def base_urls(url: str) -> list[str]:
    """Return the possible base URLs, the likelier first."""
    return [url] if re.search(r"/v\d+\w*(/|$)", url) else [f"{url}/v1", url]


def ask_within(budget: int, ask: Callable[[int], _T]) -> _T:
    """Return `ask(budget)`, or with half of it, an eighth at least, if the question is too long for the model.

    How many tokens a text has depends on the model: a budget of bytes is an estimate.
    """
    for _ in range(_MAX_HALVINGS):
        try:
            return ask(budget)
        except QuestionTooLong:
            budget //= 2
    return ask(budget)


def _non_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


def read_object(text: str, read: Callable[[Any], _T]) -> _T:
    """Return what `read` makes of the JSON object that is the answer in a text, among other text and braces.

    What stands before `</think>` or after an unclosed `<think>` is a thought: its objects do not count. Raises
    ValueError if no object is readable, or several are and differ. Linear work in the length of the text.
    """
    objects, work = [], _MAX_PASSES * len(text)
    problem = "it contains no JSON object"
    place = text.find("{")
    while place >= 0 and work > 0:
        try:
            end = _DECODER.raw_decode(text, place)[1]
            objects.append((place, end))
            work -= end - place
        except json.JSONDecodeError as error:
            end = place + 1
            work -= error.pos - place
            problem = f"its JSON cannot be read: {error}"
        except (ValueError, RecursionError) as error:  # a huge number; too many levels
            end = place + 1
            work -= len(text)
            problem = f"its JSON cannot be read: {error}"
        place = text.find("{", end)
    answers: list[_T] = []
    for start, end in _outside_thoughts(text, objects):
        try:
            answer = read(_decode(text[start:end]))
        except ValueError as error:
            problem = str(error)
            continue
        if answer not in answers:
            answers.append(answer)
    if len(answers) > 1:
        raise ValueError("it contains several JSON objects that differ, and each could be the answer")
    if not answers:
        raise ValueError(problem)
    return answers[0]


def _decode(text: str) -> Any:
    """Return a JSON value, without the numbers and texts that only Python's decoder accepts. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"its JSON cannot be read: {error}") from error


def _outside_thoughts(text: str, objects: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the objects that are in no thought. Tags inside an object are text of an answer."""
    first, last = 0, len(text)
    spans = iter([*objects, (last, last)])
    start, end = next(spans)
    for tag in _THOUGHT.finditer(text):
        while end <= tag.start():
            start, end = next(spans)
        if tag.start() < start:
            first, last = (tag.end(), len(text)) if tag[0] == "</think>" else (first, min(last, tag.start()))
    return [span for span in objects if first <= span[0] < last]


def _response_format(format_: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if format_ == "json_schema":
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": dict(schema), "strict": True},
            }
        }
    return {"response_format": {"type": "json_object"}} if format_ == "json_object" else {}


def _content(response: str) -> str:
    """Return the text of a chat completion, "" if it has none."""
    try:
        return str(msgspec.json.decode(response)["choices"][0]["message"]["content"] or "")
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""


def _usage(response: str) -> dict[str, Any]:
    try:
        usage = msgspec.json.decode(response).get("usage")
    except (msgspec.DecodeError, AttributeError):
        return {}
    return usage if isinstance(usage, dict) else {}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
