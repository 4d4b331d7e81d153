"""How much of a small step vLLM serves, and whether an amplified copy of an adapter proves it.

    python -m benchmarks.gpu.served_change MODEL ADAPTERS URL [URL ...] [--label bf16 ...] [--device cpu]

Rows are sampled by the first server. Adapters are made for them and written to ADAPTERS: a signed gradient step of 2e-5
and of 1e-4 ("right"), a random one of the same size ("other"), and a copy of each whose `lora_alpha` is k times as
large, k such that the trained change is about 0.5 nats. Each server reads the logprobs of all rows under every adapter
(`prompt_logprobs`), and each is compared with what the trainer computes in fp32 and in the learner's bf16. Change:
logprob with the adapter less logprob without, on the same side; rho: correlation about zero; slope: served on trained.
Prints one line of JSON a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoTokenizer

from benchmarks.gpu import precision
from ratchet.trainer.learner.lora_linear import use_fused_lora

STEPS = (2e-5, 1e-4)
TARGET = 0.5  # nats, RMS of an amplified change
ANSWER = 64  # tokens

Served = list[list[float]]


class AnsweredPrompts:
    """Token rows of different prompts, and their logprobs by server and by trainer, flat over all answers."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.prompts = prompts
        self.answers = answers

    def trained(self, policy: Any, how: str) -> torch.Tensor:
        """Return the trainer's logprobs, (K,)."""
        return torch.cat(precision.ragged_logprobs(policy, self.prompts, self.answers, how))

    async def served(self, client: httpx.AsyncClient, url: str, model: str, at_once: int) -> torch.Tensor:
        """Return the server's logprobs, (K,)."""
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: list[int], answer: list[int]) -> list[float]:
            body = {"model": model, "prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 1.0,
                    "prompt_logprobs": 0}  # fmt: skip
            async with gate:
                got = await client.post(f"{url}/v1/completions", json=body)
            if got.status_code != 200:
                raise RuntimeError(f"{model}: {got.status_code} {got.text[:300]}")
            places = got.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
            return [place[str(token)]["logprob"] for place, token in zip(places, answer, strict=True)]

        pairs = zip(self.prompts, self.answers, strict=True)
        rows = await asyncio.gather(*(one(*pair) for pair in pairs))
        return torch.tensor([logprob for row in rows for logprob in row])


def prompts(model: str, count: int) -> list[list[int]]:
    """Return questions through the model's chat template; random tokens for a model with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if len(tokenizer) < 1000:
        ids = torch.randint(3, len(tokenizer), (count, 48), generator=torch.Generator().manual_seed(7))
        return ids.tolist()  # type: ignore[no-any-return]
    texts = (
        "What is {a} plus {b}?",
        "Name a city with a tram line {a}.",
        "Write about the year {a}{b}.",
        "Explain in one sentence what a number such as {a} is good for.",
    )
    turns = [texts[place % 4].format(a=10 + place, b=50 - place // 2) for place in range(count)]
    return [
        list(tokenizer.apply_chat_template([{"role": "user", "content": turn}], add_generation_prompt=True,
                                           return_dict=True)["input_ids"])
        for turn in turns
    ]  # fmt: skip


async def sampled(client: httpx.AsyncClient, url: str, requests: list[list[int]]) -> AnsweredPrompts:
    """Return the prompts with answers of the server's base model at temperature 1."""

    async def one(prompt: list[int]) -> list[int]:
        body = {"model": "base@0", "prompt": prompt, "max_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True,
                "logprobs": 0, "return_token_ids": True}  # fmt: skip
        got = await client.post(f"{url}/v1/completions", json=body)
        got.raise_for_status()
        return list(got.json()["choices"][0]["token_ids"])

    return AnsweredPrompts(requests, list(await asyncio.gather(*(one(prompt) for prompt in requests))))


def directions(policy: Any, rows: AnsweredPrompts) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the adapters' lora_B are multiples of."""
    matrices = {name: p for name, p in precision.lora_parameters(policy).items() if "lora_B" in name}
    policy.zero_grad()
    for start in range(0, len(rows.prompts), precision.AT_ONCE):
        part = slice(start, start + precision.AT_ONCE)
        logprobs = precision.ragged_logprobs(policy, rows.prompts[part], rows.answers[part], "fp32")
        sum((1 - 2 * (place % 2)) * row.sum() for place, row in enumerate(logprobs)).backward()
    dice = torch.Generator(policy.device).manual_seed(8)
    return {
        "right": {name: p.grad.sign() for name, p in matrices.items() if p.grad is not None},
        "other": {
            name: torch.randint(0, 2, p.shape, generator=dice, device=p.device) * 2.0 - 1
            for name, p in matrices.items()
        },
    }


def write(policy: Any, folder: Path, factor: float) -> None:
    """Write the adapter, with `lora_alpha` times `factor`."""
    policy.save_pretrained(folder)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "lora_alpha": content["lora_alpha"] * factor}))


def scaled(policy: Any, factor: float) -> None:
    """Set the scale of a policy's adapter to `factor` times that of its configuration."""
    for module in policy.modules():
        if isinstance(module, BaseTunerLayer) and "default" in getattr(module, "scaling", {}):
            module.scaling["default"] = 2.0 * factor


