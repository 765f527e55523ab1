"""The rows of all tables of one layout: a cache over the cold tier, leases, locks, write-back."""
