"""The types of a run's rows and layers, as few bytes as a bound of the log loss lets them have."""

__all__: list[str] = []
