"""What the commands `ratchet tune` and `ratchet eval` share."""
