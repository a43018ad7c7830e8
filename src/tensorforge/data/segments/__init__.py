"""Samples on disk: the file format, the stores made of such files, and byte streams cut out of them.

samples → segment → range_stream → part_file, shard_store (one worker's folder), packed_dataset (the origin).
"""
