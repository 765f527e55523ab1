"""Part "skew": how evenly ranks share the work of Criteo's lookups, and whether copies of hot rows would help."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection
from tierstore.dist.plan import ShardingType

from ..common import Goal, Run, Table
from ..data import require_criteo
from ..parts import Part, Told
from ..steps import StepWorkload, criteo
from .ranks import run_ranks
from .systems import Ours, Setup
from .turns import Contender, contender, spreads, take_turns

__all__ = ["PART"]

RANKS: Final = 4
AS_IS: Final = "as it is"
_GAIN: Final = 0.1

Jagged = tierstore.KeyedJaggedTensor


class _Load(NamedTuple):
    """Of one rank; all but the first are of a step."""

    rows_owned: int
    rows_asked: float
    bytes_sent: float
    exchange_s: float


def _loads(system: Ours, batches: Sequence[Any], step: Callable[[Any], object]) -> tuple[list[_Load], float]:
    """Of each rank over these steps, and seconds of a step in this rank."""
    before, start = system.store.balance(), time.perf_counter()
    for batch in batches:
        step(batch)
    seconds, after = time.perf_counter() - start, system.store.balance()
    count = len(batches)
    loads = [
        _Load(
            new.num_rows,
            (new.lookups - old.lookups) / count,
            (new.traffic.bytes_sent - old.traffic.bytes_sent) / count,
            (new.traffic.seconds - old.traffic.seconds) / count,
        )
        for old, new in zip(before, after, strict=True)
    ]
    return loads, seconds / count


def _hot_rows(workload: StepWorkload, count: int) -> list[np.ndarray[Any, Any]]:
    """The rows of each table that most batches look up, int64 [count or fewer], ascending."""
    found = []
    for number, rows in enumerate(workload.rows):
        uses = np.zeros(rows, np.int64)
        for batch in workload.batches:
            uses[np.unique(_of_feature(batch, number))] += 1
        found.append(np.sort(np.argsort(-uses, kind="stable")[:count]))
    return found


def _of_feature(batch: Jagged, number: int) -> np.ndarray[Any, Any]:
    ends = batch.offsets()[batch.stride() * number :: batch.stride()][:2].tolist()
    ids: np.ndarray[Any, Any] = batch.values()[ends[0] : ends[1]].numpy()
    return ids


def _split(batch: Jagged, hot: Sequence[np.ndarray[Any, Any]]) -> tuple[Jagged, Jagged]:
    """(the batch without its hot rows, the hot ones by their places among those of the table)."""
    samples, lengths = batch.stride(), batch.lengths().numpy()
    bags = np.repeat(np.arange(len(lengths)), lengths)
    values = batch.values().numpy()
    places, is_hot = np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    for number, rows in enumerate(hot):
        of_feature = (bags // samples) == number
        found = np.minimum(np.searchsorted(rows, values[of_feature]), len(rows) - 1)
        places[of_feature], is_hot[of_feature] = found, rows[found] == values[of_feature]

    def jagged(keys: list[str], ids: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]) -> Jagged:
        counts = np.bincount(bags[chosen], minlength=len(lengths))
        return Jagged(keys, torch.from_numpy(ids[chosen]), lengths=torch.from_numpy(counts))

    return jagged(batch.keys(), values, ~is_hot), jagged([f"hf{number}" for number in range(len(hot))], places, is_hot)


class _Copies(Ours):
    """With copies of the hot rows of each table, as a data-parallel table, on every rank."""

    def __init__(self, setup: Setup, hot: Sequence[np.ndarray[Any, Any]]) -> None:
        super().__init__(setup)
        names = [f"t{number}" for number in range(len(hot))]
        for number, rows in enumerate(hot):
            config = tierstore.TableConfig(
                name=f"h{number}", feature_names=(f"hf{number}",), num_embeddings=len(rows), embedding_dim=setup.dim,
                optimizer=setup.config(number).optimizer, pooling="sum",
            )  # fmt: skip
            self.store.create_table(config, sharding_type="data_parallel")
        self._cold = ShardedTieredEmbeddingBagCollection(self.store, tables=names)
        self._hot = ShardedTieredEmbeddingBagCollection(self.store, tables=[f"h{number}" for number in range(len(hot))])

    def step(self, batch: tuple[Jagged, Jagged], gradient: torch.Tensor) -> None:
        for module, part in ((self._cold, batch[0]), (self._hot, batch[1])):
            module(part).values().backward(gradient)


def _in_rank(config: dict[str, Any]) -> list[dict[str, Any]]:
    count = RANKS * config["batches"]
    dim = config["dims"][-1]
    workload = criteo(require_criteo(), config | {"criteo_batch": config["batch"], "dim": dim}, count)
    return [_point(workload, kind, config) for kind in config["shardings"]]


def _point(workload: StepWorkload, kind: ShardingType, config: dict[str, Any]) -> dict[str, Any]:
    own, setup = workload.batches[dist.get_rank() :: RANKS], Setup(workload.rows, workload.dim, kind)
    gradient = torch.full((config["batch"], len(workload.rows) * workload.dim), 1e-3)
    plain = Ours(setup)
    contenders = {AS_IS: contender(plain, own, is_model=False)}
    systems: dict[str, Ours] = {AS_IS: plain}
    for number in config["skew_hot_rows"]:
        hot = _hot_rows(workload, number)
        parts = [_split(batch, hot) for batch in own]
        without, copies = f"without the {number} hottest rows of each table", f"copies of the {number} hottest rows"
        contenders[without] = contender(plain, [cold for cold, _ in parts], is_model=False)
        systems[without], systems[copies] = plain, (copied := _Copies(setup, hot))
        pairs: Any = parts
        contenders[copies] = Contender(
            copied,
            [pairs],
            lambda batch, copied=copied: copied.step(batch, gradient),  # type: ignore[misc]
        )
    seconds = take_turns(contenders, config["turns"])
    loads, step_s = {}, {}
    for name, each in contenders.items():
        loads[name], step_s[name] = _loads(systems[name], each.turns[0], each.step)
    for system in {id(each): each for each in systems.values()}.values():
        system.close()
    return {"sharding_type": kind, "dim": workload.dim, "seconds": seconds, "loads": loads, "step_s": step_s}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    points = []
    for of_point in zip(*run_ranks(_in_rank, RANKS, request.config), strict=True):
        first = of_point[0]
        loads = {name: [load._asdict() for load in each] for name, each in first["loads"].items()}
        step_s = {name: max(each["step_s"][name] for each in of_point) for name in first["step_s"]}
        seconds = spreads([each["seconds"] for each in of_point])
        points.append({**first, "seconds": seconds, "loads": loads, "step_s": step_s})
    return {"points": points, "batch": request.config["batch"]}


def _uneven(loads: Sequence[dict[str, Any]], what: str) -> float:
    values = [load[what] for load in loads]
    return float(max(values) * len(values) / sum(values))


def _tell(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    by_rank = [
        [
            f"{point['sharding_type']}, rank {rank}", f"{load['rows_owned']:,}", f"{load['rows_asked']:,.0f}",
            f"{load['bytes_sent'] / 1024:,.0f}", f"{1e3 * load['exchange_s']:.1f}",
            f"{load['exchange_s'] / point['step_s'][AS_IS]:.0%}",
        ]
        for point in points
        for rank, load in enumerate(point["loads"][AS_IS])
    ]  # fmt: skip
    copies = [
        [
            f"{point['sharding_type']}, {name}", f"{1e3 * point['seconds'][name]['median']:.1f}",
            f"{sum(load['bytes_sent'] for load in loads) / len(loads) / 1024:,.0f}",
            f"{_uneven(loads, 'bytes_sent'):.2f}", f"{min(load['exchange_s'] for load in loads) * 1e3:.1f}",
        ]
        for point in points
        for name, loads in point["loads"].items()
    ]  # fmt: skip
    gains = [
        1 - point["seconds"][name]["median"] / point["seconds"][AS_IS]["median"]
        for point, name in itertools.product(points, points[0]["seconds"])
        if name.startswith("copies")
    ]
    tables = [
        Table(
            title=f"what each of {RANKS} ranks does in a step of tables alone, Criteo's lookups",
            columns=["sharding", "rows owned", "rows asked of it", "KiB sent", "ms in exchanges", "of the step"],
            rows=by_rank,
        ),
        Table(
            title="a step with hot rows left out, and with copies of them on all ranks",
            columns=["sharding", "ms", "KiB a rank sends", "most over mean", "ms in exchanges, least"],
            rows=copies,
        ),
    ]
    best = Goal(
        name="share of a step that copies of hot rows save at best (built if so much)",
        value=round(max(gains), 3),
        at_most=_GAIN,
    )
    note = (
        f"Skew: {figures['batch']:,} samples a rank, dim {points[0]['dim']}. Time in exchanges has waiting for other "
        "ranks in it; the rank with the least is the one that others wait for. Copies are data-parallel tables with "
        "features of their own, whose gradients all ranks send to all. Without hot rows, nothing at all is done for "
        "them: no copies can save as much."
    )
    return Told(tables=tables, goals=[best], notes=[note])


PART: Final = Part(_measure, _tell)
