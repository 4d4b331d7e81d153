"""Judges of what an agent did and of what came next: `judge: {kind: behavior}` and `{kind: next_state}`."""
