"""The system prompt of the math agent."""

SYSTEM = "You are a helpful math assistant."
