"""Settings from TOML files and options, checked, with errors that name the key."""

__all__: list[str] = []
