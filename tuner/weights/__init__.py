"""tuner/weights."""
