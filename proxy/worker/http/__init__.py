"""HTTP in front of the endpoints: connections, authentication, body limits, routing, errors."""
