"""An agent in production: a stream of users, no task set, thumbs that come late, are revised, contradict or never come.

The users are simulated. The agent is the one of `ratchet.demo.email_search`, unmodified: it knows a URL, a key and a
model, and hands the ids of its answers on. Nothing in this package imports a room of Ratchet.
"""
