"""An e-mail search agent over an SQLite FTS5 mailbox: mailbox, tasks, agent, judge.

The agent speaks to any OpenAI-compatible server. Ratchet sees only its HTTP traffic and calls its judge,
`ratchet.demo.email_search.tasks:judge`.
"""
