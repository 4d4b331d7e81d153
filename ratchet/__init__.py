"""Ratchet: reinforcement learning from an agent's production traffic. Importing this package costs next to nothing."""

__version__ = "0.1.0"
