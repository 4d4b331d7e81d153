"""What bf16 does to logprobs and gradients of a LoRA policy: questions 1 to 3 of `benchmarks.gpu.measure`.

Rows are sampled by the policy itself, so that the KL estimator k3 = exp(d) - 1 - d of their tokens estimates the KL
divergence of a change d. "bf16" is the learner's arithmetic: bf16 weights, fp32 adapters, autocast and its fused LoRA.
Change: logprob with the adapter less logprob without, both in one number format; rho: its correlation about zero with
the change in fp32; slope: its regression on that, the share of the step that arrives.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from ratchet.trainer.learner import lora
from ratchet.trainer.learner.lora_linear import lora_config, use_fused_lora
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.gpu_shapes import build_model, model_in_memory, scale_logits

Row = dict[str, Any]

RANK = 16
FORMATS = {"fp32": (False, True), "bf16": (True, False), "bf16, fp32 head": (True, True)}  # autocast, fp32 head
CHANGES = (1e-7, 1e-6, 2e-5, 1e-4, 3e-4, 1e-3)
RATES = (2e-5, 1e-4, 3e-4)
STEPS = (1, 4, 16)
FEW_STEPS = (1, 2)  # on a CPU
AT_ONCE = 8  # rows of a micro-batch


def load(source: str, device: torch.device) -> Any:
    """Return a model with bf16 weights: that of a folder, or a shape with random weights and real models' logits."""
    if Path(source).is_dir():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()
    return scale_logits(build_model(source, device, dtype=torch.bfloat16)).eval()


@torch.no_grad()
def sampled_rows(model: Any, rows: int, prompt: int, answer: int) -> torch.Tensor:
    """Return rows (N, prompt + answer) that the model continued at temperature 1 from random tokens."""
    vocabulary = model.config.vocab_size
    prompts = torch.randint(3, vocabulary, (rows, prompt), generator=torch.Generator().manual_seed(2)).to(model.device)
    torch.manual_seed(3)
    return model.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=answer, min_new_tokens=answer, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def answer_logprobs(
    model: Any, ids: torch.Tensor, prompt: int, how: str, *, at_once: int = AT_ONCE, padded: int = 0
) -> torch.Tensor:
    """Return the logprobs of the tokens after the prompt, (N, A), in a number format, `padded` tokens to the right."""
    parts = []
    for rows in ids.split(at_once):
        hidden = _hidden(model, torch.nn.functional.pad(rows, (0, padded)), how)[:, prompt - 1 : ids.shape[1] - 1]
        parts.append(_chosen(model, hidden, rows[:, prompt:], how))
    return torch.cat(parts)


def ragged_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], how: str
) -> list[torch.Tensor]:
    """Return the logprobs of each answer after its prompt, in a number format: one tensor (A,) a row."""
    found: list[torch.Tensor] = []
    for start in range(0, len(prompts), AT_ONCE):
        rows = list(zip(prompts[start : start + AT_ONCE], answers[start : start + AT_ONCE], strict=True))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.tensor(
            [[*prompt, *answer, *[0] * (width - len(prompt) - len(answer))] for prompt, answer in rows],
            device=model.device,
        )
        hidden = _hidden(model, ids, how)
        for own, (prompt, answer) in zip(hidden, rows, strict=True):
            before = own[len(prompt) - 1 : len(prompt) + len(answer) - 1]
            found.append(_chosen(model, before, torch.tensor(answer, device=model.device), how))
    return found


def _hidden(model: Any, ids: torch.Tensor, how: str) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=FORMATS[how][0]):
        hidden: torch.Tensor = model.get_decoder()(input_ids=ids).last_hidden_state
    return hidden


def _chosen(model: Any, hidden: torch.Tensor, targets: torch.Tensor, how: str) -> torch.Tensor:
    """Return the logprobs of the targets, in their shape (...), for hidden states (..., H)."""
    head = model.get_output_embeddings().weight
    logits = hidden.float() @ head.float().t() if FORMATS[how][1] else (hidden.to(head.dtype) @ head.t()).float()
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def adapted(model: Any) -> Any:
    """Return the model with a new fp32 adapter on all linear layers; it changes nothing yet."""
    torch.manual_seed(4)
    policy = get_peft_model(model, lora_config(model, LearnerSettings(lora_r=RANK, lora_alpha=2 * RANK)))
    for parameter in lora_parameters(policy).values():
        parameter.data = parameter.data.float()
    return policy


def lora_parameters(policy: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in policy.named_parameters() if "lora_" in name}


