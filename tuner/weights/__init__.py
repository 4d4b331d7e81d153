"""Weight tuning: reinforcement learning on task sets."""
