"""One batch of requests for the base model and for adapters: each is answered by what it asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.settings.project_settings import Settings
from ratchet.supervisor.vllm_command import served_name
from tests.harness.cli.project import ROOT
from tests.harness.vllm.engine import vllm

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
BASE = served_name(Settings.of({}))
SLOTS = 2
TEXT = "Where is the picnic?"


def make_adapter(folder: Path, seed: int, *, changes: bool = True) -> Path:
    """An adapter with random weights that changes what is said, or one that changes nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=not changes)
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def logprobs(url: str, model: str) -> list[float]:
    """The logprobs of a greedy answer."""
    ask: dict[str, Any] = {"model": model, "prompt": TEXT, "max_tokens": 48, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json={**ask, "logprobs": 1, "ignore_eos": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    return [float(value) for value in answer.json()["choices"][0]["logprobs"]["token_logprobs"]]


def load_adapter(url: str, name: str, folder: Path) -> None:
    """Load an adapter under a name."""
    loaded = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)}, timeout=60)
    assert loaded.status_code == 200, loaded.text


def prompt_logprobs(url: str, model: str, route: str) -> list[float]:
    """The logprobs of a prompt's own tokens, as a route gives them."""
    ids = list(range(5, 205))
    path, ask = {
        "completions": ("/v1/completions", {"prompt": ids, "prompt_logprobs": 0}),
        "echo": ("/v1/completions", {"prompt": ids, "echo": True, "logprobs": 1}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 20}], "prompt_logprobs": 0}),
    }[route]
    answer = httpx.post(f"{url}{path}", json={"model": model, "max_tokens": 1, **ask}, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if route == "echo":
        return [float(value) for value in choice["logprobs"]["token_logprobs"][1 : len(ids)]]
    places = (choice if route == "completions" else answer.json())["prompt_logprobs"]
    return [float(next(iter(place.values()))["logprob"]) for place in places[1:]]


@pytest.mark.e2e
def test_prompt_logprobs_of_base_model_and_adapters_beside_other_calls_end_no_engine(tmp_path: Path) -> None:
    models = [BASE, *(f"adapter-{number}" for number in range(SLOTS))]
    arguments = ("--max-loras", str(SLOTS), "--dtype", "float32", "--no-enable-prefix-caching")
    with vllm(POLICY, tmp_path / "vllm.log", *arguments, max_model_len=1024) as url:
        for seed, name in enumerate(models[1:]):
            load_adapter(url, name, make_adapter(tmp_path / name, seed))
        kinds = [(model, route) for model in models for route in ("completions", "echo", "chat")]
        alone = {kind: prompt_logprobs(url, *kind) for kind in kinds}
        with ThreadPoolExecutor(24) as pool:
            others = [pool.submit(logprobs, url, model) for model in models * 3]
            beside = [(kind, pool.submit(prompt_logprobs, url, *kind)) for kind in kinds * 2]
            for kind, got in beside:
                assert got.result() == pytest.approx(alone[kind], abs=1e-3), kind
            for other in others:
                other.result()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    for model in models:
        assert alone[model, "echo"] == pytest.approx(alone[model, "completions"], abs=1e-3)
    assert alone[models[1], "chat"] != pytest.approx(alone[BASE, "chat"], abs=0.1)
    assert alone[models[1], "chat"] != pytest.approx(alone[models[2], "chat"], abs=0.1)


@pytest.mark.e2e
def test_beside_adapters_the_base_model_answers_as_it_does_alone(tmp_path: Path) -> None:
    names = [f"adapter-{number}" for number in range(SLOTS)]
    folders = {name: make_adapter(tmp_path / name, seed) for seed, name in enumerate(names)}
    with vllm(POLICY, tmp_path / "vllm.log", "--max-loras", str(SLOTS), "--dtype", "float32", max_model_len=512) as url:
        alone = logprobs(url, BASE)
        for name, folder in folders.items():
            load_adapter(url, name, folder)
        adapted = {name: logprobs(url, name) for name in names}  # every slot has been used
        with ThreadPoolExecutor(9) as pool:
            models = [BASE, *names] * 3
            together = list(pool.map(lambda model: logprobs(url, model), models))
    for model, got in zip(models, together, strict=True):
        assert got == pytest.approx(alone if model == BASE else adapted[model], abs=1e-3), model
    assert adapted[names[-1]] != pytest.approx(alone, abs=0.1)
