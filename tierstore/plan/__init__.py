"""Capacity planning: from accesses and a host to hit rates, speed, wear, power and money."""

from .curves import MissRatioCurve
from .host import Accelerator, Host, Link, Memory, Processor, Setup, SoftwareCosts, Storage
from .model import Prediction
from .traces import Accesses, accesses_of, of_tables, once_a_batch
from .workload import TableShape, Workload

__all__ = [
    "Accelerator",
    "Accesses",
    "Host",
    "Link",
    "Memory",
    "MissRatioCurve",
    "Prediction",
    "Processor",
    "Setup",
    "SoftwareCosts",
    "Storage",
    "TableShape",
    "Workload",
    "accesses_of",
    "of_tables",
    "once_a_batch",
]
