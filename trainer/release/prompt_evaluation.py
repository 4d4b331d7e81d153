"""Evaluation on held-out prompts: a candidate and the live version answer the same prompts, judged in pairs.

A fixed share of all tasks, by a hash of their key, is held out: these tasks are served and recorded as usual, but never
trained or judged for training. The first one-call trajectory of such a task is a prompt. The set consists of the first
tasks that arrived, so it stays the same from version to version once it is full; if it changed, the result says so.

A version's own prompt is substituted as the proxy does it; judges see the agent's messages, as for live traffic.
Requests go to vLLM directly, and only the figures are recorded. The second judge, if there is one, sees the same
answers. For tasks that take more than one call, `ratchet.tuner.selection.release_evaluation` runs a workflow instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import msgspec

from ratchet.store.reasons import DropReason
from ratchet.store.records import Call, Policy, Transcript
from ratchet.store.store import Store
from ratchet.trainer.adapters.replica_fleet import replicas_that_serve
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.release.evaluation import PROMPT_SET, EvaluationResult, Sides, compare_with_judge
from ratchet.trainer.release.recorded_prompts import RecordedPrompt, has_sampling_parameters, sampling_of

log = logging.getLogger(__name__)

_MAX_DECISIONS = 50  # newest decisions that are searched for the previous prompt set
_CONCURRENCY = 8  # prompts


class PromptEvaluator:
    """Evaluates candidates of one alias on its held-out prompts. Blocks while vLLM and the judges work."""

    def __init__(
        self,
        store: Store,
        replicas: Sequence[VllmServer],
        judge: Judge,
        second: Judge | None = None,
        *,
        alias: str,
        prompts: int,
        samples: int,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._judge = judge
        self._second = second
        self._alias = alias
        self._prompts = prompts
        self._samples = samples

    def close(self) -> None:
        """Close the judges."""
        self._judge.close()
        if self._second is not None:
            self._second.close()

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> EvaluationResult:
        """Return the paired comparison; its `first` is None for too few held-out prompts that can be judged.

        Raises EngineUnreachable, AdapterRefused, and whatever `check` raises.
        """
        names = self._store.trajectories.held_out_candidates(self._alias, DropReason.HELD_OUT, self._prompts)
        read = self._store.trajectories.readable(names)
        prompts = [recorded for recorded in read if has_sampling_parameters(recorded.calls[0])]
        replicas = replicas_that_serve(self._replicas, {candidate.served_name, live.served_name})

        def ask(place: int) -> Sides:
            return self._answer(replicas[place % len(replicas)], prompts[place], candidate, live, check)

        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="evaluation") as threads:
            answers = list(threads.map(ask, range(len(prompts))))
        first = compare_with_judge(self._judge, answers)
        prompt_set, changed = self._hash_prompts([one.trajectory.id for one in prompts])
        if first is None or self._second is None:
            return EvaluationResult(first, prompt_set=prompt_set, changed=changed)
        second = compare_with_judge(self._second, answers)
        return EvaluationResult(first, second, self._second.name, prompt_set=prompt_set, changed=changed)

    def _hash_prompts(self, names: Sequence[str]) -> tuple[str, bool]:
        """Return a hash of the prompts, and whether it differs from that of the previous evaluation."""
        now = blake2b("\0".join(sorted(names)).encode(), digest_size=8).hexdigest()
        decisions = self._store.decisions.decisions_of(self._alias, limit=_MAX_DECISIONS)
        before = next((value for one in decisions if (value := one.evidence.get(PROMPT_SET))), now)
        if before != now:
            log.warning("event=evaluation_prompts_changed alias=%s prompts=%d", self._alias, len(names))
        return now, before != now

    def _answer(
        self,
        replica: VllmServer,
        recorded: Transcript,
        candidate: Policy,
        live: Policy,
        check: Callable[[], None],
    ) -> Sides:
        """Return the candidate's answers to a recorded prompt, and as many of the live version."""
        check()
        call = recorded.calls[0]
        messages = self._store.trajectories.messages_to(call.prompt_node)
        prompt = RecordedPrompt(messages, recorded.tools, sampling_of(call), recorded.trajectory.family)
        sides: list[list[Transcript]] = []
        for policy in (candidate, live):
            sent = prompt.messages_for(policy, self._store)
            replies = replica.chat(policy.served_name, sent, prompt.tools, prompt.sampling, self._samples)
            name = f"evaluation:{recorded.trajectory.id}:{policy.version}"
            sides.append(
                [
                    _make_transcript(recorded, call, f"{name}:{number}", policy, (*messages, reply), tokens)
                    for number, (reply, tokens) in enumerate(replies)
                ]
            )
        return sides[0], sides[1]


def _make_transcript(
    recorded: Transcript,
    call: Call,
    name: str,
    policy: Policy,
    messages: tuple[Mapping[str, Any], ...],
    tokens: int,
) -> Transcript:
    """Return the transcript that the proxy would have recorded, without token ids."""
    trajectory = msgspec.structs.replace(
        recorded.trajectory, id=f"{recorded.trajectory.id}:{name}", version=policy.version, purpose="eval"
    )
    answer = msgspec.structs.replace(
        call, trajectory_id=trajectory.id, version=policy.version, choices=(), completion_tokens=tokens
    )
    return Transcript(trajectory=trajectory, calls=(answer,), messages=messages, tools=recorded.tools, row=recorded.row)
