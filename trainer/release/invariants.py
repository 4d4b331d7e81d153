"""Invariants: does a candidate break what the live version does, on the same recent prompts? No judge."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import comb, prod
from statistics import fmean
from typing import Any

from ratchet.store.content.messages import with_one_system_message, with_prompt
from ratchet.store.errors import RecordDamaged, RecordNotFound
from ratchet.store.records import Call, Policy
from ratchet.store.states import CallState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import SampledAnswer, VllmServer, replicas_that_serve
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.sentinel.checks import (
    asks_in_place_of_acting,
    has_invalid_tool_call,
    is_empty,
    is_refusal,
    name_of,
    repeats_itself,
)

# Invariants: does a candidate break what the live version does, on the same recent prompts? Pure; no judge.
#
# Both versions answer each prompt as often. An answer has faults: it failed, is empty, refuses, calls a tool wrongly,
# asks in place of acting, repeats itself, does not end, is much longer than another answer to the same prompt, or is
# much less certain (random weights write text in which every token is unlikely). A fault never depends on which version
# answered.
#
# So if the versions behave alike, the faulty answers of a prompt fall on either version by chance alone, and the number
# that falls on the candidate, over all prompts, has a known distribution: the convolution of one hypergeometric per
# prompt (the exact conditional test of Cochran, Mantel and Haenszel). Its tail is the p-value of a fault. A fault
# rejects if p is at most ALPHA / number of faults, and its share grew by `MIN_INCREASE`: an equal version is rejected
# with a probability of at most ALPHA = 0.001, whatever the prompts, the sampling parameters and the shares
# (Bonferroni).
#
# A small increase is no break: it passes, and the ramp's scores decide. With so few prompts that even the worst
# candidate would pass, nothing is decided; the result says so.

ALPHA = 0.001  # probability that an equal version is rejected
MIN_INCREASE = 0.2  # of a fault's share of the answers; less is no clear break
LENGTH_RATIO = 3.0  # times the shortest answer to the same prompt
LENGTH_TOKENS = 32  # and as many tokens more
UNCERTAINTY_NATS = 1.0  # per token, above the most certain answer to the same prompt


class Fault(StrEnum):
    """What is wrong with an answer. The value is how a reason names it."""

    FAILED = "failed requests"
    EMPTY = "empty answers"
    REFUSAL = "refusals"
    INVALID_TOOL_CALL = "invalid tool calls"
    QUESTION = "questions in place of actions"
    REPETITION = "repetition"
    UNFINISHED = "answers without an end"
    LONG = "much longer answers"
    UNCERTAIN = "unlikely text"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One answer. `tokens` and `uncertainty` (mean -logprob of its tokens, nats) are None if they are not known."""

    faults: AbstractSet[Fault] = frozenset()
    tokens: int | None = None
    uncertainty: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of both versions to one prompt, as many of each."""

    candidate: Sequence[CheckedAnswer]
    live: Sequence[CheckedAnswer]


@dataclass(frozen=True, slots=True)
class FaultShares:
    """The shares of each version's answers with a fault, and the p-value of the increase."""

    fault: Fault
    candidate: float
    live: float
    p_value: float
    broken: bool

    def describe(self) -> str:
        """Return it as one clause."""
        return f"{self.fault} in {self.candidate:.0%} of the answers, {self.live:.0%} by the live version"


