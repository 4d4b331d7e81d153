"""ratchet/status."""
