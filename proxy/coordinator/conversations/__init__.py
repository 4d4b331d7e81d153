"""Stored conversations: `previous_response_id`, stored responses, token contexts."""
