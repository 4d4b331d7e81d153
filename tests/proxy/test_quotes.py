"""Answers quoted in a prompt: the index finds what a linear search finds, at a bounded cost."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ratchet.proxy.coordinator.linking import anchor_index, quote_match
from ratchet.proxy.coordinator.linking.anchor_index import AnchorIndex
from ratchet.proxy.coordinator.linking.fuzzy_match import choose_leaf, shared_trajectories
from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.quote_index import LeavesByName, WorkLimit, WorkLimitExceeded
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import (
    ANCHOR_LENGTH,
    MIN_QUOTE_LENGTH,
    TextFingerprints,
    quote_of,
    short_key,
)
from ratchet.store.content import messages as canon
from tests.proxy.test_linking import USER, Message, answered, evidence

PIECES = [
    "I have read the messages of March", " and then some more", "\nfinal: ", '{"answer": "', "é", "x" * 40, "\\n",
    "The budget of the spring meeting is 4,300", "`code`", "(see below) ", "> ", '"', "  \n  ", "\u2003", ": ",
    "y" * 300, "z" * 2000, "C:\\temp", "[1, 2]", "\t",
]  # fmt: skip


def words_of(rng: random.Random) -> str:
    """Return a quotable text; many start alike."""
    while True:
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 7))).strip()
        if len(text) >= MIN_QUOTE_LENGTH:
            return text


def leaf_of(number: int, quotes: Sequence[tuple[str, bool]], rng: random.Random) -> Leaf:
    """Return an answer with these quotes: (text, whether it is an argument); only the first may be none."""
    reply = {"role": "assistant", "content": quotes[0][0]}
    return Leaf.of(
        trajectory_id=f"traj_{number % 5}", call_id=f"call_{number}", choice=0, version=0,
        link_key=short_key(canon.link_key(canon.ROOT, reply) if rng.random() < 0.5 else ""),
        tool_call_ids=(), key_id="k", sequence=b"", created_at=float(number),
        is_extended=rng.random() < 0.3,
        fingerprints=TextFingerprints(
            content=quote_of(quotes[0][0]), arguments=tuple(quote_of(words) for words, _ in quotes[1:])
        ),
    )  # fmt: skip


def may_start(text: str, at: int) -> bool:
    """Whether a quote may start at this position."""
    blank = text[:at][len(text[:at].rstrip()) :]
    before = text[: at - len(blank)]
    ends = before.endswith(('"', ">", "`", "(", "[")) or (before.endswith(":") and blank.startswith(" "))
    return at == 0 or (not text[at].isspace() and ("\n" in blank or ends))


def is_quoted_at(words: str, text: str, at: int) -> bool:
    """Whether the text contains these words at this position, plain or as a JSON string."""
    if text.startswith(words, at):
        return True
    if text[at - 1 : at] != '"' or text[at : at + ANCHOR_LENGTH] != words[:ANCHOR_LENGTH]:
        return False
    try:
        within, _ = json.JSONDecoder(strict=False).raw_decode(text, at - 1)
    except json.JSONDecodeError:
        return False
    return str(within).strip().startswith(words)


Known = Sequence[tuple[Leaf, Sequence[tuple[str, bool]]]]


def linear_search(known: Known, messages: Sequence[Message], keys: Sequence[str]) -> tuple[Leaf | None, bool]:
    """Return the expected result by searching for all words at all positions."""
    groups: dict[str, list[Leaf]] = {}
    last = ""
    for place, message in enumerate(messages):
        text = str(message["content"]).strip()
        for at in (at for at in range(len(text) - ANCHOR_LENGTH + 1) if may_start(text, at)):
            for leaf, quotes in known:
                for words, pending in quotes:
                    if not is_quoted_at(words, text, at) or (pending and leaf.is_extended):
                        continue
                    path = canon.link_key(keys[place - 1] if place else "", {"role": "assistant", "content": words})
                    if message["role"] != "assistant" or at or short_key(path) == leaf.link_key:
                        groups.setdefault(words, []).append(leaf)
                        last = message["role"]
    runs = shared_trajectories(groups.values())
    found = choose_leaf(leaf for leaf in list(groups.values())[-1] if leaf.trajectory_id in runs) if runs else None
    return found, last == "assistant"


def prompt_of(rng: random.Random, all_words: Sequence[str]) -> list[Message]:
    """Return a prompt that quotes some of the words in various ways, among other text."""
    ways: list[Callable[[str], str]] = [
        str, json.dumps, lambda words: f"Summary: {words}</x>", lambda words: words[: len(words) // 2],
        lambda words: f"\n   {words}\n", lambda words: f"said {words}", lambda words: json.dumps({"a": words + " and"}),
    ]  # fmt: skip
    messages = []
    for role in rng.choices(["user", "assistant", "tool"], k=rng.randrange(1, 4)):
        parts = [rng.choice(ways)(rng.choice(all_words)) for _ in range(rng.randrange(3))]
        filler = "".join(rng.choices(PIECES[:17], k=rng.randrange(30)))
        messages.append(
            {"role": role, "content": "".join([*parts, filler] if rng.random() < 0.5 else [filler, *parts])}
        )
    return [message for message in messages if len(str(message["content"]).strip()) >= MIN_QUOTE_LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_index_finds_what_a_plain_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, found = random.Random(seed), 0
    for trial in range(40):
        quotes = [[(words_of(rng), bool(place)) for place in range(rng.randrange(1, 4))] for _ in range(12)]
        known = [(leaf_of(number, words, rng), words) for number, words in enumerate(quotes)]
        leaves = LeafIndex()
        for one, _ in known:
            leaves.add(one)
        monkeypatch.setattr(anchor_index, "_SHORT", 6_000 if trial % 2 else 0)
        for one, _ in known[:4]:
            leaves.remove(one)
        known = known[4:]
        messages = prompt_of(rng, [words for one in quotes for words, _ in one])
        keys = canon.link_keys(messages)
        leaf, by_assistant, _ = quote_match.find_quoted_leaf(leaves, messages, keys, lambda leaf: True)
        wanted = linear_search(known, messages, keys)
        assert (leaf, by_assistant if leaf else False) == (wanted[0], wanted[1] if wanted[0] else False)
        found += leaf is not None
    assert found > 5


def test_beginnings_that_come_and_go_are_found_as_long_as_they_are_known() -> None:
    rng, known, longer = random.Random(2), dict[str, None](), dict[str | int, None]()
    index = AnchorIndex(known, longer)
    for _ in range(60):
        for _ in range(rng.randrange(200)):
            anchor = f"{rng.getrandbits(90):027x}"[:ANCHOR_LENGTH]
            index.add(anchor)
            (known if rng.random() < 0.5 else longer)[anchor] = None
        names = [*known, *map(str, longer)]
        for name in rng.sample(names, rng.randrange(len(names) + 1)):
            known.pop(name, None)
            longer.pop(name, None)
        names = [*known, *map(str, longer)]
        here = rng.sample(names, min(len(names), 40))
        texts = ["\n".join(here[:20]), "\u00e9 \U0001f600: " + " (".join(here[20:]), "- " * 4_000]
        found = [texts[number][at : at + ANCHOR_LENGTH] for number, at in index.find(texts)]
        assert found == here


def test_beginnings_that_nobody_searches_take_bounded_memory() -> None:
    known = dict[str, None]()
    index = AnchorIndex(known, {})
    for number in range(50_000):
        index.add(f"{number:024d}")
        known.clear()
        known[f"{number:024d}"] = None
    assert len(index._unhashed) < 2_000
    assert len(index._table) < 250_000


def test_removed_leaves_leave_nothing_in_the_index() -> None:
    rng, leaves = random.Random(1), LeafIndex()
    held = [leaf_of(number, [(words_of(rng), False), (words_of(rng), True)], rng) for number in range(50)]
    for leaf in held:
        leaves.add(leaf)
    assert len(leaves.quotes._by_anchor) + len(leaves.quotes._by_prefix) > 10
    for leaf in held:
        leaves.remove(leaf)
    index = leaves.quotes
    assert (len(leaves), index._by_anchor, index._by_prefix, index._longer) == (0, {}, {}, {})


def steps_of(action: Callable[[], object]) -> int:
    """Return how many Python lines and calls an action takes: a cost that does not depend on the machine's load."""
    count = 0

    def traced(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return traced

    sys.settrace(traced)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def alike(number: int) -> str:
    """Return an answer that starts like all others."""
    return "I have read all messages of the treasurer, and this is what I have found in them: " + f"{number:05d} " * (
        number % 97 + 1
    )


LARGE = {
    "code": "".join(f"def step_{number}(x: int):\n    return f\"{{x}}: ('{number}')\"\n" for number in range(3000)),
    "JSON": json.dumps([{"id": number, "name": f"item {number}", "tags": ["a", "b"]} for number in range(3000)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["code", "JSON"])
def test_a_large_prompt_costs_few_steps_with_thousands_of_answers_that_start_alike(kind: str) -> None:
    linker = TrajectoryLinker(idle_seconds=900)
    for number in range(4000):
        answered(linker, [USER], {"role": "assistant", "content": alike(number)})
    text = LARGE[kind][:142_000]
    plain = evidence([{"role": "user", "content": text}])
    assert linker.find_link(plain).linked_by == "root"  # warms the caches
    few = steps_of(lambda: linker.find_link(plain))
    quoting = evidence([{"role": "user", "content": "\n".join([text[:140_000], *["> " + alike(7)] * 8])}])
    some = steps_of(lambda: linker.find_link(quoting))
    assert linker.find_link(quoting).linked_by == "quote"
    assert few < 600, few
    assert some < 30_000, some  # it was millions: for each answer at each place


@pytest.mark.parametrize("piece", ["\n", "\n \t", '"', ": ", '\n(\n[" ', " "])
def test_a_prompt_of_boundaries_and_white_space_costs_little(piece: str) -> None:
    linker = TrajectoryLinker(idle_seconds=900)
    answered(linker, [USER], {"role": "assistant", "content": alike(1)})
    prompt = evidence([{"role": "user", "content": "Begin" + piece * (140_000 // len(piece)) + "end"}])
    before = time.process_time()
    assert linker.find_link(prompt).linked_by == "root"
    assert time.process_time() - before < 10  # it was 49 s for line breaks


def test_answers_of_another_key_are_not_searched() -> None:
    linker = TrajectoryLinker(idle_seconds=900)
    for number in range(500):
        answered(linker, [USER], {"role": "assistant", "content": alike(number)}, key="other")
    text = "\n".join(alike(number) for number in range(100))
    assert steps_of(lambda: linker.find_link(evidence([{"role": "user", "content": text}], key="mine"))) < 200


def test_a_prompt_that_repeats_a_common_start_is_no_evidence_and_abandoned_early() -> None:
    leaves, work = LeafIndex(), WorkLimit()
    for number in range(2000):
        leaves.add(leaf_of(number, [('"' * (ANCHOR_LENGTH + 40 + number), False)], random.Random(0)))
    with pytest.raises(WorkLimitExceeded):
        list(leaves.quotes.find_quotes(['"' * 140_000], work))
    leaves = LeafIndex()
    leaves.add(leaf_of(1, [('"' * 4000, False)], random.Random(0)))
    prompt = [{"role": "user", "content": '"' * 140_000}]
    assert quote_match.find_quoted_leaf(leaves, prompt, canon.link_keys(prompt), lambda leaf: True)[0] is None


def test_under_one_name_the_oldest_are_removed_first() -> None:
    names: LeavesByName[str] = LeavesByName()
    leaves = [leaf_of(number, [("x" * 40, False)], random.Random(0)) for number in range(5000)]
    for leaf in leaves:
        names.add("n", leaf)
    assert list(names.leaves_of("n")) == leaves[-4096:]
    assert [names.remove("n", leaf) for leaf in leaves].count(True) == 1
    assert not names
