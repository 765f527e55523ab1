"""The row caches in host memory: which rows are resident, in which slot, and which row is the next victim.

``base`` is the contract. ``ddr`` is the cache that evicts. ``full`` takes its place where every row fits the budget: it
evicts nothing, so it needs no policy. ``tierstore.hbm.cache`` has that of device memory.
"""