class Experiment:
    """The adapters of one model, what the trainer computes for them, and the comparison with a server."""

    def __init__(self, model: str, folder: Path, rows: AnsweredPrompts, device: torch.device) -> None:
        self._rows = rows
        self._folder = folder
        self._policies = {
            "fp32": precision.adapted(precision.load(model, device).float()),
            "bf16": precision.adapted(precision.load(model, device)),
        }
        use_fused_lora(self._policies["bf16"])
        self._formats = {"fp32": "fp32", "bf16": "bf16", "bf16, fp32 head": "bf16, fp32 head"}
        self.base: dict[str, torch.Tensor] = {}
        self.changes: dict[str, dict[str, torch.Tensor]] = {}  # by adapter and format

    def prepare(self) -> None:
        """Make and write the adapters."""
        exact = self._policies["fp32"]
        ways = directions(exact, self._rows)
        with torch.no_grad():
            self.base = {how: self._logprobs(how, ways["right"], 0.0, 1.0) for how in self._formats}
            for size in STEPS:
                factor = 1.0
                for way, direction in ways.items():
                    self._add(f"{way} {size:g}", direction, size, 1.0)
                    if way == "right":
                        rms = self.changes[f"{way} {size:g}"]["fp32"].pow(2).mean().sqrt()
                        factor = max(2.0, float(round(TARGET / float(rms))))
                    self._add(f"{way} {size:g}, amplified", direction, size, factor)

    def _add(self, name: str, direction: dict[str, torch.Tensor], size: float, factor: float) -> None:
        self.changes[name] = {
            how: self._logprobs(how, direction, size, factor) - self.base[how] for how in self._formats
        }
        precision.set_change(self._policies["fp32"], direction, size)
        write(self._policies["fp32"], self.path(name), factor)
        report("adapter", name=name, factor=factor, rms_fp32=rms_of(self.changes[name]["fp32"]))

    def path(self, name: str) -> Path:
        """Return the folder of an adapter."""
        return self._folder / name.replace(" ", "-").replace(",", "")

    def _logprobs(self, how: str, direction: dict[str, torch.Tensor], size: float, factor: float) -> torch.Tensor:
        policy = self._policies["fp32" if how == "fp32" else "bf16"]
        precision.set_change(policy, direction, size)
        scaled(policy, factor)
        logprobs = self._rows.trained(policy, how).cpu()
        scaled(policy, 1.0)
        return logprobs

    async def compare(self, client: httpx.AsyncClient, url: str, label: str) -> None:
        """Print what a server makes of the adapters."""
        base = await self._rows.served(client, url, "base@0", 1)
        together = await self._rows.served(client, url, "base@0", 16)
        report("16 at once less one at a time", server=label, **precision.distance(together - base))
        for how, logprobs in self.base.items():
            report("trainer less server, base model", server=label, trainer=how, **precision.distance(logprobs - base))
        for name in self.changes:
            body = {"lora_name": name, "lora_path": str(self.path(name))}
            got = await client.post(f"{url}/v1/load_lora_adapter", json=body)
            if got.status_code != 200:
                raise RuntimeError(f"{name}: {got.status_code} {got.text[:300]}")
            change = await self._rows.served(client, url, name, 16) - together
            await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
            for claim in claims(name, list(self.changes)):
                for how, trained in self.changes[claim].items():
                    if how == "fp32" or claim == name:
                        self._report(label, claim, name, how, trained, change)

    def _report(self, label: str, claim: str, name: str, how: str, trained: torch.Tensor, served: torch.Tensor) -> None:
        found = precision.agreement(served, trained)
        report("change", server=label, claimed=claim, served=name, trainer=how, trained_rms=rms_of(trained),
               served_rms=rms_of(served), **found, z=found["rho"] * math.sqrt(served.numel()))  # fmt: skip


def claims(served: str, names: list[str]) -> list[str]:
    """Return the adapters that a served one is held against: itself, and those that it could be mistaken for."""
    if served.startswith("right 2e-05, amp"):
        return [served, "right 0.0001, amplified"]
    small = served.split(",")[0]
    other = small.replace("other", "right")
    mistaken = [other, f"{other}, amplified"] if "other" in served or "," not in served else []
    return list(dict.fromkeys([served, *(name for name in mistaken if name in names)]))


def rms_of(d: torch.Tensor) -> float:
    return float(d.double().pow(2).mean().sqrt())


def report(what: str, **figures: Any) -> None:
    print(json.dumps({"served_change": what, **figures}), flush=True)


async def run(given: argparse.Namespace) -> None:
    """Sample rows, make adapters, and compare each server."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=100)) as client:
        rows = await sampled(client, given.urls[0], prompts(given.model, given.rows))
        report("rows", rows=len(rows.prompts), tokens=sum(map(len, rows.answers)))
        experiment = Experiment(given.model, given.adapters, rows, torch.device(given.device))
        experiment.prepare()
        for place, url in enumerate(given.urls):
            await experiment.compare(client, url, given.label[place] if place < len(given.label) else url)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("adapters", type=Path)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--label", nargs="*", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
