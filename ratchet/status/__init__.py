"""What `ratchet status` shows."""
