"""tuner/rollouts."""
