"""Hosts by their names and addresses: what is written of them, and whether one is this machine."""

import ipaddress
import os
from typing import Final


def address(host: str, port: int) -> str:
    """As URLs and gRPC have it: "HOST:PORT", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_address(text: str) -> bool:
    """Whether a text is an address of this machine's alone."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def is_loopback(host: str) -> bool:
    """The same of a host's name, too."""
    return host.lower() == "localhost" or is_loopback_address(host)


_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> int | None:
    """Its rank, if torchrun, or what gives torchrun's environment, started it; else None."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _ENVIRONMENT) else None
