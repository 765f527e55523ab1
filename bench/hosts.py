"""Hosts on links of a rate: network namespaces of this machine, joined by a bridge; needs root, ``ip`` and ``tc``."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

_BURST_BYTES_PER_MBIT: Final = 500
"""4 ms of the rate: more than one packet of the interface, and no tick of the kernel's clock is lost."""


def address(host: int) -> str:
    return f"10.78.0.{host + 1}"


def python_on(name: str, module: str) -> list[object]:
    """The beginning of a command."""
    return ["ip", "netns", "exec", name, sys.executable, "-m", module]


def _run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


@contextlib.contextmanager
def joined_hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Names of network namespaces with an interface "link0" each, whose rate is the same both ways; 0: no limit. They
    are removed at the end, and at SIGTERM."""
    if os.geteuid():
        raise SystemExit("This makes network namespaces, which takes root; choose other parts by --only.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    switch, *names = [f"tierstore-{os.getpid()}-{host}" for host in range(count + 1)]
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST_BYTES_PER_MBIT * mbit, "latency", "400ms")
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "link0", "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", "link0")
            for each in ("link0", "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")
            for where, link in ((switch, port), (name, "link0")) if mbit else ():
                _run("tc", "-n", where, "qdisc", "add", "dev", link, *limit)
        yield names