@dataclass(frozen=True, slots=True)
class InvariantsResult:
    """The shares of all faults. `decidable`: whether a candidate could have been rejected on so many prompts."""

    prompts: int
    answers: int  # of each version
    decidable: bool
    faults: tuple[FaultShares, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the candidate clearly breaks something."""
        return any(one.broken for one in self.faults)

    def evidence(self) -> dict[str, Any]:
        """Return it in the form of a decision's evidence."""
        return {"invariants": {"broken": self.broken} | asdict(self)}

    def blocking_reason(self, max_gain: float | None) -> None:
        """No person needs to look at a candidate that breaks nothing."""

    def describe(self) -> str:
        """Return it as one clause."""
        where = f"on {self.prompts} recent prompts"
        if not self.decidable:
            return f"invariants are not decided {where}: too few"
        broken = [one.describe() for one in self.faults if one.broken]
        return f"{where} {'; '.join(broken)}" if broken else f"no invariant broken {where}"


def judge_answers(pairs: Sequence[AnswerPair]) -> InvariantsResult:
    """Return whether the candidate's answers clearly break an invariant."""
    level = ALPHA / len(Fault)
    answers = sum(len(pair.candidate) for pair in pairs)
    decidable = is_decidable([len(pair.candidate) for pair in pairs])
    marked = [_with_relative_faults(pair) for pair in pairs]
    shares = tuple(_compare(fault, marked, answers, level) for fault in Fault) if decidable else ()
    return InvariantsResult(len(pairs), answers, decidable, shares)


def is_decidable(samples: Sequence[int]) -> bool:
    """Return whether the worst candidate would be rejected, with so many answers of each version to each prompt."""
    return prod(1 / comb(2 * count, count) for count in samples) <= ALPHA / len(Fault)


def _with_relative_faults(pair: AnswerPair) -> AnswerPair:
    """Return the pair with the faults that depend on all answers to its prompt."""
    both = (*pair.candidate, *pair.live)
    shortest = min((one.tokens for one in both if one.tokens is not None), default=0)
    surest = min((one.uncertainty for one in both if one.uncertainty is not None), default=0.0)
    long_from = max(LENGTH_RATIO * shortest, shortest + LENGTH_TOKENS)

    def marked(one: CheckedAnswer) -> CheckedAnswer:
        long = {Fault.LONG} if one.tokens is not None and one.tokens > long_from else set()
        vague = one.uncertainty is not None and one.uncertainty > surest + UNCERTAINTY_NATS
        return CheckedAnswer(one.faults | long | ({Fault.UNCERTAIN} if vague else set()))

    return AnswerPair([marked(one) for one in pair.candidate], [marked(one) for one in pair.live])


def _compare(fault: Fault, pairs: Sequence[AnswerPair], answers: int, level: float) -> FaultShares:
    counts = [
        (_count(fault, pair.candidate), _count(fault, pair.live), len(pair.candidate), len(pair.live)) for pair in pairs
    ]
    candidate = sum(mine for mine, *_ in counts) / answers
    live = sum(other for _, other, *_ in counts) / max(1, sum(size for *_, size in counts))
    p_value = conditional_p_value(counts)
    return FaultShares(fault, candidate, live, p_value, p_value <= level and candidate - live >= MIN_INCREASE)


def _count(fault: Fault, answers: Sequence[CheckedAnswer]) -> int:
    return sum(fault in one.faults for one in answers)


def conditional_p_value(counts: Sequence[tuple[int, int, int, int]]) -> float:
    """Return the probability of at least as many hits on the first side, if hits fall on either side by chance.

    Each count is (hits of the first side, hits of the second, size of the first, size of the second) of one prompt.
    """
    chances, observed = [1.0], 0
    for mine, other, size, other_size in counts:
        hits, observed = mine + other, observed + mine
        ways = comb(size + other_size, hits)
        own = [comb(size, n) * comb(other_size, hits - n) / ways for n in range(min(size, hits) + 1)]
        if own == [1.0]:
            continue  # no hit: it says nothing
        summed = [0.0] * (len(chances) + len(own) - 1)
        for i, chance in enumerate(chances):
            for j, share in enumerate(own):
                summed[i + j] += chance * share
        chances = summed
    return min(1.0, sum(chances[observed:]))


# Recorded prompts that versions answer again, off the path of users: chosen here, sent to vLLM directly.
#
# A version's own prompt is substituted as the proxy does it. `seed` and `n` are not sent: each answer is a sample.

SAMPLING_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "max_tokens", "max_completion_tokens",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "tool_choice", "response_format",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
_PAGE = 256  # calls
_MAX_PAGES = 8


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The prompt of a recorded call: messages as the agent sent them, tools, sampling parameters; `tokens` long."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    family: str
    tokens: int = 0

    def messages_for(self, policy: Policy, store: Store) -> tuple[Mapping[str, Any], ...]:
        """Return the messages as the proxy sends them to a version."""
        prompt = store.prompts.get(policy.prompt_id) if policy.prompt_id else None
        return tuple(with_one_system_message(with_prompt(self.messages, prompt, self.family)))

    @property
    def is_greedy(self) -> bool:
        """Whether every answer of one version would be the same."""
        return self.sampling.get("temperature") == 0 or self.sampling.get("top_k") == 1


def has_sampling_parameters(call: Call) -> bool:
    """Return whether the sampling parameters are recorded; a large value is recorded as True only."""
    return not any(call.sampling.get(name) is True for name in SAMPLING_PARAMETERS)


def sampling_of(call: Call) -> dict[str, Any]:
    """Return the sampling parameters that another answer is sampled with."""
    return {name: call.sampling[name] for name in SAMPLING_PARAMETERS if name in call.sampling}


def newest_prompts(store: Store, alias: str, limit: int) -> list[RecordedPrompt]:
    """Return the newest different prompts of an agent's answered chat calls, as many of each role as there are.

    Reads a bounded number of calls. Prompts with images, and prompts that were deleted or are damaged, are left out.
    """
    found: list[RecordedPrompt] = []
    for call in choose(_suitable_calls(store, alias, 2 * limit), 2 * limit):
        if len(found) < limit and (prompt := _read(store, call)) is not None:
            found.append(prompt)
    return found


def choose(calls: Sequence[Call], limit: int) -> list[Call]:
    """Return at most `limit` calls, the newest of each role in turn. `calls`: newest first. Pure."""
    by_role: dict[str | None, list[Call]] = {}
    for call in calls:
        by_role.setdefault(call.role, []).append(call)
    most = max(map(len, by_role.values()), default=0)
    turns = (mine[place] for place in range(most) for mine in by_role.values() if place < len(mine))
    return [call for _, call in zip(range(limit), turns, strict=False)]


def _suitable_calls(store: Store, alias: str, wanted: int) -> list[Call]:
    """Return the newest calls with different prompts, newest first: enough of every role that the last pages have."""
    prompts: dict[tuple[str, str], Call] = {}
    for call in _newest_calls(store, alias):
        if _is_suitable(call):
            prompts.setdefault((call.prompt_node, call.tools_hash), call)
        if len(prompts) >= 4 * wanted:
            break
    return list(prompts.values())


def _newest_calls(store: Store, alias: str) -> Iterator[Call]:
    before = None
    for _ in range(_MAX_PAGES):
        page = store.calls.page(_PAGE, before, state=CallState.ANSWERED, alias=alias, tokens=False)
        yield from page
        if len(page) < _PAGE:
            return
        before = page[-1].id


def _is_suitable(call: Call) -> bool:
    return call.dialect != "completions" and call.untrainable != "image" and has_sampling_parameters(call)


def _read(store: Store, call: Call) -> RecordedPrompt | None:
    """Return the prompt of a call; None if it is not, or no longer, in the store, or damaged there."""
    try:
        messages = store.trajectories.messages_to(call.prompt_node)
        body = store.tools.toolset(call.tools_hash) if call.tools_hash else b"[]"
        tools = json.loads(body or b"[]")
        family = store.trajectories.get(call.trajectory_id).family
    except (RecordNotFound, RecordDamaged, ValueError):
        return None
    if not messages or body is None:
        return None
    return RecordedPrompt(
        messages, tools if isinstance(tools, list) else [], sampling_of(call), family, call.prompt_tokens
    )


# The invariants check of one agent: both versions answer recent prompts, sent to vLLM directly.
#
# Requests go round the replicas that answer for both versions, a few at a time, with the recorded sampling parameters
# and at most `max_tokens` tokens each; nothing is recorded but the shares of faults. What vLLM refuses is an answer
# that failed. A replica that does not answer ends the check with an error, and it is repeated. Nothing is decided if
# the live version answers none of the prompts.

log = logging.getLogger(__name__)

KIND = "invariants"  # of the observations that hold the results
MAX_TOKENS = 1024  # of an answer
_SAMPLES = 2  # answers of each version to a prompt
_CONCURRENCY = 4  # prompts; more would compete with users
_TIMEOUT_SECONDS = 300.0  # of one answer
_SLACK_TOKENS = 64  # between what a prompt was counted as and the context's limit


class InvariantsCheck:
    """Checks candidates of one alias. Blocks while vLLM answers."""

    def __init__(
        self, store: Store, replicas: Sequence[VllmServer], *, alias: str, prompts: int, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._prompts = prompts
        self._max_tokens = max_tokens

    def close(self) -> None:
        """Do nothing: the replicas belong to the caller."""

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> InvariantsResult:
        """Return the result. Raises EngineUnreachable, AdapterRefused, and whatever `check` raises."""
        prompts = newest_prompts(self._store, self._alias, self._prompts)
        if not is_decidable([_samples(prompt) for prompt in prompts]):
            return InvariantsResult(len(prompts), 0, decidable=False)
        replicas = replicas_that_serve(self._replicas, {candidate.served_name, live.served_name})
        max_context = min(filter(None, map(_max_context, replicas)), default=None)
        bounded = [one for prompt in prompts if (one := _bounded(prompt, self._max_tokens, max_context)) is not None]

        def ask(place: int) -> AnswerPair:
            return self._ask(replicas[place % len(replicas)], bounded[place], candidate, live, check)

        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="invariants") as threads:
            pairs = list(threads.map(ask, range(len(bounded))))
        if pairs and all(Fault.FAILED in answer.faults for pair in pairs for answer in pair.live):
            log.warning("event=invariants_unanswered alias=%s prompts=%d", self._alias, len(pairs))
            return judge_answers([])
        return judge_answers(pairs)

    def _ask(
        self, replica: VllmServer, prompt: RecordedPrompt, candidate: Policy, live: Policy, check: Callable[[], None]
    ) -> AnswerPair:
        """Return the answers to a prompt, asked of both versions in turn; one of each if all would be the same."""
        sides: dict[int, list[CheckedAnswer]] = {candidate.version: [], live.version: []}
        for _ in range(_samples(prompt)):
            for policy in (candidate, live):
                check()
                sides[policy.version].append(self._answer(replica, policy, prompt))
        return AnswerPair(sides[candidate.version], sides[live.version])

    def _answer(self, replica: VllmServer, policy: Policy, prompt: RecordedPrompt) -> CheckedAnswer:
        messages = prompt.messages_for(policy, self._store)
        try:
            sampled = replica.answer(policy.served_name, messages, prompt.tools, prompt.sampling, _TIMEOUT_SECONDS)
        except AdapterRefused as error:
            log.info("event=invariants_request_failed policy=%s reason=%r", policy.served_name, str(error))
            return CheckedAnswer(frozenset({Fault.FAILED}))
        return read_answer(sampled, frozenset(filter(None, map(name_of, prompt.tools))))


def _samples(prompt: RecordedPrompt) -> int:
    return 1 if prompt.is_greedy else _SAMPLES


def _max_context(replica: VllmServer) -> int | None:
    """Return the max_context context of a replica in tokens; None if it does not tell."""
    lengths = [card.get("max_model_len") for card in replica.cards()]
    return max((length for length in lengths if isinstance(length, int)), default=None)


def _bounded(prompt: RecordedPrompt, max_tokens: int, max_context: int | None) -> RecordedPrompt | None:
    """Return the prompt with a limit of its answer that fits into the context; None if none fits."""
    most = max_tokens if max_context is None else min(max_tokens, max_context - prompt.tokens - _SLACK_TOKENS)
    sampling = dict(prompt.sampling)
    given = [sampling.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
    limit = min((most, *(value for value in given if isinstance(value, int))))
    return replace(prompt, sampling=sampling | {"max_tokens": limit}) if limit > 0 else None


def read_answer(sampled: SampledAnswer, offered: frozenset[str]) -> CheckedAnswer:
    """Return the faults of one answer. Of one that was cut, only its length and repetition are judged."""
    message = {"role": "assistant", **sampled.message}
    cut = sampled.finish_reason == "length"
    found = {
        Fault.EMPTY: not cut and is_empty(message),
        Fault.REFUSAL: is_refusal(message),
        Fault.INVALID_TOOL_CALL: not cut and has_invalid_tool_call(message, offered),
        Fault.QUESTION: not cut and asks_in_place_of_acting(message, offered),
        Fault.REPETITION: repeats_itself(message),
        Fault.UNFINISHED: cut,
    }
    uncertainty = -fmean(sampled.logprobs) if sampled.logprobs else None
    return CheckedAnswer(frozenset(fault for fault, there in found.items() if there), sampled.tokens, uncertainty)
