"""Agents that know nothing of Ratchet: they are pointed at its proxy and get better."""
