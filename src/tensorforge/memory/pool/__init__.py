"""Pure bookkeeping of memory: where blocks are, which are evicted or moved. No lock, no clock, no bytes."""
