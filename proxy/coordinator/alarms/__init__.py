"""Messages about alarms."""