def gradient_signs(policy: Any, ids: torch.Tensor, prompt: int, how: str) -> dict[str, torch.Tensor]:
    """Return for each lora_B the sign of the gradient of the rows' mean logprob."""
    matrices = {name: p for name, p in lora_parameters(policy).items() if "lora_B" in name}
    policy.zero_grad()
    for rows in ids.split(AT_ONCE):
        answer_logprobs(policy, rows, prompt, how).sum().backward()
    return {name: p.grad.sign() for name, p in matrices.items() if p.grad is not None}


def set_change(policy: Any, direction: dict[str, torch.Tensor], size: float) -> None:
    """Set every lora_B to `size` times its direction."""
    with torch.no_grad():
        for name, parameter in lora_parameters(policy).items():
            if name in direction:
                parameter.copy_(size * direction[name])


def distance(d: torch.Tensor) -> Row:
    """Return what differences of logprobs amount to, in nats."""
    d = d.double()
    return {
        "tokens": d.numel(),
        "mean": float(d.mean()),
        "rms": float(d.pow(2).mean().sqrt()),
        "k3": float((d.exp() - 1 - d).mean()),
        "largest": float(d.abs().max()),
    }


def agreement(served: torch.Tensor, trained: torch.Tensor) -> Row:
    """Return correlation about zero and slope of one change on another."""
    y, x = served.double().flatten(), trained.double().flatten()
    xx, xy, yy = float(x @ x), float(x @ y), float(y @ y)
    return {"rho": xy / math.sqrt(xx * yy) if xx * yy else 0.0, "slope": xy / xx if xx else 0.0}


def sizes(device: torch.device) -> tuple[int, int, int]:
    """Return the rows, and the tokens of their prompts and answers."""
    return (32, 64, 96) if device.type == "cuda" else (4, 16, 12)


@torch.no_grad()
def noise(source: str, device: torch.device) -> Iterator[Row]:
    """Question 1: what rounding moves, and how much of a change it leaves."""
    model = load(source, device)
    rows, prompt, answer = sizes(device)
    ids = sampled_rows(model, rows, prompt, answer)
    policy = adapted(model)
    with torch.enable_grad():
        right = gradient_signs(policy, ids, prompt, "bf16, fp32 head")
    fused = use_fused_lora(policy)
    exact = adapted(load(source, device).float())
    set_change(policy, right, 0.0)
    true = answer_logprobs(exact, ids, prompt, "fp32")
    base = {how: answer_logprobs(policy, ids, prompt, how) for how in FORMATS if how != "fp32"}
    yield {"model": source, "layers_fused": fused, "entropy": float(-true.mean()), "answer_tokens": true.numel()}
    for how, logprobs in base.items():
        yield {"format": how, "against": "fp32", **distance(logprobs - true)}
        for name, other in (("one row at a time", {"at_once": 1}), ("padded by 37 tokens", {"padded": 37})):
            changed = answer_logprobs(policy, ids, prompt, how, **other)
            yield {"format": how, "against": name, **distance(changed - logprobs)}
    for size in CHANGES:
        set_change(exact, right, size)
        step = answer_logprobs(exact, ids, prompt, "fp32") - true
        yield {"format": "fp32", "change": size, **distance(step)}
        set_change(policy, right, size)
        for how, logprobs in base.items():
            changed = answer_logprobs(policy, ids, prompt, how) - logprobs
            yield {"format": how, "change": size, **distance(changed), **agreement(changed, step)}


