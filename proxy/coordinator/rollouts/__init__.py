"""The tuner's planned rollouts."""
