"""What the math agent is told before each question: one sentence."""

SYSTEM = "You are a helpful math assistant."
