"""Training a DLRM on click data from one run file."""

from .config import ConfigError, RunConfig, load
from .summary import Summary
from .trainer import train

__all__ = ["ConfigError", "RunConfig", "Summary", "load", "train"]
