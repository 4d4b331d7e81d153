"""Exact continuation: generate after the recorded token ids instead of a re-rendered prompt."""
