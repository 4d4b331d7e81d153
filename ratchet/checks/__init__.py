"""The checks of `ratchet doctor`."""
