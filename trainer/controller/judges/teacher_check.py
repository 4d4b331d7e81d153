"""Checks that a model can be a teacher: its tokens are the policy's, and it returns the logprobs of given token ids.

The recorded token ids are sent as they are, so every id must mean the same text to both models. Both servers tokenize
the same texts and return the text of the same ids, up to the largest that any tokenizer has; a larger embedding with
unused rows does not matter.
"""

from __future__ import annotations

from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import AdapterRefused, JudgeError, PromptLogprobsMissing

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
