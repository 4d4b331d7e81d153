"""tuner/settings."""
