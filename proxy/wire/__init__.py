"""Fast parsing and encoding of HTTP bodies: requests, responses, errors, limits."""
