"""tuner/environments."""
