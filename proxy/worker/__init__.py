"""The worker: serves agents' calls over HTTP and records them in the journal."""
