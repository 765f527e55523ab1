"""What a run did and ended in, for people and as JSON."""

import hashlib
import json
import math
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from ..pool.stats import Stats
from ..system.files import write_text
from ..system.sizes import format_count, format_size
from .build import Run
from .history import Point
from .metrics import Evaluation

_DIGEST_ROWS: Final = 65_536
_BITS: Final = "bits (SHA-256)"


class RankSummary(NamedTuple):
    """What one process used; fields as in ``Summary``."""

    store: str
    tiers: Stats
    start_bytes: int
    end_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run of the trainer; over ranks of all together, but for ``store`` and where ``ranks`` tells them apart."""

    store: str  # of this process
    device: str  # where the model computed
    version: int
    commit_id: str  # of the last commit, as its number is
    interrupted: bool  # whether Ctrl-C ended it early
    step: int  # steps since the run was begun, in earlier processes too
    epochs: int  # whole times through the training rows, likewise
    rows: int  # rows trained on since this process began
    seconds: float  # time it took to train on them, commits included; evaluation and compiling kernels not
    samples_per_second: float
    loss: float | None  # mean of the last 100 steps
    test: Evaluation | None
    tiers: Stats  # when training ended
    start_bytes: int
    """The process's own memory after its first step: Python, torch, compiled kernels, the rows of a few batches."""
    end_bytes: int
    """The process's own memory when training ended, without mapped pages of files, which the system takes back."""
    peak_rss_bytes: int  # the most memory that the process had, mapped pages included
    bits: str | None  # digest of all rows of all tables and the dense weights: equal digests, equal bits
    recorded: str | None = None  # what the run recorded of its lookups, and where
    ranks: tuple[RankSummary, ...] = ()  # of each rank, in order; none of one process
    history: tuple[Point, ...] = ()
    """Totals over the steps of this process, the last as the fields above say them; over ranks of all together."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; an AUC that is not defined and losses that are not finite are null."""
        fields = asdict(self) | {"loss": None if self.loss is None else _finite(self.loss)}
        if self.test is not None:
            fields["test"] = {name: _finite(value) for name, value in self.test._asdict().items()}
        fields["tiers"] = _tiers_to_dict(self.tiers)
        fields["ranks"] = [{**each._asdict(), "tiers": _tiers_to_dict(each.tiers)} for each in self.ranks]
        fields["history"] = [{**each._asdict(), "loss_sum": _finite(each.loss_sum)} for each in self.history]
        return fields

    def write(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all; errors as of ``partial_file``."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", force=True)

    def describe(self) -> str:
        """A line for each figure, for people."""
        lines = figures_of(self.to_dict()) | {"store": f"{self.store}, version {self.version}"}
        if self.ranks:
            lines["ranks"] = f"{len(self.ranks)}, whose figures are added up; --json has those of each"
        if self.recorded is not None:
            lines["recorded"] = self.recorded
        if self.bits is not None:
            lines[_BITS] = self.bits
        return "\n".join(f"{label:34}{text}" for label, text in lines.items())


def figures_of(run: dict[str, Any]) -> dict[str, str]:
    """Labels and texts of what ``Summary.to_dict()`` holds, or its JSON; figures that a run has not are left out."""
    hbm, ddr, ssd = run["tiers"].values()
    test, rows, epochs = run["test"] or {}, run["rows"], run["epochs"]
    trained = f"{rows:,} rows in {run['seconds']:.1f} s"
    if not rows and not run["interrupted"]:
        trained = f"nothing: complete after {format_count(epochs, 'epoch')}; --epochs {epochs + 1} goes on"
    figures = {"trained": trained, "samples/s": f"{run['samples_per_second']:,.0f}" if rows else ""}
    losses = {"training loss": run["loss"], "test AUC": test.get("auc"), "test log loss": test.get("log_loss")}
    figures |= {name: "" if value is None else f"{value:.6f}" for name, value in losses.items()}
    if rows and hbm["capacity_rows"]:
        figures["HBM tier: rows, index"] = format_size(hbm["bytes"])
        figures["hit rate of the HBM tier"] = f"{100 * hbm['hit_rate']:.1f} %"
    if rows:
        figures |= {
            "DDR tier: rows, index, staging": format_size(ddr["bytes"]),
            "whole process, tier included": format_size(run["end_bytes"]),
            "  grown since its first step": format_size(max(0, run["end_bytes"] - run["start_bytes"])),
            "hit rate of the DDR tier": f"{100 * ddr['hit_rate']:.1f} %",
            "read from SSD": format_size(ssd["bytes_read"]),
            "written to SSD": format_size(ssd["bytes_written"]),
        }
    return {label: text for label, text in (figures | {_BITS: (run["bits"] or "")[:16]}).items() if text}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tiers_to_dict(tiers: Stats) -> dict[str, Any]:
    return {name: {**tier._asdict(), "hit_rate": tier.hit_rate} for name, tier in tiers.tiers.items()}


def digest_bits(run: Run) -> str:
    """SHA-256 over all rows of all tables and the dense weights, in hexadecimal; the same wherever these are.
    Collective."""
    digest = hashlib.sha256()
    for name in sorted(run.store.tables):
        table = run.store.tables[name]
        digest.update(f"{name} {table.config.num_embeddings} {table.config.embedding_dim}\n".encode())
        count, parts = table.config.num_embeddings, None  # all ids that have rows, ascending
        if table.config.ids is not None:
            ids = torch.cat(run.processes.gather(torch.cat([*table.local.written()])))
            parts = torch.split(ids.sort().values, _DIGEST_ROWS)
        begins = range(0, count, _DIGEST_ROWS)
        for part in parts or (torch.arange(begin, min(begin + _DIGEST_ROWS, count)) for begin in begins):
            digest.update(_bytes(run.processes.read(run.store, name, part)))
    for name, parameter in sorted(run.model.dense_parameters().items()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(_bytes(parameter.detach()))
    return run.processes.gather(digest.hexdigest())[0]


def _bytes(tensor: Tensor) -> memoryview:
    """Its values in order, from any device."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data


def own_bytes() -> int:
    """Memory of this process now, without mapped pages of files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def peak_rss_bytes() -> int:
    """The most memory this process has had, mapped pages counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
