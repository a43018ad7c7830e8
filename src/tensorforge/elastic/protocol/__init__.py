"""What travels between workers, operators and the coordinator, and who may send it."""
