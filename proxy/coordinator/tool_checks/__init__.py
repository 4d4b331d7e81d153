"""Checks of recorded tool calls, and what came of them."""
