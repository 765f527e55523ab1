"""Parts of hosts as data, with the source of each figure; and hosts made of them."""

from .catalog import describe_parts, host_names, load_host, load_part, write_host

__all__ = ["describe_parts", "host_names", "load_host", "load_part", "write_host"]
