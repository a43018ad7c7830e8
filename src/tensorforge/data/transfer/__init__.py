"""Moving samples between workers: the protocol, the server, the transfers."""
