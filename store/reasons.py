"""Why trajectories, groups and tokens are not trained: each reason with its meaning and remedy.

docs/sentinel.md lists the same sentences; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class DropReason(StrEnum):
    """Why a trajectory or a group is not trained. `meaning` is one sentence for people, with the remedy."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> DropReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    UNGROUPED = (
        "ungrouped",
        "no other trajectory of its task in time: set trainer.ungrouped or trainer.resample, or send x-ratchet-task",
    )
    NO_VARIANCE = (
        "no_variance",
        "all members got the same score: use harder or easier tasks, or a judge that separates them",
    )
    BASELINE_ONLY = (
        "baseline_only",
        "an ungrouped trajectory whose task family has too few earlier scores: it counts towards the baseline",
    )
    RESAMPLE_UNMATCHED = (
        "resample_unmatched",
        "a resample whose original left, or which had too few comparable peers: see the trainer's log",
    )
    RESAMPLE_PROMPT_MISMATCH = (
        "resample_prompt_mismatch",
        "a resample with other prompt tokens than its original, or without a complete answer",
    )
    JUDGE_FAILED = "judge_failed", "the judge failed on every attempt: see `ratchet judge show GROUP`"
    NO_FEEDBACK = (
        "no_feedback",
        "no feedback value arrived in time: raise the judge's within_seconds, or set its `missing` to a score",
    )
    STALE = "stale", "sampled too many versions ago: raise trainer.max_staleness, or train less often"
    GROUP_TOO_SMALL = (
        "group_too_small",
        "other members of its group were dropped, and fewer than trainer.min_group_size are left to compare",
    )
    UNTRAINABLE = "untrainable", "no token of the round could be trained: see the untrained tokens"
    TOO_LONG = (
        "too_long",
        "its rows are longer than can be trained: see learner.max_length and the alarm of that name",
    )
    DIVERGED = "diverged", "the gradient was not finite: lower learner.learning_rate"
    EVAL = "eval", "requested by explicit version: a measurement, never training data"
    HELD_OUT = "held_out", "its task is reserved for evaluation (trainer.release.held_out_share)"
    OTHER_ROLE = (
        "other_role",
        "none of its calls has a role that is trained (trainer.roles): have agents send x-ratchet-role",
    )
    MOVED = (
        "moved",
        "it went on with another version when its own was rolled back at once (`rollback --now`): two versions in one",
    )
    UNLINKED = (
        "unlinked",
        "it began while the proxy did not know every worker's calls, so it may be the rest of another trajectory",
    )
    ROLLED_BACK = "rolled_back", "sampled by a version that was rejected: see `ratchet policies show`"
    ABANDONED = (
        "abandoned",
        "the tuner that made it was stopped or killed: a resumed tuning run makes its rollout again",
    )
    DOCTOR = "doctor", "a call or attempt made by `ratchet doctor`: never training data"
    MEMBER_DELETED = "member_deleted", "a member of its group was deleted before the group was trained"
    INCOMPLETE = (
        "incomplete",
        "some of its messages were lost with a proxy's journal (alarm proxy_journal_lost or proxy_journal_damaged)",
    )
    DAMAGED = (
        "damaged",
        "a part of it, or of what it continues, cannot be read: `ratchet store verify` names the rows and what to do",
    )
    CUT_OFF = "cut_off", "a proxy or an engine cut off its last call, not the policy: see the proxy's errors"


UNTRAINED: Mapping[str, str] = {
    "greedy": "sampled at temperature 0, which does not explore: sample at a positive temperature, ideally 1.0",
    "invalid_temperature": "the temperature of the request is not a number",
    "penalized_sampling": "sampled with penalties, bias or min_tokens: leave them out, or set trainer.train_penalized",
    "constrained_sampling": "a grammar, schema, forced tool or thinking budget chose tokens in place of the policy",
    "no_token_ids": "the engine returned no token ids: serve the model with vLLM",
    "no_logprobs": "the engine returned no logprobs: serve the model with vLLM",
    "no_prompt_token_ids": "the engine returned no prompt token ids: use a vLLM that supports return_token_ids",
    "length_mismatch": "the engine returned different numbers of token ids and logprobs, or fewer ids than it counted",
    "invalid_logprobs": "the engine returned a logprob that is above 0 or not a number",
    "context_unknown": "the call that it continues is not in the store",
    "answer_lost": "the client repeated the request: it never received this answer",
    "answer_discarded": "the agent continued from another answer",
    "other_role": "sampled by a role that is not trained (trainer.roles)",
    "after_verdict": "ended after the judge gave its verdict: raise trainer.seal_after_idle_seconds",
    "exceeds_model": "too long for the base model, or holds ids outside its vocabulary",
    "no_teacher_logprobs": "not scored by the teacher (learner.loss_type: distillation): its context is shorter than "
    "the answer's",
    "constrained_tool_calls": "vLLM constrained the calls of `strict` tools, or the one call of "
    "`parallel_tool_calls: false`, with a grammar (`proxy.tool_strict_level`)",
    "truncated": "cut off at max_tokens (trainer.mask_truncated_completions): raise the agent's max_tokens",
    "too_long": "the row is longer than can be trained: see learner.max_length",
    "aborted": "the client disconnected before the end",
    "failed": "the engine, its server or the proxy failed before the answer was whole: see the call's error",
    "refused": "the upstream refused the call: see its error",
    "interrupted": "the proxy exited during the call",
    "started": "the end of the call is not recorded yet",
    "no_answer": "the engine returned no choice",
    "invalid_row": "ids and masks contradict each other: see the trainer's log",
    "image": "images are recorded and judged, never trained",
    "input_audio": "audio is recorded and judged, never trained",
    "audio_url": "audio is recorded and judged, never trained",
    "video_url": "video is recorded and judged, never trained",
    "file": "files are recorded and judged, never trained",
    "echo": "the answer repeats the prompt",
    "beam_search": "beam search does not sample",
    "several_prompts": "one call with several prompts",
    "redacted": "part of the call was redacted (proxy.redact)",
    "other_model": "answered by another model",
}


def drop_meaning(reason: str) -> str | None:
    """Return the meaning of a drop reason; None for an unknown one."""
    return next((known.meaning for known in DropReason if known == reason), None)


def describe_untrained(tokens: Mapping[str, int]) -> str:
    """Return the untrained tokens by reason, the largest count first, each with its meaning."""
    parts = [
        f"{count} tokens {reason}" + (f" ({UNTRAINED[reason]})" if reason in UNTRAINED else "")
        for reason, count in sorted(tokens.items(), key=lambda item: -item[1])
    ]
    return "untrained: " + "; ".join(parts) if parts else "all tokens were trained"
