"""The tuner's settings."""
