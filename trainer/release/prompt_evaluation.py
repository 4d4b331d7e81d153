"""The frozen evaluation: held-out prompts are answered by a candidate and by the live version, and judged in pairs.

Held-out are the tasks of a fixed share of all hashes: they are served and recorded like any, never judged for training
and never trained on. Of each such task the first one-call trajectory is a prompt with which a candidate is tried before
it meets a user. The set is that of the first tasks that came, so that it stays the same from version to version once it
is full; where it has changed (it still grew, or something was deleted), the evaluation says so.
The answers of both versions to one prompt are judged as one group, so that relative judges will do; a version's own
prompt is swapped in as the proxy does it, and judges see the agent's messages, as of live traffic. What is sampled
here goes to vLLM directly; nothing of it is recorded but the figures. A second judge, where there is one, sees the very
same answers. Where tasks take more than one call, `workflow_evaluation.py` has a workflow play them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from ratchet.store.content.prompt_substitution import with_prompt
from ratchet.store.reasons import DropReason
from ratchet.store.records import Call, Policy, Transcript
from ratchet.store.statistics import interval
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders

log = logging.getLogger(__name__)

ENOUGH = 5  # prompts
PROMPT_SET = "prompt_set"  # of a decision's evidence
_DECISIONS_SEEN = 50
_AT_ONCE = 8  # prompts answered at the same time
_SENT = (
    "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "max_tokens", "max_completion_tokens",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "tool_choice", "response_format",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip


Sides = tuple[Sequence[Transcript], Sequence[Transcript]]  # the candidate's and the live version's answers to a prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean over prompts of (candidate - live) in units of the score, with its 95% interval."""

    prompts: int
    unjudged: int  # prompts, or of a workflow attempts, that the judge failed on
    candidate: float
    live: float
    difference: float
    low: float
    high: float
    what: str = "prompts"

    @property
    def worse(self) -> bool:
        """Whether the candidate is shown to be worse."""
        return self.high < 0

    def told(self) -> str:
        """Return it in one clause."""
        return (
            f"on {self.prompts} held-out {self.what} {self.candidate:.3f} against {self.live:.3f}: "
            f"difference {self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found by the judge, and by the second judge on the same answers.

    `first` is None where there was too little to compare on; `run` is the tuner's, where a workflow played.
    """

    first: Evaluation | None
    second: Evaluation | None = None
    second_judge: str = ""
    run: str | None = None
    prompt_set: str = ""  # a hash of the prompts that were asked; equal where they were the same ones
    changed: bool = False  # whether the prompts are other ones than at the evaluation before

    def evidence(self) -> dict[str, Any]:
        """Return it as a decision keeps it."""
        told: dict[str, Any] = {"evaluation": asdict(self.first)} if self.first else {}
        if self.second:
            told["second_evaluation"] = {"judge": self.second_judge} | asdict(self.second)
        if self.first and self.prompt_set:
            told |= {PROMPT_SET: self.prompt_set, "prompt_set_changed": self.changed}
        return told | ({"run": self.run} if self.run else {})

    def told(self) -> str:
        """Return what the judge found in one clause, "" where it was too little."""
        changed = " (other prompts than at the evaluation before)" if self.changed else ""
        return f"{self.first.told()}{changed}" if self.first else ""

    def objection(self, max_gain: float | None) -> str | None:
        """Return why a person has to look before the candidate serves anybody; None where nothing speaks against it."""
        if self.first is None:
            return None
        reasons = []
        if max_gain is not None and self.first.difference > max_gain:
            reasons.append(f"too good to be promoted unseen (gain over max_gain {max_gain:g}): {self.first.told()}")
        if self.second_judge and (told := self._second_objects(self.first)):
            reasons.append(told)
        return "; ".join(reasons) or None

    def _second_objects(self, first: Evaluation) -> str | None:
        if self.second is None:
            return f"second judge {self.second_judge} failed on too many of the answers"
        told = f"second judge {self.second_judge} {self.second.told()}"
        if self.second.worse:
            return f"{told}: it finds the candidate worse"
        if first.low > 0 and self.second.difference <= 0:
            return f"{told}: it does not see the gain of {first.difference:+.3f}"
        return None


def summary(scored: Sequence[tuple[float, float]], unjudged: int, what: str = "prompts") -> Evaluation | None:
    """Return the evaluation of (candidate, live) mean scores by prompt; None of fewer than `ENOUGH` prompts."""
    if len(scored) < ENOUGH:
        return None
    gains = [candidate - live for candidate, live in scored]
    seen = [score for pair in scored for score in pair]
    low, high = interval(gains, max(seen) - min(seen) or 1.0)
    candidate, live = (statistics.fmean(side) for side in zip(*scored, strict=True))
    return Evaluation(len(scored), unjudged, candidate, live, statistics.fmean(gains), low, high, what)


def compared_by(judge: Judge, answered: Sequence[Sides], what: str = "prompts") -> Evaluation | None:
    """Return what a judge thinks of both sides of each prompt, judged as one group; None where it is too little."""
    with ThreadPoolExecutor(judge.concurrency, thread_name_prefix="evaluation_judge") as threads:
        scored = [found for found in threads.map(lambda sides: _scores(judge, sides), answered) if found is not None]
    return summary(scored, len(answered) - len(scored), what)


def _scores(judge: Judge, sides: Sides) -> tuple[float, float] | None:
    members = [*sides[0], *sides[1]]
    scores = [verdict.score for verdict in judge_in_both_orders(judge, members).verdicts if verdict.score is not None]
    if len(scores) < len(members):
        return None
    return statistics.fmean(scores[: len(sides[0])]), statistics.fmean(scores[len(sides[0]) :])


class PromptEvaluator:
    """Evaluates candidates of one alias on its held-out prompts; takes as long as vLLM and the judges take."""

    def __init__(
        self,
        store: Store,
        replica: Replica,
        judge: Judge,
        second: Judge | None = None,
        *,
        alias: str,
        prompts: int,
        samples: int,
    ) -> None:
        self._store = store
        self._replica = replica
        self._judge = judge
        self._second = second
        self._alias = alias
        self._prompts = prompts
        self._samples = samples

    def close(self) -> None:
        """Let go of the judges."""
        self._judge.close()
        if self._second is not None:
            self._second.close()

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> Evaluated:
        """Return the paired comparison; of nothing while there are too few held-out prompts that can be judged.

        Raises EngineUnreachable, AdapterRefused, and what `check` raises.
        """
        names = self._store.trajectories.held_out(self._alias, DropReason.HELD_OUT, self._prompts)
        asked = [recorded for name in names if _can_be_asked(recorded := self._store.trajectories.read(name))]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="evaluation") as threads:
            answered = list(threads.map(lambda one: self._answers(one, candidate, live, check), asked))
        first = compared_by(self._judge, answered)
        prompt_set, changed = self._prompt_set([one.trajectory.id for one in asked])
        if first is None or self._second is None:
            return Evaluated(first, prompt_set=prompt_set, changed=changed)
        second = compared_by(self._second, answered)
        return Evaluated(first, second, self._second.name, prompt_set=prompt_set, changed=changed)

    def _prompt_set(self, names: Sequence[str]) -> tuple[str, bool]:
        """Return a hash of the prompts, and whether it differs from that of the evaluation before."""
        now = blake2b("\0".join(sorted(names)).encode(), digest_size=8).hexdigest()
        decisions = self._store.decisions.of(self._alias, limit=_DECISIONS_SEEN)
        before = next((said for one in decisions if (said := one.evidence.get(PROMPT_SET))), now)
        if before != now:
            log.warning("event=evaluation_prompts_changed alias=%s prompts=%d", self._alias, len(names))
        return now, before != now

    def _answers(self, recorded: Transcript, candidate: Policy, live: Policy, check: Callable[[], None]) -> Sides:
        """Return the candidate's answers to a recorded prompt, and the live version's, as many."""
        check()
        call = recorded.calls[0]
        asked = self._store.trajectories.path(call.prompt_node)
        sampling = {name: call.sampling[name] for name in _SENT if name in call.sampling}
        sides: list[list[Transcript]] = []
        for policy in (candidate, live):
            swapped = self._store.prompts.get(policy.prompt_id) if policy.prompt_id else None
            sent = with_prompt(asked, swapped, recorded.trajectory.family)
            replies = self._replica.chat(policy.served_name, sent, recorded.tools, sampling, self._samples)
            named = f"evaluation:{recorded.trajectory.id}:{policy.version}"
            sides.append(
                [
                    _transcript(recorded, call, f"{named}:{number}", policy, (*asked, reply), tokens)
                    for number, (reply, tokens) in enumerate(replies)
                ]
            )
        return sides[0], sides[1]


def _can_be_asked(recorded: Transcript) -> bool:
    """Return whether the sampling parameters are on record: of a large one only its presence is."""
    return not any(recorded.calls[0].sampling.get(name) is True for name in _SENT)


def _transcript(
    recorded: Transcript,
    call: Call,
    name: str,
    policy: Policy,
    messages: tuple[Mapping[str, Any], ...],
    tokens: int,
) -> Transcript:
    """Return what would have been recorded, without ids."""
    run = msgspec.structs.replace(
        recorded.trajectory, id=f"{recorded.trajectory.id}:{name}", version=policy.version, purpose="eval"
    )
    answered = msgspec.structs.replace(
        call, trajectory_id=run.id, version=policy.version, choices=(), completion_tokens=tokens
    )
    return Transcript(trajectory=run, calls=(answered,), messages=messages, tools=recorded.tools, row=recorded.row)
