"""Linking while the coordinator is away: a worker continues only what its own calls prove.

A call continues a trajectory that it names, or one of this worker's answers that it repeats at the same path, if that
answer was not continued and is distinctive: its tool-call ids are random, or its text is long. Everything else starts a
trajectory of the purpose `unlinked`, which is never trained: it may be the rest of another one. Nothing is merged on a
guess.
"""

from __future__ import annotations

import msgspec

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.messages.link_records import Link, LinkEvidence
from ratchet.proxy.messages.text_fingerprints import is_distinctive_id
from ratchet.store.ids import new_id
from ratchet.store.records import UNLINKED

LINKED_BY = "unlinked"  # how the trajectory of such a call was found


class OutageLinker(TrajectoryLinker):
    """Links calls to the trajectories of this worker, where that is certain."""

    def find_link(self, evidence: LinkEvidence) -> Link:
        """Return a request's place. Raises BadRequest as in `TrajectoryLinker`."""
        link = super().find_link(evidence)
        if link.version is not None:
            if evidence.explicit is not None or _is_certain(link):
                return link
            link = Link(new_id("traj"), None, LINKED_BY, purpose=evidence.purpose, key_id=evidence.key_id)
        purpose = UNLINKED if link.purpose == "live" else link.purpose
        return msgspec.structs.replace(link, purpose=purpose, linked_by=evidence.explicit_by or LINKED_BY)


def _is_certain(link: Link) -> bool:
    leaf = link.parent
    if leaf is None or leaf.is_taken or link.quoted is not None:
        return False
    if leaf.tool_call_ids:
        return link.linked_by == "graph+tool_ids" and any(map(is_distinctive_id, leaf.tool_call_ids))
    return link.linked_by == "graph" and leaf.fingerprints.is_distinctive
