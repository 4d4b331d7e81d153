"""The console: the operator's pages under /ui, and what of /api they alone need."""
