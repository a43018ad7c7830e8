"""A step's gradient: per shard, along one fixed tree, over the members."""
