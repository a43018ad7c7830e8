"""The registry's tables and the operations on them, each in one transaction."""
