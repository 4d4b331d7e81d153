"""ratchet/output."""
