"""A step's gradient: one value per shard, added up along one fixed tree, first on each member, then over all.

Who computes which shards (`step_work`), the tree (`shard_tree`), flat memory (`flat_layout`), the sums on this
member (`shard_gradients`), the sum over all members (`reduction`); its order on
a device (`exchange_stream`).
"""
