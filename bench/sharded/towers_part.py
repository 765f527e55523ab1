"""Part "towers": a step over links between hosts that are slow, or not, flat and by towers, beside TorchRec's.

Ranks of one host talk over its loopback interface, without limits.
"""

import contextlib
import json
import sys
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tierstore.dist import TowerTieredEmbeddingBagCollection, open_sharded

from ..child import Child
from ..common import Goal, Part, Report, Run, Table
from ..hosts import address, joined_hosts, python_on
from .systems import Ours, Setup, System, Theirs
from .turns import contender, spreads, take_turns

_HOSTS: Final = 2
_ON_HOST: Final = 2
_PORT: Final = 29_571
ROWS: Final = "flat, rows"
POOLED: Final = "flat, pooled"
WHOLE: Final = "towers, identity"
THEIRS: Final = "TorchRec, flat"


class ByTowers(System):
    """tierstore's tables, half of them on each host, compressed there; 0: as they are."""

    def __init__(self, setup: Setup, compression: int) -> None:
        names = [f"t{number}" for number in range(len(setup.rows))]
        half = len(names) // _HOSTS
        towers = [names[:half], names[half:]]
        self.store = store = open_sharded(cold="memory", ddr=setup.in_memory, threads=1, towers=towers)
        for number in range(len(names)):
            store.create_table(setup.config(number), sharding_type=setup.sharding_type)
        widths = [len(tables) * setup.dim for tables in towers]
        modules = [nn.Linear(width, width // compression) for width in widths] if compression else None
        self.module = TowerTieredEmbeddingBagCollection(store, modules)
        self.model = self.module


def _batches(config: dict[str, Any], rank: int) -> list[tierstore.KeyedJaggedTensor]:
    generator, tables = torch.Generator().manual_seed(rank), config["tables"]
    lengths = torch.full((tables * config["batch"],), config["ids"], dtype=torch.int64)
    names, count = [f"f{number}" for number in range(tables)], int(lengths.sum())
    ids = [(torch.rand(count, generator=generator) ** 3 * config["rows"]).long() for _ in range(config["batches"])]
    return [tierstore.KeyedJaggedTensor(names, each, lengths=lengths) for each in ids]


def _in_rank(config: dict[str, Any]) -> dict[str, list[float]]:
    setup = Setup([config["rows"]] * config["tables"], config["dim"], "table_wise")
    systems: dict[str, System] = {ROWS: Ours(setup), POOLED: Ours(setup._replace(exchange="pooled"))}
    systems[WHOLE] = ByTowers(setup, 0)
    systems |= {f"towers, 1/{each}": ByTowers(setup, each) for each in config["compressions"]}
    systems[THEIRS] = Theirs(setup)
    own = _batches(config, dist.get_rank())
    made = {name: contender(system, own, is_model=False) for name, system in systems.items()}
    found = take_turns(made, config["turns"])
    for system in systems.values():
        system.close()
    return found


def _run_ranks(names: list[str], config: dict[str, Any]) -> list[Any]:
    settings = ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=link0", f"LOCAL_WORLD_SIZE={_ON_HOST}"]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(_HOSTS * _ON_HOST):
            command = [*settings, *python_on(names[rank // _ON_HOST], __name__), json.dumps(config), rank]
            ranks.append(stack.enter_context(Child(command)))
        return [json.loads(rank.line()) for rank in ranks]


def main(config: str, rank: int) -> None:
    torch.set_num_threads(1)
    meet = {"init_method": f"tcp://{address(0)}:{_PORT}", "rank": rank, "world_size": _HOSTS * _ON_HOST}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **meet)  # type: ignore[arg-type]
    print(json.dumps(_in_rank(json.loads(config))), flush=True)
    dist.destroy_process_group()


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, points = request.config["towers"], []
    for mbit in config["mbit"]:
        with joined_hosts(_HOSTS, mbit) as names:
            points.append({"mbit": mbit, "seconds": spreads(_run_ranks(names, config))})
    return {"points": points, **config}


def _tell(figures: dict[str, Any]) -> Report:
    rows, goals, towers = [], [], [f"towers, 1/{each}" for each in figures["compressions"]]
    names, slowest = [ROWS, POOLED, THEIRS, WHOLE, *towers], min(filter(None, (p["mbit"] for p in figures["points"])))
    for point in figures["points"]:
        times = {name: each["median"] for name, each in point["seconds"].items()}
        faster = min(times[name] for name in (ROWS, POOLED, THEIRS)) / min(times[name] for name in towers)
        link = f"{point['mbit']} Mb/s" if point["mbit"] else "no limit"
        rows.append([link, *(f"{1e3 * times[name]:.0f}" for name in names), f"{faster:.2f}"])
        least = 1.9 if point["mbit"] == slowest else 0.95
        goals.append(Goal(f"towers, {link}: speed over the best flat one", round(faster, 3), at_least=least))
    table = Table("ms of a step over a link between 2 hosts of 2 ranks", ["link", *names, "faster by"], rows)
    return Report([table], goals, [_NOTE.format(**figures)])


_NOTE: Final = (
    "Towers: {tables} tables of {dim} columns, {batch:,} samples a rank, {ids} ids a bag, tables dealt out whole, half "
    "of them on each host; medians of steps in turns, forward, backward and row-wise Adagrad, the gradient given. A "
    "step takes as long as in its slowest rank. The hosts are network namespaces of one machine, so 4 ranks share 2 "
    "cores. Links have a rate (tc tbf) and no delay of their own."
)

PART: Final = Part(_measure, _tell)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
