"""The teacher: scores the sampled tokens of single trajectories for on-policy distillation.

Consumes recorded calls; produces the teacher's logprob of every sampled token that can be trained, in the context and
with the token ids that vLLM recorded, never re-tokenized. A group is one trajectory. The score of a trajectory is
exp(-KL): KL is the k3 estimate of the policy's reverse KL from the teacher, in nats per token (Schulman 2020,
"Approximating KL divergence"), so that 1 is a policy that equals its teacher.

A teacher that does not answer, or does not fit, judges nothing: its trajectories wait. A trajectory that it refuses is
a failure. Answers that end after the teacher's context length are not scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from ratchet.store.ids import new_id
from ratchet.store.reasons import describe_untrained
from ratchet.store.records import (
    AnswerLogprobs,
    Call,
    JudgeRequest,
    TeacherScore,
    Transcript,
    Verdict,
    pack_logprobs,
    unpack_logprobs,
)
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import AdapterRefused, EngineUnreachable, JudgeError, PromptLogprobsMissing, RowError
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    GroupJudgement,
    NamedJudge,
    version_of,
)
from ratchet.trainer.judges.language_model import JudgeModelSession
from ratchet.trainer.rows.build_rows import UNSCORED, AnswerKey, build_rows
from ratchet.trainer.settings.judge_specs import TeacherSpec

# Checks that a model can be a teacher: its tokens are the policy's, and it returns the logprobs of given token ids.
#
# The recorded token ids are sent as they are, so every id must mean the same text to both models. Both servers tokenize
# the same texts and return the text of the same ids, up to the largest that any tokenizer has; a larger embedding with
# unused rows does not matter.

_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs; isn't it 3.14159?\n\n\tEnd.",
    'def f(x):\n    return {"key": [x ** 2, None]}  # comment\n',
    '<tool_call>\n{"name": "search", "arguments": {"q": "a-b_c"}}\n</tool_call>',
    "Übergröße, naïve café, Здравствуйте, 你好世界, こんにちは, مرحبا, नमस्ते 🙂👩‍👩‍👧",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><s></s><|eot_id|><think></think><start_of_turn>[INST]",
)
# Every power of 2 up to 2^19, and three places between each two of them.
_IDS = tuple(sorted({(4 + part) << power for power in range(18) for part in range(4)} | set(range(4))))
_SERVE = "serve the teacher with vLLM, and give the address of that server (api_base)"


def check_teacher(teacher: VllmServer, name: str, policy: VllmServer | None) -> int:
    """Return the teacher's context length in tokens. `policy` serves the base model; None: tokens are not compared.

    Raises JudgeError with the remedy, and EngineUnreachable if a server does not answer.
    """
    try:
        cards = {card["id"]: card for card in teacher.cards()}
        if name not in cards:
            raise JudgeError(f"the teacher's server {teacher.url} serves {', '.join(cards) or 'nothing'}, not {name!r}")
        if policy is not None:
            _compare_tokens(teacher, name, policy)
        teacher.prompt_logprobs(name, [_IDS[:3]])
    except PromptLogprobsMissing as error:
        raise JudgeError(f"{error}: it cannot be a teacher, as hosted APIs cannot; {_SERVE}") from error
    except AdapterRefused as error:
        raise JudgeError(f"teacher {name}: {error}; check its key, or {_SERVE}") from error
    return max(int(card.get("max_model_len") or 0) for card in cards.values())  # an adapter has its base model's


def _compare_tokens(teacher: VllmServer, name: str, policy: VllmServer) -> None:
    """Raise JudgeError unless both servers have the same tokenizer."""
    base = next((str(card["id"]) for card in policy.cards() if not card.get("parent")), "")
    for text in _TEXTS:
        theirs, ours = teacher.tokenize(name, text), policy.tokenize(base, text)
        if theirs != ours:
            raise _other_tokenizer(
                name, base, f"{text[:24]!r}... has {len(theirs)} tokens for the teacher, {len(ours)} for the policy"
                if len(theirs) != len(ours) else f"{text[:24]!r}... has other token ids"
            )  # fmt: skip
    theirs_text, ours_text = teacher.detokenize(name, _IDS), policy.detokenize(base, _IDS)
    if theirs_text != ours_text:
        raise _other_tokenizer(name, base, "the same token ids have other texts: the vocabularies differ")


def _other_tokenizer(teacher: str, base: str, difference: str) -> JudgeError:
    return JudgeError(
        f"trainer.judge: the teacher {teacher} has another tokenizer than {base} ({difference}): distillation compares "
        "the two token by token; choose a teacher of the same model family"
    )


_MAX_GAP = 5.0  # nats: log p_teacher - log p of one token in the score, or a single token would decide it


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Token ids, cut to the teacher's context, and where the answers in them begin, with their sampling logprobs."""

    ids: tuple[int, ...]
    answers: Mapping[AnswerKey, tuple[int, tuple[float, ...]]]


