"""The types of a run's rows and layers, as few bytes as a bound of the log loss lets them have."""

from .choosing import QuantizedRun, quantize_run

__all__ = ["QuantizedRun", "quantize_run"]
