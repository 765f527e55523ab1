"""What a run did and ended in, for people and as JSON."""

import hashlib
import json
import math
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from ..pool.stats import Stats, TierStats
from ..system.output import write_text
from ..system.sizes import format_size
from .build import Run
from .history import Point
from .metrics import Evaluation
from .processes import Processes

_DIGEST_ROWS: Final = 65_536


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

    store: str
    """Of this process."""
    device: str
    """Where the model computed."""
    version: int
    """Of the last commit."""
    interrupted: bool
    """Whether Ctrl-C ended it early."""
    step: int
    """Steps since the run was begun, those of earlier processes included."""
    epochs: int
    """Whole times through the training rows since the run was begun."""
    rows: int
    """Rows trained on since this process began."""
    seconds: float
    """Time it took to train on them, commits included; evaluation and compiling kernels not."""
    samples_per_second: float
    loss: float | None
    """Mean of the last 100 steps."""
    test: Evaluation | None
    tiers: Stats
    """When training ended."""
    start_bytes: int
    """The process's own memory after its first step: Python, torch, compiled kernels, the rows of a few batches."""
    end_bytes: int
    """The process's own memory when training ended. Mapped pages of the store's file, which the system takes back
    whenever it needs them, are not counted."""
    peak_rss_bytes: int
    """The most memory the process had at any time, mapped pages counted."""
    bits: str | None
    """Digest of all rows of all tables and the dense weights: equal digests, equal bits."""
    recorded: str | None = None
    """What the run recorded of its lookups, and where."""
    ranks: tuple[RankSummary, ...] = ()
    """Of each rank, in order; none of one process."""
    history: tuple[Point, ...] = ()
    """Totals over the steps of this process, the last as the fields above say them; over ranks of all together."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; an AUC that is not defined and losses that are not finite are null."""
        fields = asdict(self) | {"loss": None if self.loss is None else _finite(self.loss)}
        if self.test is not None:
            fields["test"] = {
                "rows": self.test.rows,
                "auc": _finite(self.test.auc),
                "log_loss": _finite(self.test.log_loss),
            }
        fields["tiers"] = _tiers_to_dict(self.tiers)
        fields["ranks"] = [{**each._asdict(), "tiers": _tiers_to_dict(each.tiers)} for each in self.ranks]
        fields["history"] = [{**each._asdict(), "loss_sum": _finite(each.loss_sum)} for each in self.history]
        return fields

    def write(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all; errors as of ``partial_file``."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", force=True)

    def describe(self) -> str:
        """A few lines for people."""
        hbm, ddr, ssd = self.tiers.tiers.values()
        lines = [f"trained  {self.rows:,} rows in {self.seconds:.1f} s: {self.samples_per_second:,.0f} samples/s"]
        if not self.rows and not self.interrupted:
            epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs:,} epochs"
            lines = [f"trained  nothing: already complete ({epochs}); --epochs {self.epochs + 1} goes on"]
        if self.loss is not None:
            lines[0] += f", loss {self.loss:.4f}"
        if self.test is not None:
            lines.append(
                f"tested   {self.test.rows:,} rows: AUC {self.test.auc:.4f}, log loss {self.test.log_loss:.4f}"
            )
        if hbm.capacity_rows and self.rows:
            lines.append(f"HBM      {_describe_cache(hbm)}, on {self.device}")
        if self.rows:
            own, first = format_size(self.end_bytes), format_size(self.start_bytes)
            lines += [
                f"DDR      {_describe_cache(ddr)}",
                f"SSD      {format_size(ssd.bytes_read)} read, {format_size(ssd.bytes_written)} written",
                f"memory   {own} of its own, {first} after the first step",
            ]
        lines.append(f"store    {self.store}, version {self.version}")
        if self.ranks and self.rows:
            lines.append(f"ranks    {_describe_ranks(self.ranks)}")
        if self.recorded is not None:
            lines.append(f"recorded {self.recorded}")
        if self.bits is not None:
            lines.append(f"bits     {self.bits}")
        return "\n".join(lines)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_cache(tier: TierStats) -> str:
    return f"{format_size(tier.bytes)}, capacity {tier.capacity_rows:,} rows, {100 * tier.hit_rate:.1f} % hits"


def _tiers_to_dict(tiers: Stats) -> dict[str, Any]:
    return {name: {**tier._asdict(), "hit_rate": tier.hit_rate} for name, tier in tiers.tiers.items()}


def _describe_ranks(ranks: Sequence[RankSummary]) -> str:
    """The least and the most of any rank."""
    hits = [100 * each.tiers.ddr.hit_rate for each in ranks]
    read, memory = [each.tiers.ssd.bytes_read for each in ranks], [each.end_bytes for each in ranks]
    return (
        f"{len(ranks)}: {min(hits):.1f} - {max(hits):.1f} % DDR hits, "
        f"{format_size(min(read))} - {format_size(max(read))} read from SSD, "
        f"{format_size(min(memory))} - {format_size(max(memory))} of memory"
    )


def digest_bits(run: Run) -> str:
    """SHA-256 over all rows of all tables and the dense weights, in hexadecimal; the same wherever these are.
    Collective."""
    digest = hashlib.sha256()
    for name in sorted(run.store.tables):
        table = run.store.tables[name]
        digest.update(f"{name} {table.config.num_embeddings} {table.config.embedding_dim}\n".encode())
        for ids in _ids(run.processes, table):
            digest.update(_bytes(run.processes.read(run.store, name, ids)))
    for name, parameter in sorted(run.model.dense_parameters().items()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(_bytes(parameter.detach()))
    return run.processes.gather(digest.hexdigest())[0]


def _ids(processes: Processes, table: Any) -> Iterator[Tensor]:
    """All ids that have rows, ascending, in parts. Collective."""
    if table.config.ids is None:
        for begin in range(0, table.config.num_embeddings, _DIGEST_ROWS):
            yield torch.arange(begin, min(begin + _DIGEST_ROWS, table.config.num_embeddings))
    else:
        ids = torch.cat(processes.gather(torch.cat([*table.local.written()])))
        yield from torch.split(ids.sort().values, _DIGEST_ROWS)


def _bytes(tensor: Tensor) -> memoryview:
    """Its values in order, from any device."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data


def own_bytes() -> int:
    """Memory of this process now, without pages mapped from files where the system tells them apart."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def peak_rss_bytes() -> int:
    """The most memory this process has had, mapped pages counted."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
