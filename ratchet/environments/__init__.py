"""Public environments as workflows: `--workflow ratchet.environments.NAME:workflow` (docs/tuner.md)."""
