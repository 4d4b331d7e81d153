"""How the policy of the demo's e-mail agent is made. The agent itself is `ratchet.demo.email_search`."""
