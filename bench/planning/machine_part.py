"""Part "machine": this machine as ``tierstore plan measure`` finds it."""

from dataclasses import replace
from typing import Any, Final

from tierstore.plan.json_file import plain
from tierstore.plan.measure import measure

from ..common import Run, Table
from ..parts import Part, Told

__all__ = ["PART"]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    host = measure(request.folder, seconds=request.config["machine_seconds"])
    # Where the folder is says nothing to others.
    return {"host": plain(replace(host, source=host.source.replace(str(request.folder), "its disk")))}


def _tell(figures: dict[str, Any]) -> Told:
    host = figures["host"]
    (drive,) = host["storage"]
    rows = [
        ["memory, in order", f"{host['ddr']['bytes_per_s'] / 1e9:.1f} GB/s"],
        ["memory, rows of 256 bytes", f"{host['ddr']['row_bytes_per_s'] / 1e9:.1f} GB/s"],
        ["matrix products", f"{host['processor']['flops'] / 1e9:.0f} GFLOP/s"],
        ["SSD reads of 4 KiB", f"{drive['reads_per_s']:,.0f}/s"],
        ["SSD writes", f"{drive['write_bytes_per_s'] / 1e9:.2f} GB/s"],
        *([name.replace("_", " "), f"{value:.3g}"] for name, value in host["costs"].items()),
    ]
    return Told(tables=[Table(title="this machine, and tierstore's own work on it", columns=["what", ""], rows=rows)])


PART: Final = Part(_measure, _tell)
