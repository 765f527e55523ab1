"""Training a DLRM, or a class of one's own, on click data from one run file."""

from ..settings.sections import ConfigError
from .build import row_ids
from .config import RunConfig, load
from .summary import Summary
from .sweep import Sharpness, sharpness_of
from .trainer import train

__all__ = ["ConfigError", "RunConfig", "Sharpness", "Summary", "load", "row_ids", "sharpness_of", "train"]
