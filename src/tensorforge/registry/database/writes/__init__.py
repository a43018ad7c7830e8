"""Writes: each changes one model in one transaction, with its audit row and its messages to webhooks."""
