"""The forward pass: rows packed with shared prefixes into micro-batches, and their logprobs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.gpu_memory import ActivationMemory
from ratchet.trainer.learner.lm_head import HeadFunction, token_logprobs
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.settings.objectives import Objective

# Shared prefixes: packs rows with a common prefix into one sequence that contains the prefix once. Pure.
#
# The members of a group share their root prompt; the rows of a forked trajectory share everything before the fork. In
# the tree layout each token attends to the earlier tokens of its own rows only, at its position in the row, so hidden
# states and gradients equal those of separate rows. Attention over one long sequence costs more than over several short
# ones, so rows are packed only if the saved tokens cost more than that. A tree has at most MAX_TREE_TOKENS: its mask
# has the square of them.

Ids = Sequence[int]

MAX_TREE_TOKENS = 8192  # whose mask has 128 MiB in bf16


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows laid out as one sequence.

    ids        of the sequence, (L,)
    positions  of its tokens in their rows, (L,)
    until      (L,); the tokens after a token and before its `until` belong to rows that contain it, and attend to it
    paths      for each row the places of its tokens in the sequence, in order
    """

    ids: list[int]
    positions: list[int]
    until: list[int]
    paths: list[list[int]]


def prefix_tree(rows: Sequence[Ids]) -> PrefixTree:
    """Lay out rows; neighbors share their common prefix (`pack_rows` sorts them)."""
    layout = PrefixTree([], [], [], [])
    previous: Ids = ()
    path: list[int] = []  # places of the previous row's tokens
    for row in rows:
        shared = common_length(previous, row)
        for place in path[shared:]:
            layout.until[place] = len(layout.ids)
        path = path[:shared] + list(range(len(layout.ids), len(layout.ids) + len(row) - shared))
        layout.ids.extend(row[shared:])
        layout.positions.extend(range(shared, len(row)))
        layout.until.extend([0] * (len(row) - shared))
        layout.paths.append(path)
        previous = row
    for place in path:
        layout.until[place] = len(layout.ids)
    return layout


def pack_rows(rows: Sequence[Ids], *, max_length: int, pairs_per_token: float) -> list[list[int]]:
    """Return row indices by sequence; a sequence of several rows has at most `max_length` and MAX_TREE_TOKENS tokens.

    `pairs_per_token` is the number of token pairs whose attention costs as much as one token in all other layers. A
    single row is causal, which is half of all pairs; a tree needs its full mask.
    """
    packs: list[list[int]] = []
    previous: Ids = ()
    length, cost = 0, 0.0  # of the last sequence
    most = min(max_length, MAX_TREE_TOKENS)
    for index in sorted(range(len(rows)), key=lambda place: tuple(rows[place])):
        row = rows[index]
        own_cost = len(row) * (pairs_per_token + len(row) / 2)
        joint_length = length + len(row) - common_length(previous, row)
        joint_cost = joint_length * (pairs_per_token + joint_length)
        if packs and joint_length <= most and joint_cost < cost + own_cost:
            packs[-1].append(index)
            length, cost = joint_length, joint_cost
        else:
            packs.append([index])
            length, cost = len(row), own_cost
        previous = row
    return packs


