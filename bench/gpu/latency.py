"""Latency of lookups: a tenth of the rows in device memory, the rest in host memory, nothing prefetched."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

import tierstore

from ..common import Report, Table, fresh_folder
from ..workload import make_store
from .rig import Rig, Zipf
from .stores import fill_host_memory, hbm_bytes

_QUANTILES: Final = (50, 95, 99)
_TOLD: Final = ("tables", "rows", "dim", "hbm_share", "exponent", "published_by", "published_note")


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    sizes = [config["rows"]] * config["tables"]
    zipf = Zipf(rig, config["rows"], config["exponent"])
    budget = hbm_bytes(config["hbm_share"] * sum(sizes), 4 * config["dim"])
    shape = {"rows": sizes, "dim": config["dim"], "ddr": config["ddr"], "hbm": budget, "device": str(rig.device)}
    rule = tierstore.optim.SGD(lr=0.1)
    with fresh_folder(folder / "gpu-latency") as path, make_store(path, optimizer=rule, **shape) as store:
        fill_host_memory(store)
        collection = tierstore.TieredEmbeddingBagCollection(store)
        weights = torch.rand((sum(sizes), config["dim"]), generator=rig.generator, device=rig.device)
        cases = [_measure(rig, collection, weights, zipf, case, config) for case in config["cases"]]
    return {"cases": cases} | {name: config[name] for name in _TOLD}


def _requests(zipf: Zipf, batch: int, count: int, tables: int) -> list[tierstore.KeyedJaggedTensor]:
    names = [f"f{number}" for number in range(tables)]
    offsets = torch.arange(tables * batch + 1)
    return [tierstore.KeyedJaggedTensor(names, zipf.draw(tables * batch).cpu(), offsets=offsets) for _ in range(count)]


def _measure(
    rig: Rig, collection: tierstore.TieredEmbeddingBagCollection, weights: Tensor, zipf: Zipf, case: dict[str, Any],
    config: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    batch, store = case["batch"], collection.store
    first = torch.arange(config["tables"]).repeat_interleave(batch) * config["rows"]
    bags = torch.arange(config["tables"] * batch + 1, device=rig.device)

    def own(request: tierstore.KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = collection(request).values()
        return pooled

    def in_device_memory(request: tierstore.KeyedJaggedTensor) -> Tensor:
        ids = (request.values() + first).to(rig.device)
        return embedding_bag(ids, weights, bags, mode="sum", include_last_offset=True)

    with torch.no_grad():
        for request in _requests(zipf, batch, case["warm_up"], config["tables"]):
            own(request)
            in_device_memory(request)
        before = store.stats().hbm
        requests = _requests(zipf, batch, case["requests"], config["tables"])
        taken: dict[str, list[float]] = {"tierstore": [], "torch": []}
        for request in requests:
            taken["tierstore"].append(rig.seconds(lambda: own(request)))  # noqa: B023
            taken["torch"].append(rig.seconds(lambda: in_device_memory(request)))  # noqa: B023
    after = store.stats().hbm
    return {
        "batch": batch,
        "requests": len(requests),
        "hit_rate": (after.hits - before.hits) / (after.unique - before.unique),
        "capacity_rows": after.capacity_rows,
        "published_us": case["published_us"],
        "latency_us": {
            name: {f"p{quantile}": float(np.percentile(seconds, quantile)) * 1e6 for quantile in _QUANTILES}
            for name, seconds in taken.items()
        },
    }


def tell(found: dict[str, Any]) -> Report:
    names = {"tierstore": "tierstore", "torch": "torch EmbeddingBag, all rows in device memory"}
    rows = []
    for case in found["cases"]:
        for name, shown in names.items():
            hits = f"{case['hit_rate']:.1%}" if name == "tierstore" else ""
            cells = [f"{case['latency_us'][name][f'p{quantile}']:,.0f}" for quantile in _QUANTILES]
            rows.append([f"{case['batch']:,} samples: {shown}", hits, *cells])
        published = f"{case['batch']:,} samples: {found['published_by']}"
        rows.append([published, "", f"{case['published_us']:,.0f}", "", ""])
    title = (
        f"lookups of {found['tables']} features of dim {found['dim']}, {found['tables'] * found['rows']:,} rows, "
        f"{found['hbm_share']:.0%} of them in device memory, the rest in host memory"
    )
    note = (
        f"Lookups: from ids on the host to pooled rows on the device, one id a feature, Zipf {found['exponent']}, one "
        f"request at a time, none seen before ({', '.join(str(case['requests']) for case in found['cases'])} of "
        f"them); hits: of distinct ids. {found['published_note']}"
    )
    return Report([Table(title, ["", "hits", "p50 us", "p95 us", "p99 us"], rows)], notes=[note])
