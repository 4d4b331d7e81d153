"""A policy that was damaged learns from the model that it was, served by a second vLLM: no judge, single samples."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.settings.project_settings import Settings
from ratchet.store.records import Round
from ratchet.store.states import RoundState
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.vllm_api import VllmServer
from tests.harness.cli.project import ROOT, Project, wait_for
from tests.harness.vllm.engine import VllmServerProcess

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
TEACHER = "big@0"  # its name on its server
WORDS = ("picnic", "invoice", "meeting", "flight", "subject", "friday", "budget", "report", "garden", "train", "music")
TRAINER = {
    "judge": {"kind": "teacher", "model": "teacher"}, "num_generations": 8, "groups_per_round": 8,
    "seal_after_idle_seconds": 0.3, "round_wait_seconds": 2, "poll_interval_seconds": 0.1,
    "mask_truncated_completions": False, "release": {"policy": "immediate"},
}  # fmt: skip
LEARNER = {"loss_type": "distillation", "lora_r": 8, "lora_alpha": 16, "learning_rate": 5e-3, "threads": 1}
SAMPLES = 64  # single samples in a round
ROUNDS = 3
HELD_OUT = 48  # prompts


def damage(folder: Path) -> None:
    """Save the policy with noise on its layers' weights, of 0.6 times their standard deviation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ".layers." in name:
                weight.add_(0.6 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(folder)


@contextmanager
def teacher(log: Path) -> Iterator[str]:
    """Serve the policy as it is by a plain vLLM; starts without waiting."""
    settings = {"base_model": str(POLICY), "model": "big", "vllm": {"max_model_len": 1024, "dtype": "float32"}}
    server = VllmServerProcess(Settings.of(settings), log, adapters=False)
    try:
        yield server.url
    finally:
        server.kill()


def question(number: int) -> list[dict[str, str]]:
    words = random.Random(number).sample(WORDS, 3)
    return [{"role": "user", "content": f"Find the mail about {' '.join(words)}?"}]


def answer(url: str, model: str, number: int) -> Any:
    """One answer of at most 32 tokens at temperature 1, with its token ids and logprobs."""
    body = {"model": model, "messages": question(number), "max_tokens": 32, "temperature": 1.0,
            "logprobs": True, "return_token_ids": True}  # fmt: skip
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def reverse_kl(vllm: str, model: str, teacher_url: str, prompts: Sequence[int]) -> list[float]:
    """The mean of log p - log p_teacher over the tokens of an answer to each prompt."""
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: answer(vllm, model, number), prompts))
    found = []
    with closing(VllmServer(teacher_url)) as server:
        for one in answers:
            choice = one["choices"][0]
            ids = [*one["prompt_token_ids"], *choice["token_ids"]]
            (taught,) = server.prompt_logprobs(TEACHER, [ids])
            own = [token["logprob"] for token in choice["logprobs"]["content"]]
            found.append(statistics.fmean(p - t for p, t in zip(own, taught[-len(own) :], strict=True)))
    return found


@pytest.mark.e2e
def test_a_damaged_policy_comes_nearer_to_its_teacher_on_prompts_that_it_never_saw(tmp_path: Path) -> None:
    damage(tmp_path / "student")
    project = Project(tmp_path)
    with teacher(tmp_path / "teacher.log") as url:
        listed = {"model_name": "teacher", "litellm_params": {"model": f"hosted_vllm/{TEACHER}", "api_base": url}}
        vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32"}
        project.write(
            base_model=str(tmp_path / "student"), vllm=vllm, model="mail", model_list=[listed], trainer=TRAINER,
            learner=LEARNER,
        )  # fmt: skip
        try:
            rounds = train(project)
            before, after = (
                reverse_kl(f"http://127.0.0.1:{vllm['port']}", name, url, range(10**6, 10**6 + HELD_OUT))
                for name in ("mail@0", f"mail@{rounds[0].to_version}")
            )
        except Exception:
            for log in sorted((project.state / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
            raise
        finally:
            project.stop()
    gains = [first - second for first, second in zip(before, after, strict=True)]
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    print(
        f"held-out reverse KL {statistics.fmean(before):.3f} -> {statistics.fmean(after):.3f} nats per token, gain "
        f"{mean:.3f} +- {1.96 * error:.3f}; rewards {[round(one.metrics['reward'], 3) for one in reversed(rounds)]}"
    )
    assert mean - 1.96 * error > 0
    assert rounds[-1].metrics["logprob_abs_diff_mean"] < 0.01  # later rounds have rows of older versions


def train(project: Project) -> list[Round]:
    """Start the project, make calls of single samples until `ROUNDS` versions are live; return the rounds, newest
    first.
    """
    up = project.run("up", "--detach", seconds=240)
    assert up.returncode == 0, up.stdout
    proxy = f"http://127.0.0.1:{project.content['proxy']['port']}"
    with open_store(str(project.state / "store.db")) as store, ThreadPoolExecutor(16) as threads:
        for number in range(ROUNDS):
            list(threads.map(lambda one: answer(proxy, "mail", one), range(SAMPLES * number, SAMPLES * (number + 1))))
            wait_for(f"version {number + 1} is live", partial(_is_live, store, number + 1), seconds=120)
        return [one for one in store.rounds.page("mail", 20) if one.state is RoundState.COMMITTED]


def _is_live(store: Store, version: int) -> bool:
    return store.policies.live()["mail"].version >= version
