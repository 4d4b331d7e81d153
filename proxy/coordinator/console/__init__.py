"""The console: the operator's pages under /ui."""
