"""Micro-batches: where their samples come from, which process loads them, and with which random stream.

`batch_loading` loads when asked, `loading_processes` and `batch_pipe` load ahead, `local_shards`,
`shard_plane` and `placement` keep samples on the workers' disks, `random_streams` seeds.
"""
