"""Which trajectories lack something that their calls name: messages on the way to a prompt, or a tool list.

It happens where a segment of a proxy's journal was deleted or damaged before the store had it. A message is named by
its content, so that one that is sent again later fills the hole.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ratchet.store.content.messages import ROOT
from ratchet.store.db import schema
from ratchet.store.db.bulk import in_values


def incomplete(connection: sa.Connection, trajectory_ids: Sequence[str]) -> set[str]:
    """Return those of the trajectories whose prompts or tools are not stored whole."""
    if not trajectory_ids:
        return set()
    calls, messages, toolsets = schema.calls, schema.messages, schema.toolsets
    ours = in_values(connection, calls.c.trajectory_id, list(trajectory_ids))
    prompts = sa.select(calls.c.trajectory_id.label("run"), calls.c.prompt_node.label("hash"))
    path = prompts.where(ours, calls.c.prompt_node != ROOT).cte("path", recursive=True)
    above = sa.select(path.c.run, messages.c.parent).join(messages, messages.c.hash == path.c.hash)
    path = path.union(above.where(messages.c.parent != ROOT))
    cut = sa.select(path.c.run).where(~sa.exists().where(messages.c.hash == path.c.hash))
    bare = sa.select(calls.c.trajectory_id).where(
        ours, calls.c.tools_hash != "", ~sa.exists().where(toolsets.c.hash == calls.c.tools_hash)
    )
    return {*connection.scalars(cut), *connection.scalars(bare)}
