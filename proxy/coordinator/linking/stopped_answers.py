"""Which stopped answer a conversation continues: one whose client closed the connection while it was generated.

vLLM generates until the close arrives, so the recorded answer is longer than the part that the client received and
sends back. An assistant message continues a stopped answer if it comes directly after the messages that were answered,
if it is the last one of the request, and if the answer begins with its text. An equal answer comes first.
"""

from __future__ import annotations

from ratchet.proxy.coordinator.linking.fuzzy_match import LeafFilter, preference
from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.messages.link_records import Leaf, LinkEvidence
from ratchet.proxy.messages.text_fingerprints import short_key
from ratchet.store.content import messages as canon


def find_stopped_leaf(leaves: LeafIndex, evidence: LinkEvidence, fits: LeafFilter) -> Leaf | None:
    """Return the stopped answer that the last assistant message is the beginning of.

    None if there is none, or if an equal answer is known.
    """
    if not leaves.stopped:
        return None
    messages, keys = evidence.messages, evidence.keys
    place = next((at for at in range(len(keys) - 1, 0, -1) if messages[at].get("role") == "assistant"), 0)
    if not place or canon.called(messages[place]):
        return None
    stopped = [leaf for leaf in leaves.stopped.leaves_of(short_key(keys[place - 1])) if fits(leaf)]
    text = canon.visible_content(messages[place]) if stopped else None
    if not text or not isinstance(text, str) or any(map(fits, leaves.leaves_at(keys[place]))):
        return None
    return max((leaf for leaf in stopped if _begins_with(leaf, text)), key=preference, default=None)


def _begins_with(leaf: Leaf, text: str) -> bool:
    stopped = leaf.details.stopped
    return stopped is not None and stopped.begins_with(text)
