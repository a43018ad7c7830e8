"""Which worker owns which samples, in which order, and what was consumed. Pure: no files, clocks or threads.

shards and intervals are the arithmetic; order and ledger describe an epoch; balance and redistributor make a
plan, which plan_validation checks.
"""
