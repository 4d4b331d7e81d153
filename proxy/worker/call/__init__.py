"""One captured call: its state, its record, its metrics and its span."""