def moves(source: str, device: torch.device) -> Iterator[Row]:
    """Question 2: what steps of AdamW towards good answers do to their logprobs, by the learner itself.

    Half of the rows are good. The same adapter is read in the learner's own format and, beside it, in fp32.
    """
    rows, prompt, answer = sizes(device)
    reported = STEPS if device.type == "cuda" else FEW_STEPS
    ids = sampled_rows(load(source, device), rows, prompt, answer)
    good = ids[: rows // 2]
    exact = adapted(load(source, device).float())
    new = {name: parameter.detach().clone() for name, parameter in lora_parameters(exact).items()}
    with torch.no_grad():
        true = answer_logprobs(exact, good, prompt, "fp32")
    for dtype in ("bfloat16", "float32"):
        for rate in RATES:
            weights = load(source, device)
            with model_in_memory(weights.to(getattr(torch, dtype))):
                learner = lora.build("random weights", learner_settings(dtype, rate))
            copy_adapter(new, learner.lora_parameters())
            given = token_rows(ids, prompt, learner)
            before = scores(learner, given[: rows // 2], prompt)
            for step in range(1, max(reported) + 1):
                learner.optimizer_step(learner.prepare(given, only_step=True))
                if step in reported:
                    change = scores(learner, given[: rows // 2], prompt) - before
                    copy_adapter(learner.lora_parameters(), lora_parameters(exact))
                    with torch.no_grad():
                        whole = (answer_logprobs(exact, good, prompt, "fp32") - true).cpu()
                    exactly = {f"{name}_in_fp32": distance(whole)[name] for name in ("mean", "rms")}
                    row = {"model": source, "dtype": dtype, "rate": rate, "steps": step}
                    yield {**row, **distance(change), **exactly, **agreement(change, whole)}
            del learner, weights


def learner_settings(dtype: str, rate: float = 1e-4, **other: Any) -> LearnerSettings:
    """Return settings without corrections for a sampler, which there is not."""
    return LearnerSettings(
        lora_r=RANK, lora_alpha=2 * RANK, learning_rate=rate, sequence_mask_threshold=None,
        vllm_importance_sampling_clip_max=None, dtype=dtype, **other,
    )  # fmt: skip


def token_rows(ids: torch.Tensor, prompt: int, learner: Any) -> list[TokenRow]:
    """Return rows for the learner: the first half has advantage 1, the other -1."""
    lists = ids.tolist()
    return [
        TokenRow(f"t{place}", tuple(row), (0,) * prompt + (1,) * (len(row) - prompt), (-1.0,) * len(row),
                 1.0 if place < len(lists) / 2 else -1.0)
        for place, row in enumerate(lists)
    ]  # fmt: skip


def scores(learner: Any, rows: list[TokenRow], prompt: int) -> torch.Tensor:
    """Return the learner's logprobs of the answers, (N, A)."""
    plain = [TokenRow("", r.ids, (0, *(1,) * (len(r.ids) - 1)), (0.0,) * len(r.ids), 0.0) for r in rows]
    return torch.tensor([logprobs[prompt - 1 :] for logprobs in learner.score(plain)])


def copy_adapter(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Give one policy the adapter of another; both have the same layers."""
    with torch.no_grad():
        for read, written in zip(source.values(), target.values(), strict=True):
            written.copy_(read)


def head(source: str, device: torch.device) -> Iterator[Row]:
    """Question 3: the learner's loss, its LM head and its gradients on one layer, against plain fp32."""
    wide = source if source != "smollm2" else "1.5b"
    length = 1024 if device.type == "cuda" else 24
    for dtype in ("bfloat16", "float32"):
        model = scale_logits(build_model(wide, device, dtype=torch.bfloat16, layers=1))
        exact = adapted(copy.deepcopy(model).float())  # the same weights
        model = model.to(getattr(torch, dtype))
        ids = torch.randint(3, model.config.vocab_size, (4, length), generator=torch.Generator().manual_seed(5))
        prompt = length // 4
        with model_in_memory(model):
            learner = lora.build("random weights", learner_settings(dtype, max_grad_norm=0.0))
        with torch.no_grad():
            for name, parameter in lora_parameters(exact).items():
                if "lora_B" in name:
                    parameter.normal_(std=1e-3, generator=torch.Generator(device).manual_seed(6))
        copy_adapter(lora_parameters(exact), learner.lora_parameters())
        rows = token_rows(ids, prompt, learner)
        logprobs = answer_logprobs(exact, ids.to(device), prompt, "fp32", at_once=2)
        advantages = torch.tensor([row.advantage for row in rows], device=device)[:, None]
        (-(advantages * logprobs).mean()).backward()
        true = torch.cat([p.grad.flatten() for p in lora_parameters(exact).values() if p.grad is not None])
        own = scores(learner, rows, prompt)
        micros = learner.prepare(rows, only_step=True)
        for timed in (False, True):
            learner.optimizer.zero_grad()
            reset_peak(device)
            began = time.perf_counter()
            learner.backward(micros)
            synchronize(device)
            seconds = time.perf_counter() - began
            micros = micros if timed else learner.prepare(rows, only_step=True)
        gradient = torch.cat([p.grad.flatten() for p in learner.lora_parameters().values() if p.grad is not None])
        yield {
            "shape": wide, "dtype": dtype, "logprobs": distance(own - logprobs.detach().cpu()),
            "gradient_error": float((gradient - true).norm() / true.norm()), "seconds": seconds,
            "peak_gib": peak_gib(device),
        }  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    """Return torch's peak memory since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
