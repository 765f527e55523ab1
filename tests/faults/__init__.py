"""Power loss and failing devices: every write, sync and rename of a store, seen, replayed and failed."""
