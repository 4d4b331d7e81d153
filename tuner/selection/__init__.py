"""tuner/selection."""