def common_length(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix of two rows."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisection: comparing slices is much faster than comparing tokens
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Micro-batches: token rows as the tensors that the loss reads.
#
# One micro-batch holds N rows, right-padded to T + 1 tokens, under TRL's names: the "completion" is the whole row after
# its first token. Later it gets the weight of each token in the loss of the step: 0 for context, and for a trained
# token the weight that the objective's mean gives it, so that all terms of the loss (policy, KL, entropy) have the same
# mean. The micro-batch also holds the model's input and the positions in its output that predict the K trained tokens.

Micro = dict[str, torch.Tensor]

# GPU attention kernels copy masks whose rows are not aligned to this.
_ALIGNED = 8


def collate(
    packs: Sequence[Sequence[TokenRow]], pad_id: int, device: torch.device, *, padding_free: bool = False
) -> Micro:
    """Return a micro-batch of N rows in M packs.

    With `padding_free` packs of one row each are forwarded as one sequence, for attention that takes their ends.
    """
    rows = [row for pack in packs for row in pack]
    width = max(len(row.ids) for row in rows) - 1
    trained = _padded([row.mask[1:] for row in rows], width, 0)  # (N, T)
    micro = {
        "prompt_ids": torch.tensor([row.ids[:1] for row in rows]),  # (N, 1)
        "completion_ids": _padded([row.ids[1:] for row in rows], width, pad_id),  # (N, T)
        "completion_mask": _padded([(1,) * (len(row.ids) - 1) for row in rows], width, 0),  # (N, T)
        "trained": trained.bool(),  # (N, T)
        "sampling_per_token_logps": _padded([row.logprobs[1:] for row in rows], width, 0.0) * trained,  # (N, T)
        "advantages": _padded([_advantages(row) for row in rows], width, 0.0),  # (N, T)
        "importance": torch.tensor([[row.importance] for row in rows]),  # (N, 1)
        "age": torch.tensor([[math.inf if row.age is None else float(row.age)] for row in rows]),  # (N, 1)
    }
    trees = [prefix_tree([row.ids for row in pack]) for pack in packs]
    if padding_free and all(len(tree.paths) == 1 for tree in trees):
        micro |= _end_to_end(trees)
        starts = micro["cu_seq_lens"].tolist()[:-1]
    else:
        micro |= _forwarded(trees, pad_id)
        size = micro["forwarded_ids"].shape[1]
        starts = range(0, len(trees) * size, size)
    micro |= _trained_positions(micro, trees, starts, rows)
    return {name: tensor.to(device) for name, tensor in micro.items()}


def _forwarded(trees: Sequence[PrefixTree], pad_id: int) -> Micro:
    """Return the model's input, (M, L) each: one row per pack, or trees with the data of their attention masks."""
    max_length = max(len(tree.ids) for tree in trees)
    if all(len(tree.paths) == 1 for tree in trees):
        attended = _padded([(1,) * len(tree.ids) for tree in trees], max_length, 0)
        return {"forwarded_ids": _padded([tree.ids for tree in trees], max_length, pad_id), "attended": attended}
    width = -(-max_length // _ALIGNED) * _ALIGNED
    itself = range(1, width + 1)  # padding attends to itself only
    return {
        "forwarded_ids": _padded([tree.ids for tree in trees], width, pad_id),
        "positions": _padded([tree.positions for tree in trees], width, 0),
        "until": torch.tensor([[*tree.until, *itself[len(tree.ids) :]] for tree in trees]),
    }


def _end_to_end(trees: Sequence[PrefixTree]) -> Micro:
    """Return rows end to end as the model's input: ids and positions (1, L), and where they begin and end, (M + 1,)."""
    lengths = [len(tree.ids) for tree in trees]
    return {
        "forwarded_ids": torch.tensor([[token for tree in trees for token in tree.ids]]),
        "positions": torch.tensor([[place for length in lengths for place in range(length)]]),
        "cu_seq_lens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_length": torch.tensor(max(lengths)),
    }


def _trained_positions(
    micro: Micro, trees: Sequence[PrefixTree], starts: Sequence[int], rows: Sequence[TokenRow]
) -> Micro:
    """Return for the K trained tokens, (K,) each: predicting place in the forwarded tokens, id, sampling temperature.

    With `truncation` (K, 3) if there is any. `starts` are the places of the packs' first tokens.
    """
    trained = micro["trained"]  # (N, T)
    before = [
        [start + place for place in path[:-1]] for start, tree in zip(starts, trees, strict=True) for path in tree.paths
    ]
    of_row = trained.nonzero(as_tuple=True)[0]  # (K,)
    found = {
        "predicting": _padded(before, trained.shape[1], 0)[trained],
        "targets": micro["completion_ids"][trained],
        "temperatures": torch.tensor([row.temperature for row in rows])[of_row],
    }
    if any(row.truncation for row in rows):
        found["truncation"] = torch.tensor([row.truncation or (0, 1.0, 0.0) for row in rows])[of_row]
    return found


def split(
    rows: Sequence[TokenRow], token_budget: int, *, pairs_per_token: float | None = None, rank: int = 0, ranks: int = 1
) -> list[list[list[TokenRow]]]:
    """Return the packs of this rank's micro-batches. Every rank has the same number; some may be empty.

    A pack is one row or, with `pairs_per_token` (trainer/learner/forward_pass.py), several with a common prefix. A
    rank replaces an empty micro-batch with `empty_micro_batch`, because the others wait for its part of the gradient.
    """
    batches = [
        [[rows[index] for index in pack] for pack in batch] for batch in batched(rows, token_budget, pairs_per_token)
    ]
    return [
        batches[place] if place < len(batches) else []
        for place in range(rank, -(-len(batches) // ranks) * ranks, ranks)
    ]


def batched(rows: Sequence[TokenRow], token_budget: int, pairs_per_token: float | None) -> list[list[list[int]]]:
    """Return row indices by pack and micro-batch; packs of one row and of several are in different micro-batches."""
    ids = [row.ids for row in rows]
    packs = (
        [[index] for index in range(len(ids))]
        if pairs_per_token is None
        else pack_rows(ids, max_length=token_budget, pairs_per_token=pairs_per_token)
    )
    batches: list[list[list[int]]] = []
    for kind in ([pack for pack in packs if len(pack) == 1], [pack for pack in packs if len(pack) > 1]):
        lengths = [len(prefix_tree([ids[index] for index in pack]).ids) for pack in kind]
        batches += [[kind[place] for place in batch] for batch in split_by_budget(lengths, token_budget)]
    return batches


def empty_micro_batch(row: TokenRow, pad_id: int, device: torch.device) -> Micro:
    """Return a micro-batch of one row without trained tokens, for a rank without rows of its own."""
    micro = collate([[row]], pad_id, device)
    nothing = {
        name: micro[name][:0] for name in ("predicting", "targets", "temperatures", "truncation") if name in micro
    }
    return micro | nothing | {name: torch.zeros_like(micro[name]) for name in ("trained", "advantages")}


def token_weights(
    micro: Micro, objective: Objective, length: int, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token in the loss, (N, T), and the number of units that the mean divides by, ()."""
    trained = micro["trained"] & kept  # (N, T)
    if objective.mean == "tokens":
        return trained.float(), trained.sum()
    if objective.mean == "trajectories":  # of one whose rows are rejected in part, the rest counts by its tokens
        weights = trained / micro["trajectory_tokens"]
        return weights, weights.sum()
    n_row = trained.sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    divisor: Any = n_row if objective.mean == "rows" else length
    return trained / divisor, trained.any(-1).sum()


def _padded(rows: Sequence[Sequence[Any]], width: int, fill: float) -> torch.Tensor:
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32 if isinstance(fill, float) else torch.long)


def _advantages(row: TokenRow) -> Sequence[float]:
    return row.advantages[1:] if row.advantages is not None else (row.advantage,) * (len(row.ids) - 1)


# The forward pass over a micro-batch: logprobs and entropies of its trained tokens.
#
# The LM head (lm_head.py) gets only the positions that predict a trained token: prompts and tool results need no
# logits.


@dataclass(frozen=True, slots=True)
class Scored:
    """Values of the trained tokens, 0 elsewhere, (N, T) each in fp32; and the router's loss if requested."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor | None


class ForwardPass:
    """Runs a causal language model without its logits; `base` is that model without wrappers, its head is frozen.

    `base.forward` is replaced, because the wrappers of PEFT and FSDP call it inside of what they prepare; other calls
    of the model are unchanged. Raises ValueError if the adapter trains the head.
    """

    def __init__(self, base: Any, memory: ActivationMemory) -> None:
        self._micro: Micro | None = None
        self._base = base
        self._dtype: torch.dtype = base.get_input_embeddings().weight.dtype
        self._config = base.config
        self._implementation: str = base.config._attn_implementation
        self._memory = memory
        self._head_function = HeadFunction.of(base.config.get_text_config())
        if any(parameter.requires_grad for parameter in base.get_output_embeddings().parameters()):
            raise ValueError("it includes the LM head, which gets no adapter")
        plain = base.forward

        @functools.wraps(type(base).forward)  # transformers reads the signature when it generates
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if self._micro is None else self._score(self._micro, *args, **kwargs)

        base.forward = MethodType(forward, base)

    @property
    def padding_free(self) -> bool:
        """Whether attention takes rows of different lengths as one sequence without a mask."""
        return self._implementation.startswith("flash_attention")

    def __call__(self, model: Any, micro: Micro, *, router: bool = False) -> Scored:
        """Score a micro-batch with `model`, which wraps the base model or is it; `router`: with the router's loss."""
        self._micro = micro
        # Trees need a mask, which only SDPA accepts. The backward pass recomputes with what is set here.
        self._config._attn_implementation = "sdpa" if "until" in micro else self._implementation
        more = {"output_router_logits": True} if router else {}
        try:
            with self._memory.forward_pass(micro["forwarded_ids"].numel()):
                scored: Scored = model(
                    input_ids=micro["forwarded_ids"], **self._attention(micro, padding_counts=router), **more
                )
        finally:
            self._micro = None
        return scored

    def _score(self, micro: Micro, *args: Any, labels: None = None, **kwargs: Any) -> Scored:
        """Return what the base model computes for the micro-batch, in place of its `forward`."""
        output = self._base.base_model(*args, **(kwargs | {"use_cache": False}))
        hidden = output.last_hidden_state.flatten(0, 1)[micro["predicting"]]  # (K, H)
        logprobs, entropies = token_logprobs(
            hidden,
            self._base.get_output_embeddings(),
            micro["targets"],
            micro["temperatures"],
            self._head_function,
            micro.get("truncation"),
        )
        trained = micro["trained"]  # (N, T)
        logprobs, entropies = (
            each.new_zeros(trained.shape).masked_scatter(trained, each) for each in (logprobs, entropies)
        )
        balance = self._router_loss(output, kwargs) if kwargs.get("output_router_logits") else None
        return Scored(logprobs, entropies, balance)

    def _router_loss(self, output: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss that balances the router, (): Fedus et al. 2021, "Switch transformers", equations 4 to 6."""
        experts, chosen = (
            getattr(self._base, name, None) or getattr(self._config.get_text_config(), name)
            for name in ("num_experts", "num_experts_per_tok")
        )
        loss: torch.Tensor = load_balancing_loss_func(
            output.router_logits, experts, chosen, kwargs.get("attention_mask")
        )
        return loss

    def _attention(self, micro: Micro, *, padding_counts: bool) -> dict[str, Any]:
        """Return what attention needs: the ends of rows, a padding mask, or (M, 1, L, L) along the branches of trees.

        Padding is to the right and attention is causal, so a trained token never sees it: without a mask the result is
        the same, and attention uses its fastest kernel. The router's loss counts padding unless it gets the mask.
        """
        if "cu_seq_lens" in micro:
            ends, max_length = micro["cu_seq_lens"], int(micro["max_length"])
            return {
                "position_ids": micro["positions"],
                "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max_length, "max_length_k": max_length,
            }  # fmt: skip
        if "until" not in micro:
            return {"attention_mask": micro["attended"]} if padding_counts else {}
        until = micro["until"]  # (M, L)
        place = torch.arange(until.shape[1], device=until.device)
        visible = (place <= place[:, None]) & (place[:, None] < until[:, None, :])  # (M, L, L)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=until.device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        return {"attention_mask": mask[:, None], "position_ids": micro["positions"]}


def choose_attention(model: Any, setting: str) -> None:
    """Set the attention of a loaded model. Raises SettingError if it cannot run here or does not fit the model.

    auto: FlashAttention where it is installed, the model supports it and there is a GPU; else what the model was loaded
    with, which is SDPA wherever the model supports it.
    """
    flash = (is_flash_attn_3_available, "flash_attention_3"), (is_flash_attn_2_available, "flash_attention_2")
    usable = [name for installed, name in flash if torch.cuda.is_available() and installed()]
    if setting == "auto":
        if not usable or not model._supports_flash_attn:
            return
        chosen = usable[0]
    elif setting.startswith("flash_attention") and setting not in usable:
        raise SettingError(
            f"learner setting attn_implementation is {setting!r}, which needs a GPU and the package flash-attn: "
            "install it, or set attn_implementation to auto or sdpa"
        )
    else:
        chosen = setting
    try:
        model.set_attn_implementation(chosen)
    except ValueError as error:
        raise SettingError(
            f"learner setting attn_implementation is {setting!r}, which does not fit the base model: {error} "
            "Set it to auto"
        ) from error


# Model types that accept any attention mask and explicit positions; tests/trainer/test_turns.py checks them.
SHARING_MODEL_TYPES = ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")


def attention_pairs_per_token(base: Any) -> float | None:
    """Return the `pairs_per_token` of trainer/learner/forward_pass.py; None if rows cannot share a sequence.

    They cannot if attention is windowed or its implementation accepts no custom mask.
    """
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if config.model_type not in SHARING_MODEL_TYPES or kinds != {"full_attention"} or windowed:
        return None
    if config._attn_implementation != "sdpa" and not config._attn_implementation.startswith("flash_attention"):
        return None
    head = base.get_output_embeddings()
    linear = sum(
        module.in_features * module.out_features
        for module in base.modules()
        if module is not head and isinstance(module, torch.nn.Linear)
    )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = 2 * config.num_hidden_layers * config.num_attention_heads * dim
    return float(linear / pairs)
