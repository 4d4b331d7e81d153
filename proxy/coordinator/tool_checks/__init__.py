"""Checks of recorded tool calls and their results."""
