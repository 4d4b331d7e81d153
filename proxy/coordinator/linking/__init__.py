"""Which trajectory a call belongs to: the evidence in a request, and the memory of open answers."""
