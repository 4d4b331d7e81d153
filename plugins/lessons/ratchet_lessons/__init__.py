"""Lessons from failed rollouts: the command `ratchet tune lessons` and what it does."""
