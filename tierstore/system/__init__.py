"""What every room needs of the operating system: durable files, signals, kill points, errors, sizes, terminals."""

__all__: list[str] = []
