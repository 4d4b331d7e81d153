"""What the proxy tells about itself: metrics, health, one log line per call, spans, and checks of tool calls."""
