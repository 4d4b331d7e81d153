"""An agent in production: a stream of users without a task set; their feedback is late, revised, contradictory or
missing.

The users are simulated. The agent of `ratchet.demo.email_search` is unmodified: it has a URL, a key and a model, and
returns the ids of its answers. Apart from that agent, this package does not import Ratchet.
"""
