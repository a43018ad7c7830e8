"""Micro-batches: where samples come from, who loads which shard, with which random stream."""
