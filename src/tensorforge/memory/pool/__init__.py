"""Memory as bookkeeping: blocks, free space, eviction, defragmentation. Pure."""
