"""Parts of hosts as data: what each can do, takes and costs, with the source of each figure; and hosts made of them."""

from .catalog import Figure, Part, describe_parts, load_part, parts
from .hosts import host_names, load_host, read_host, write_host

__all__ = [
    "Figure",
    "Part",
    "describe_parts",
    "host_names",
    "load_host",
    "load_part",
    "parts",
    "read_host",
    "write_host",
]
