"""``tierstore shard``: what steps over ranks cost, and which rank gets which tables."""

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..system.checks import excerpt
from ..system.sizes import format_size, parse_size
from ..system.terminal import Command, arg, columns_of, command, progress_bar
from .commands import OPTIMIZERS, require_outputs

if TYPE_CHECKING:
    from ..config import TableConfig
    from ..dist.placement import Prediction
    from ..plan import Workload
    from ..trace import Trace

_MEET_SECONDS: Final = 300
_DRAWN_IDS: Final = 20_000_000
_DRAWN_BATCHES: Final = 8
_TABLES_SHOWN: Final = 40
_NAME_CHARACTERS: Final = 28


def _measure(options: argparse.Namespace) -> int:
    from ..dist.placement.measure import measure_ranks
    from ..system.files import require_new
    from ..system.processes import launched_rank
    from ..train.processes import meeting

    rank = launched_rank()
    if rank is None:
        raise ValueError("start it in every rank: torchrun --nproc-per-node 2 -m tierstore shard measure")
    if rank == 0:
        require_new(Path(options.out), force=options.force)
    bar: Any = progress_bar("measuring", unit=" s") if rank == 0 else contextlib.nullcontext()
    with meeting(_MEET_SECONDS), bar as show:
        found = measure_ranks(optimizer=options.optimizer, seconds=options.seconds, progress=show)
    if rank == 0:
        found.save(options.out, force=options.force)
        errors = ", ".join(f"{kind} {error:.0%}" for kind, error in vars(found.errors).items())
        print(f"{found.source}\nmean error of a step's time, by exchange: {errors}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from ..dist import Plan, Sharding
    from ..dist.placement import RankCosts, Search, demand_of, predict
    from ..plan.workload import load_workload
    from ..trace import read_trace

    require_outputs({"PLAN": options.plan}, [options.workload, options.costs, options.trace], force=options.force)
    limit = float("inf") if options.limit is None else parse_size(options.limit, name="--limit")
    workload, costs = load_workload(options.workload), RankCosts.load(options.costs)
    if not workload.is_training:
        workload = replace(workload, optimizer=costs.optimizer)
    tables, ranks = _tables_of(workload), costs.world_size
    demand = demand_of(_drawn(workload) if options.trace is None else read_trace(options.trace), tables, ranks)
    search = Search(tables, demand, costs, rank_bytes=limit)
    with progress_bar("planning", unit=" rounds") as show:
        found = search.best(show)
    found.plan.save(options.plan)
    by_rows = Plan(ranks, {table.name: Sharding("row_wise", tuple(range(ranks))) for table in tables})
    print(
        f"a step of the tables of {_shown(workload.name)} over {ranks} ranks takes {1e3 * found.seconds:.3g} ms, and "
        f"{1e3 * predict(tables, by_rows, demand, costs).seconds:.3g} ms with all of them row_wise"
    )
    print("\n".join(_describe(tables, found)))
    return 0


def _tables_of(workload: "Workload") -> "list[TableConfig]":
    from ..config import TableConfig
    from ..optim.configs import RULES

    rule, shape = RULES[workload.optimizer](), ("name", "num_embeddings", "embedding_dim")
    shapes = ({name: getattr(table, name) for name in shape} for table in workload.tables)
    return [TableConfig(**each, dtype=workload.dtype, optimizer=rule) for each in shapes]


def _drawn(workload: "Workload") -> "Trace":
    """Some batches by Zipf's law, as the workload says."""
    from ..plan.traces import generate

    batches = max(1, min(_DRAWN_BATCHES, int(_DRAWN_IDS / max(workload.lookups, 1))))
    return generate(workload, samples=batches * workload.batch_samples, seed=0)


def _describe(tables: "list[TableConfig]", found: "Prediction") -> list[str]:
    """What each rank looks up and holds, and where each table is."""
    of_ranks = [("  rank", "looks up", "holds")]
    for rank, (served, size) in enumerate(zip(found.served, found.size_bytes, strict=True)):
        of_ranks.append((f"  {rank}", f"{served:,.0f} rows", format_size(size)))
    of_tables = [("  table", "rows", "columns", "sharding", "exchange", "ranks")]
    for table in tables[:_TABLES_SHOWN]:
        sharding_type, ranks, exchange, _ = found.plan.tables[table.name]
        where = "all" if len(ranks) == found.plan.world_size else ", ".join(map(str, ranks))
        shape = (f"{table.num_embeddings:,}", f"{table.embedding_dim}")
        of_tables.append((f"  {_shown(table.name)}", *shape, sharding_type, exchange, where))
    more = len(tables) - _TABLES_SHOWN
    return [
        *columns_of(of_ranks, is_last_text=False),
        *columns_of(of_tables),
        *([f"  and {more:,} more tables"] if more > 0 else []),
    ]


def _shown(name: str) -> str:
    return excerpt(name, _NAME_CHARACTERS).replace("'", "")


COMMANDS: Final[Mapping[str, Command]] = {
    "measure": command(
        _measure,
        (
            arg("--out", default="ranks.json", metavar="PATH", help="where they go (default: ranks.json)"),
            arg(
                "--optimizer",
                default="rowwise_adagrad",
                choices=OPTIMIZERS,
                help="of the tables (default: rowwise_adagrad)",
            ),
            arg(
                "--seconds",
                type=float,
                default=120.0,
                metavar="N",
                help="to spend, about; more give more sets of tables (default: 120)",
            ),
            arg("--force", help="replace PATH if it exists"),
        ),
        "measure what steps over ranks cost",
        "Time steps of sharded tables over the ranks that torchrun starts, for tierstore shard plan.",
        "example:\n  torchrun --nproc-per-node 2 -m tierstore shard measure --out ranks.json",
    ),
    "plan": command(
        _plan,
        (
            arg("workload", metavar="WORKLOAD", help="a preset, or a workload file; its batch is that of all ranks"),
            arg("plan", metavar="PLAN.json", help="the plan that is written, for open_sharded and ranks.plan"),
            arg("--costs", required=True, metavar="FILE", help="of the ranks, by tierstore shard measure"),
            arg("--trace", metavar="TRACE.npz", help="what is looked up (default: Zipf's law, as the workload says)"),
            arg("--limit", metavar="SIZE", help="of each rank's rows with optimizer state (default: none)"),
            arg("--force", help="replace PLAN.json if it exists"),
        ),
        "decide which rank gets which tables",
        "Find how to shard a workload's tables over ranks, so that a training step takes the least time.",
        "examples:\n"
        "  tierstore shard plan rmc2 plan.json --costs ranks.json\n"
        "  tierstore shard plan mine.toml plan.json --costs ranks.json --trace run.npz --limit 8GiB",
    ),
}
