"""The agent of docs/tutorial.md: LangGraph with a calculator."""
