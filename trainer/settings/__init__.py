"""trainer/settings."""
