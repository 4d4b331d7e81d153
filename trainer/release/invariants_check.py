"""The invariants check of one agent: both versions answer recent prompts, sent to vLLM directly.

Requests go round the replicas that answer for both versions, a few at a time, with the recorded sampling parameters and
at most `max_tokens` tokens each; nothing is recorded but the shares of faults. What vLLM refuses is an answer that
failed. A replica that does not answer ends the check with an error, and it is repeated. Nothing is decided if the live
version answers none of the prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.adapters.replica_fleet import replicas_that_serve
from ratchet.trainer.adapters.vllm_api import SampledAnswer, VllmServer
from ratchet.trainer.controller.sentinel.answers import (
    asks_in_place_of_acting,
    has_invalid_tool_call,
    is_empty,
    is_refusal,
    name_of,
    repeats_itself,
)
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.release.invariants import (
    AnswerPair,
    CheckedAnswer,
    Fault,
    InvariantsResult,
    is_decidable,
    judge_answers,
)
from ratchet.trainer.release.recorded_prompts import RecordedPrompt, newest_prompts

log = logging.getLogger(__name__)

KIND = "invariants"  # of the observations that hold the results
_SAMPLES = 2  # answers of each version to a prompt
_CONCURRENCY = 4  # prompts; more would compete with users
_TIMEOUT_SECONDS = 300.0  # of one answer
_SLACK_TOKENS = 64  # between what a prompt was counted as and the context's limit


class InvariantsCheck:
    """Checks candidates of one alias. Blocks while vLLM answers."""

    def __init__(
        self, store: Store, replicas: Sequence[VllmServer], *, alias: str, prompts: int, max_tokens: int
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
