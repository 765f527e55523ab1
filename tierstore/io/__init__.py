"""The cold tier: rows on a device. Contract, and its twin in memory: ``base``; on a device: ``lmdb``."""
