"""Training a DLRM on click data from one run file."""

from ..settings.sections import ConfigError
from .config import RunConfig, load
from .summary import Summary
from .trainer import train

__all__ = ["ConfigError", "RunConfig", "Summary", "load", "train"]
