"""tuner/reports."""
