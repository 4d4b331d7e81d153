"""Gating: whether a candidate is better, and what becomes of it."""
