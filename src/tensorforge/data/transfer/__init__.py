"""Shards on the wire: wire_protocol between shard_server and shard_fetcher, and chunk_buffers for what arrives.

transfer_manager executes a plan: it runs this worker's transfers, most urgent first.
"""
