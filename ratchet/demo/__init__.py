"""`ratchet demo`: the run, its results and its report."""
