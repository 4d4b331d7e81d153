"""ratchet/checks."""
