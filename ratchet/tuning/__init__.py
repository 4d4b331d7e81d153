"""ratchet/tuning."""
