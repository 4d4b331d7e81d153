"""An e-mail search agent over a SQLite FTS5 mailbox: world, tasks, agent, judge and a tiny policy.

The agent speaks to any OpenAI-compatible server. Nothing in this package imports a room of Ratchet; Ratchet meets
it only as HTTP traffic and, for the score, through the entry point `ratchet.demo.email_search.judge:judge`.
"""
