"""Which worker owns which samples: shards, order, ledger and redistribution plans. Pure."""