class TeacherJudge(NamedJudge):
    """One teacher behind one vLLM. Thread-safe. Raises JudgeError if it has no URL, or no key although it needs one.

    `context_calls` returns a trajectory's calls with the earlier ones that they continue; `policy` the vLLM that serves
    the policy, whose tokens must be the teacher's.
    """

    def __init__(
        self,
        spec: TeacherSpec,
        environ: Mapping[str, str],
        context_calls: Callable[[Transcript], Sequence[Call]] = lambda member: member.calls,
        policy: Callable[[], VllmServer | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(clock)
        if spec.base_url is None:
            raise JudgeError(f"judge teacher: {spec.model} has no URL: give base_url, or name a model of model_list")
        key = environ.get(spec.api_key_env) if spec.api_key_env else None
        if spec.api_key_env and not key:
            raise JudgeError(f"judge teacher: its key is in the variable {spec.api_key_env}, which is not set")
        self._spec = spec
        self._server = VllmServer(spec.base_url.removesuffix("/v1"), spec.timeout_seconds, key)
        self._context_calls = context_calls
        self._policy = policy
        self._max_length: int | None = None  # of the teacher; None: not checked yet
        self.concurrency = spec.concurrency
        self.name = f"teacher:{spec.model}"
        self.version = version_of("teacher", self._server.url, spec.model)

    def close(self) -> None:
        self._server.close()

    def check(self) -> int:
        """Return the longest sequence that the teacher scores. Raises JudgeError, EngineUnreachable."""
        if self._max_length is None:
            context = check_teacher(self._server, self._spec.model, self._policy())
            self._max_length = context - 1 if context else 0  # one token is sampled
        return self._max_length

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        verdicts: list[Verdict] = []
        scores: list[TeacherScore] = []
        requests: list[JudgeRequest] = []
        problem: str | None = None
        for member in members:
            began, session = time.perf_counter(), JudgeModelSession(self.name, group_id)
            draft = DraftVerdict.failed("the teacher did not answer")
            if problem is None:
                try:
                    draft, found = self._score(member, session, self.check())
                    scores += found
                except (EngineUnreachable, PromptLogprobsMissing, JudgeError) as error:
                    problem = str(error)
            seconds = time.perf_counter() - began
            verdicts.append(self.record(draft, group_id, member, cost=session.cost, latency=seconds))
            requests += session.judge_requests
        return GroupJudgement(tuple(verdicts), tuple(requests), tuple(scores), problem)

    def _score(
        self, member: Transcript, session: JudgeModelSession, max_length: int
    ) -> tuple[DraftVerdict, list[TeacherScore]]:
        """Return the draft verdict on a trajectory, and the logprobs of its answers' tokens if it could be scored."""
        name = member.trajectory.id
        try:
            sequences, untrained = sequences_of(name, self._context_calls(member), max_length)
        except RowError as error:
            return DraftVerdict.failed(str(error)), []
        if not sequences:
            return DraftVerdict.failed(f"it has no token to score; {describe_untrained(untrained)}"), []
        found: dict[AnswerKey, list[tuple[float, float]]] = {}  # the teacher's logprob and vLLM's, by token
        try:
            for batch in batched([one.ids for one in sequences], self._spec.max_request_tokens):
                started = time.perf_counter()
                logprobs = self._server.prompt_logprobs(self._spec.model, [sequences[index].ids for index in batch])
                tokens, seconds = sum(len(sequences[index].ids) for index in batch), time.perf_counter() - started
                session.judge_requests.append(self._request(session, name, len(batch), tokens, seconds))
                for index, scored in zip(batch, logprobs, strict=True):
                    for key, (place, sampled) in sequences[index].answers.items():
                        own = scored[place - 1 : place - 1 + len(sampled)]  # the first id has no logprob
                        found[key] = list(zip(own, sampled, strict=True))
        except AdapterRefused as refused:
            return DraftVerdict.failed(str(refused)), []
        gaps = [ours - own for pairs in found.values() for ours, own in pairs]
        kl, k3 = -fmean(gaps), fmean(math.exp(gap) - 1.0 - gap for gap in (min(one, _MAX_GAP) for one in gaps))
        explanation = f"reverse KL {kl:.3f} nats per token over {len(gaps)} tokens"
        answers = tuple(
            AnswerLogprobs(call_id=call, choice=choice, logprobs=pack_logprobs(ours for ours, _ in pairs))
            for (call, choice), pairs in found.items()
        )
        score = TeacherScore(trajectory_id=name, teacher=self.name, answers=answers)
        return DraftVerdict.of(math.exp(-k3), explanation, {"reverse_kl": kl}), [score]

    def _request(
        self, session: JudgeModelSession, trajectory: str, sequences: int, tokens: int, seconds: float
    ) -> JudgeRequest:
        price = self._spec.input_cost_per_million
        about = {"model": self._spec.model, "trajectory": trajectory, "sequences": sequences}
        return JudgeRequest(
            id=new_id("exch"),
            group_id=session.group_id,
            judge=self.name,
            url=f"{self._server.url}/v1/completions",
            request=msgspec.json.encode(about),
            response=b"",
            status=200,
            error=None,
            prompt_tokens=tokens,
            completion_tokens=sequences,
            cost=None if price is None else tokens * price / 1e6,
            latency=seconds,
            requested_at=self._clock(),
        )


def sequences_of(
    trajectory_id: str, calls: Sequence[Call], max_length: int
) -> tuple[list[_Sequence], Mapping[str, int]]:
    """Return the sequences that hold a trajectory's trainable answers, each answer once, and the other tokens by
    reason. Sequences are cut to `max_length` tokens (0: no limit). Raises RowError.
    """
    sampled = {(call.id, one.index): unpack_logprobs(one.logprobs) for call in calls for one in call.choices}
    built = build_rows(trajectory_id, calls, 0.0)
    sequences: list[_Sequence] = []
    unscored = 0
    for row, places in zip(built.rows, built.answers, strict=True):
        limit = max_length or len(row.ids)
        answers = {key: (place, sampled[key]) for key, place in places.items() if place + len(sampled[key]) <= limit}
        unscored += sum(len(sampled[key]) for key in places if key not in answers)
        if answers:
            end = max(place + len(logprobs) for place, logprobs in answers.values())
            sequences.append(_Sequence(row.ids[:end], answers))
    return sequences, {**built.untrained, **({UNSCORED: unscored} if unscored else {})}


def batched(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the indices of sequences in requests of at most `max_tokens`; a longer one has a request of its own."""
    batches: list[list[int]] = []
    size = 0
    for index, ids in enumerate(sequences):
        if not batches or size + len(ids) > max_tokens:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += len(ids)
    return batches
