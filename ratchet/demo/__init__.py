"""`ratchet demo`: the run, its figures and its report."""
