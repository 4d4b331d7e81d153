"""Why trajectories, groups and tokens are not trained: every reason with what it means and what to do about it.

Promises that each reason that the trainer's room gives stands here; docs/sentinel.md shows the same table. A reason
that does not stand here is told by its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping

DROPPED: Mapping[str, str] = {
    "single": "nobody else tried the same task in time: set trainer.ungrouped or trainer.resample, or send x-ratchet-task",
    "no_variance": "all members got the same score: harder or easier tasks, or a judge that tells them apart",
    "baseline_only": "a single of a task family with too few earlier scores: it counts for later ones",
    "resample_unmatched": "a shadow answer whose original went another way, or had too few like it: see the trainer's log",
    "resample_prompt_mismatch": "a shadow answer to other prompt tokens than its original's, or no whole answer: never compared",
    "judge_failed": "the judge failed on every attempt: see `ratchet judge show GROUP`",
    "no_feedback": "nobody gave a value in time: raise the judge's within_seconds, or set its missing to a score",
    "stale": "sampled too many versions ago: raise trainer.max_staleness, or train less often",
    "group_too_small": "its group's other members were dropped: fewer than trainer.min_group_size are left to compare",
    "untrainable": "no token of the round could be trained: see the tokens that were left out",
    "too_long": "its rows are longer than may be trained: see trainer.learner.max_length and the alarm of that name",
    "diverged": "the gradient was not finite: lower trainer.learner.learning_rate",
    "eval": "asked for by explicit version: a measurement, never training data",
    "other": "a call to another model: recorded, never trained",
    "held_out": "its task is set aside for evaluation (trainer.release.held_out)",
    "other_role": "none of its calls has a role that trains (trainer.roles): have agents send x-ratchet-role",
    "rolled_back": "a version that was rejected sampled it: see `ratchet policies show`",
    "abandoned": "the tuner that made it was stopped or killed: a run that goes on makes its rollout anew",
    "doctor": "a call or attempt that `ratchet doctor` made: never training data",
    "member_deleted": "a member of its group was deleted before the group was trained",
    "incomplete": "messages of it were lost with a proxy's journal (alarm proxy_journal_lost or proxy_journal_damaged)",
    "cut_off": "a machine ended its last call, which is not the policy's failure: see the proxy's errors",
}

LEFT_OUT: Mapping[str, str] = {
    "greedy": "sampled at temperature 0, which explores nothing: have agents sample above it, 1.0 is best",
    "odd temperature": "the temperature that was sent is no number",
    "constrained sampling": "a grammar, a schema or a forced tool chose tokens that the policy did not",
    "no ids": "the engine told no token ids: serve the model by vLLM",
    "no prompt token ids": "the engine told no ids of the prompt: a vLLM that knows return_token_ids is needed",
    "ids and logprobs differ in number": "the engine's answer contradicts itself",
    "context unknown": "the call that it continues is not in the store",
    "answer lost": "the client asked again: it never had this answer",
    "answer not taken": "the agent went on with another answer",
    "another role": "a role that is not trained sampled it (trainer.roles)",
    "after the verdict": "it ended after the judge had spoken: raise trainer.seal_after_idle_seconds",
    "does not fit the model": "too long for the base model, or with ids that it does not have",
    "constrained tool calls": "vLLM held the calls of `strict` tools, or the one call of `parallel_tool_calls: false`, "
    "to a grammar (`proxy.tool_strict_level`)",
    "truncated": "cut off at its longest (trainer.mask_truncated_completions): raise the agent's max_tokens",
    "too long": "the row is longer than may be trained: see trainer.learner.max_length",
    "aborted": "the client left before the end",
    "failed": "the call failed",
    "interrupted": "the proxy died in between",
    "begun": "its end has not been seen",
    "no answer": "the engine answered without a choice",
    "unsound row": "ids and masks contradict each other: see the trainer's log",
    "image": "images are recorded and judged, never trained",
    "input_audio": "sound is recorded and judged, never trained",
    "audio_url": "sound is recorded and judged, never trained",
    "video_url": "video is recorded and judged, never trained",
    "file": "files are recorded and judged, never trained",
    "echo": "the answer repeats the prompt",
    "beam search": "beam search does not sample",
    "several prompts": "one call with several prompts",
    "redacted": "something was not written down (proxy.redact)",
    "other model": "another model answered",
}


def left_out(tokens: Mapping[str, int]) -> str:
    """Return the tokens that were left out by reason, the most first, each with what to do."""
    told = [
        f"{count} tokens {reason}" + (f" ({LEFT_OUT[reason]})" if reason in LEFT_OUT else "")
        for reason, count in sorted(tokens.items(), key=lambda item: -item[1])
    ]
    return "left out: " + "; ".join(told) if told else "nothing was left out"
