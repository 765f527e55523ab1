"""Part "towers": a step over links between hosts that are slow, or not, flat and by towers, beside TorchRec's.

Hosts are network namespaces of this machine, joined by a pair of virtual interfaces with a rate; it needs root,
``ip`` and ``tc``. Ranks of one host talk over its loopback interface, without limits.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tierstore.dist import TowerTieredEmbeddingBagCollection, open_sharded

from ..common import Goal, Part, Run, Table, Told
from .systems import Ours, Setup, System, Theirs, Tierstore
from .turns import contender, spreads, take_turns

__all__ = ["PART"]

_HOSTS: Final = 2
_ON_HOST: Final = 2
_PORT: Final = 29_571
_BURST_BYTES_PER_MBIT: Final = 500
"""4 ms of the rate: more than one packet of the interface, and no tick of the kernel's clock is lost."""
ROWS: Final = "flat, rows"
POOLED: Final = "flat, pooled"
WHOLE: Final = "towers, identity"
THEIRS: Final = "TorchRec, flat"


class ByTowers(Tierstore):
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
        self.model: nn.Module = self.module


def _batches(config: dict[str, Any], rank: int) -> list[tierstore.KeyedJaggedTensor]:
    generator, tables = torch.Generator().manual_seed(rank), config["tables"]
    lengths = torch.full((tables * config["batch"],), config["ids"], dtype=torch.int64)
    names = [f"f{number}" for number in range(tables)]
    return [
        tierstore.KeyedJaggedTensor(
            names,
            (torch.rand(int(lengths.sum()), generator=generator) ** 3 * config["rows"]).long(),
            lengths=lengths,
        )
        for _ in range(config["batches"])
    ]


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


def _ip(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def _linked(mbit: int) -> Iterator[list[str]]:
    """Names of network namespaces 10.77.0.1 and 10.77.0.2; ``mbit`` 0: no limit."""
    names = [f"tierstore-{os.getpid()}-{host}" for host in range(_HOSTS)]
    ends = [f"ts{os.getpid() % 100_000}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("ip", "netns", "add", name)
            stack.callback(_ip, "ip", "netns", "del", name)
        _ip("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for host, (name, end) in enumerate(zip(names, ends, strict=True)):
            inside = ("ip", "netns", "exec", name)
            _ip(*inside, "ip", "link", "set", end, "name", "link0")
            _ip(*inside, "ip", "addr", "add", f"10.77.0.{host + 1}/24", "dev", "link0")
            for each in ("link0", "lo"):
                _ip(*inside, "ip", "link", "set", each, "up")
            if mbit:
                limits = ("rate", f"{mbit}mbit", "burst", f"{_BURST_BYTES_PER_MBIT * mbit}", "latency", "400ms")
                _ip(*inside, "tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limits)
        yield names


def _run_ranks(names: list[str], config: dict[str, Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "link0", "LOCAL_WORLD_SIZE": f"{_ON_HOST}"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[rank // _ON_HOST], sys.executable, "-m", __name__, folder, f"{rank}"],
                env=os.environ | told | {"TOWERS": json.dumps(config)},
            )
            for rank in range(_HOSTS * _ON_HOST)
        ]
        if sum(abs(rank.wait()) for rank in ranks):
            raise SystemExit("a rank failed; see above")
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(len(ranks))]


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    meet = {"init_method": f"tcp://10.77.0.1:{_PORT}", "rank": rank, "world_size": _HOSTS * _ON_HOST}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **meet)  # type: ignore[arg-type]
    found = _in_rank(json.loads(os.environ["TOWERS"]))
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    if os.geteuid():
        raise SystemExit('The part "towers" makes network namespaces, which takes root; choose others by --only.')
    config = request.config["towers"]
    points = []
    for mbit in config["mbit"]:
        with _linked(mbit) as names:
            points.append({"mbit": mbit, "seconds": spreads(_run_ranks(names, config))})
        print(mbit, {name: round(1e3 * each["median"], 1) for name, each in points[-1]["seconds"].items()}, flush=True)
    return {"points": points, **config}


def _median(point: dict[str, Any], name: str) -> float:
    return float(point["seconds"][name]["median"])


def _best(point: dict[str, Any]) -> float:
    return min(_median(point, name) for name in (ROWS, POOLED, THEIRS))


def _tell(figures: dict[str, Any]) -> Told:
    points, towers = figures["points"], [f"towers, 1/{each}" for each in figures["compressions"]]
    names = [ROWS, POOLED, THEIRS, WHOLE, *towers]
    rows = [
        [
            f"{point['mbit']} Mb/s" if point["mbit"] else "no limit",
            *(f"{1e3 * _median(point, name):.0f}" for name in names),
            f"{_best(point) / min(_median(point, name) for name in towers):.2f}",
        ]
        for point in points
    ]
    table = Table(title="ms of a step over a link between 2 hosts of 2 ranks", columns=["link", *names, "faster by"],
                  rows=rows)  # fmt: skip
    goals = [
        Goal(
            name=f"towers, {point['mbit'] or 'no limit'}{' Mb/s' * bool(point['mbit'])}: speed over the best flat one",
            value=round(_best(point) / min(_median(point, name) for name in towers), 3),
            at_least=1.9 if point["mbit"] == min(each["mbit"] for each in points if each["mbit"]) else 0.95,
        )
        for point in points
    ]
    return Told(tables=[table], goals=goals, notes=[_NOTE.format(**figures)])


_NOTE: Final = (
    "Towers: {tables} tables of {dim} columns, {batch:,} samples a rank, {ids} ids a bag, tables dealt out whole, half "
    "of them on each host; medians of steps in turns, forward, backward and row-wise Adagrad, the gradient given. A "
    "step takes as long as in its slowest rank. The hosts are network namespaces of one machine, so 4 ranks share 2 "
    "cores. Links have a rate (tc tbf) and no delay of their own."
)

PART: Final = Part(_measure, _tell)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
