"""How soon do many replicas serve a commit, and what does the trainer send?

Hosts are network namespaces of this machine with links of a rate in both directions, which takes root, ``ip`` and
``tc``. The trainer is one, and each replica, a ``tierstore serve`` with updates.
"""

import contextlib
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tierstore.train import RunConfig, train
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, StoreSection
from tierstore.train.demo import CARDINALITIES, write_synthetic
from tierstore.updates.fetch import Source

from .child import Child
from .common import Goal, Part, Report, Run, Table, fresh_folder, median_of, start
from .hosts import address, joined_hosts, python_on

_HEADS: Final = 2
"""Replicas that follow the trainer."""
_LOOK_SECONDS: Final = 0.05


def _change(store: Path, config: dict[str, Any], seed: int) -> None:
    """A commit of all rows anew, which do not compress."""
    generator = torch.Generator().manual_seed(seed)
    with tierstore.open(store, ddr="64MiB", keep=2) as opened:
        rows, dim = config["rows"], config["dim"]
        table = opened.create_table(tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim))
        for first in range(0, rows, 10_000):
            ids = torch.arange(first, min(first + 10_000, rows))
            table.write(ids, torch.randn(len(ids), dim, generator=generator))
        opened.commit()


def _in_trainer(token_file: str, *urls: str) -> None:
    """Look at lists of updates, the publisher's first, as lines say: "start", or a version to wait for."""
    sent, token = Path("/sys/class/net/link0/statistics/tx_bytes"), Path(token_file).read_text()
    publisher, *replicas = [Source(url, token) for url in urls]
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of a token over plain http
    before, started = 0, 0.0
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "start\n":
            before, started = int(sent.read_text()), time.monotonic()
            print(line, end="", flush=True)
            continue
        version, urgent, why = int(line), 0.0, ""
        while True:
            shown = [each.poll().shown for each in replicas]
            versions = [each.version if each else 0 for each in shown]
            if not urgent and all(each and (each.urgent or each.version == version) for each in shown):
                urgent = time.monotonic() - started
            listing = publisher.poll()
            declined = [each for each in listing.verdicts if each.version == version and not each.is_approved]
            if set(versions) == {version} or (declined and version not in versions):
                why = declined[0].why if declined else ""
                break
            time.sleep(_LOOK_SECONDS)
        told = {"seconds": time.monotonic() - started, "urgent_seconds": urgent, "versions": versions, "why": why}
        size = max((each.size_bytes for each in listing.files if each.since), default=1)
        print(json.dumps(told | {"files_sent": (int(sent.read_text()) - before) / size}), flush=True)


class _Fleet:
    """A publisher, and so many replicas: two that follow it, each other one the two before it."""

    def __init__(
        self, request: Run, count: int, stack: contextlib.ExitStack, *, publish: list[object], serve: list[object],
        canary: bool = False,
    ) -> None:  # fmt: skip
        self.folder = folder = stack.enter_context(fresh_folder(request.folder / "replicas"))
        folder.mkdir(parents=True)
        (token := folder / "token").write_text("a-token")
        self.store = folder / "store"
        trainer, *names = stack.enter_context(joined_hosts(count + 1, request.config["mbit"]))
        urls = [f"http://{address(host)}" for host in range(count + 1)]
        self._publish = [*python_on(trainer, "tierstore"), "publish", self.store, "--host", "0.0.0.0", *publish]
        self._publish += ["--token-file", token, *(["--canary", urls[1]] if canary else [])]
        self._stack, self._token = stack, token
        words: list[object] = ["--admin-host", "0.0.0.0", "--ddr", "16MiB", "--threads", "1", *serve]
        words += ["--grpc-port", "-1", "--log-level", "warning", "--admin-token-file", token]
        servers = []
        for host, name in enumerate(names):
            sources = [urls[0]] if host < _HEADS else urls[host - 1 : host + 1]
            command = [*python_on(name, "tierstore"), "serve", *words, "--store", folder / f"replica-{host}"]
            command += [word for url in sources for word in ("--from", url)] + ["--canary"] * (canary and not host)
            servers.append(stack.enter_context(Child(command, log=folder / f"replica-{host}.log")))
            stack.callback(servers[-1].process.terminate)
        for server in servers:
            server.line()
        self._watch = stack.enter_context(Child([*python_on(trainer, "bench.replicas"), "watch", token, *urls]))
        self._watch.line()

    def begin(self) -> None:
        """Start the publisher, once there is a store."""
        process = self._stack.enter_context(Child(self._publish, log=self.folder / "publish.log"))
        self._stack.callback(process.process.terminate)

    def start(self) -> None:
        """Measure from now on."""
        self._watch.ask("start")

    def wait(self, version: int) -> Any:
        """Until all serve a version, or it was declined; what the trainer's host found."""
        return json.loads(self._watch.ask(str(version)))


def _turns(request: Run, count: int, rows: int, way: str, *flags: object) -> dict[str, Any]:
    """Medians, with so many replicas, which serve the version before."""
    found: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        fleet = _Fleet(request, count, stack, publish=[*flags], serve=[])
        for turn in range(request.config["turns"] + 2):  # the first is a full copy, the next loads what later ones have
            _change(fleet.store, request.config | {"rows": rows}, turn)
            if turn == 0:
                fleet.begin()
            fleet.start()
            found.append(fleet.wait(turn + 1))
    kept = [{name: value for name, value in each.items() if isinstance(value, float)} for each in found[2:]]
    return {"replicas": count, "way": way, "turns": kept} | median_of(kept)


def _measure_pulled(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    counts = request.config["counts"]
    return {"points": [_turns(request, count, request.config["rows"], "pulled") for count in counts]}


def _measure_urgent(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    counts, rows, share = (request.config[f"urgent_{name}"] for name in ("counts", "rows", "share"))
    ways = {"whole": (), "urgent first": ("--urgent", share)}
    points = [_turns(request, count, rows, way, *flags) for count in counts for way, flags in ways.items()]
    return {"points": points, "share": share}


def _table(title: str, columns: dict[str, str], points: list[dict[str, Any]]) -> Table:
    rows = [
        [f"{each['replicas']}", each["way"], *(f"{each[name]:.2f}" if each[name] else "" for name in columns)]
        for each in points
    ]
    return Table(title, ["replicas", "way", *columns.values()], rows)


_SERVED: Final = {"seconds": "s to served on all", "files_sent": "files sent"}


def _tell_pulled(figures: dict[str, Any]) -> Report:
    first, *_, last = points = figures["points"]
    goals = [
        Goal("files that the trainer sends to the most replicas", last["files_sent"], at_most=2.2),
        Goal("time until all serve it over one replica's", last["seconds"] / first["seconds"], at_most=3),
    ]
    note = "The commit, and making the update, count. All replicas apply it on one machine."
    return Report([_table("from before a commit on", _SERVED, points)], goals, [note])


def _tell_urgent(figures: dict[str, Any]) -> Report:
    points, columns = figures["points"], {"urgent_seconds": "s to urgent rows served on all"} | _SERVED
    pairs = zip(points[::2], points[1::2], strict=True)
    worst = max(urgent["urgent_seconds"] / whole["seconds"] for whole, urgent in pairs)
    title = f"with the most urgent {100 * figures['share']:g} % of the rows first"
    goal = Goal("time to urgent rows over the whole's", worst, at_most=1 / 3)
    return Report([_table(title, columns, points)], [goal])


def _clicks(folder: Path, rows: int, test_rows: int) -> dict[str, Path]:
    """Files of clicks that can be learned, by what they are for; those for harm have each label turned round."""
    folder.mkdir(parents=True)
    write_synthetic(folder / "all", train_rows=2 * rows, test_rows=test_rows)
    lines = (folder / "all").read_text().splitlines()
    first, second = lines[:rows], lines[rows : 2 * rows]
    turned = [f"{1 - int(line[0])}{line[1:]}" for line in second]
    parts = {"first": first, "good": second, "harmful": turned, "watched": lines[2 * rows :]}
    for name, part in parts.items():
        (folder / name).write_text("\n".join(part) + "\n")
    return {name: folder / name for name in parts}


def _measure_canary(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, found = request.config, {}
    sizes = tuple(min(max(1000, size), config["table_rows"]) for size in CARDINALITIES)
    with fresh_folder(request.folder / "replicas-clicks") as clicks, contextlib.ExitStack() as stack:
        files = _clicks(clicks, config["train_rows"], config["watched_rows"])
        serve = ["--watch", files["watched"], "--canary-seconds", config["canary_seconds"]]
        fleet = _Fleet(request, 3, stack, publish=[], serve=serve, canary=True)
        run = RunConfig(
            store=StoreSection(path=str(fleet.store), ddr="200% of tables", keep=2),
            data=DataSection(format="criteo"),
            embedding=EmbeddingSection(dim=16, num_embeddings=sizes),
            model=ModelSection(bottom_mlp=(64,), top_mlp=(64,)),
        )
        for epochs, name in enumerate(("first", "good", "harmful"), 1):
            data, section = replace(run.data, path=str(files[name])), replace(run.train, epochs=epochs)
            train(replace(run, data=data, train=section), resume=epochs > 1)
            if epochs == 1:
                fleet.begin()
            fleet.start()
            with tierstore.open(fleet.store, mode="r", ddr="64MiB") as store:
                found[name] = fleet.wait(store.version) | {"version": store.version}
            time.sleep(0 if epochs > 1 else config["canary_seconds"])  # the watch measures the first version
    return {name: found[name] for name in ("good", "harmful")}


def _tell_canary(figures: dict[str, Any]) -> Report:
    both = {"good": figures["good"], "trained on labels turned round": figures["harmful"]}
    rows = [
        [name, " ".join(map(str, each["versions"])), f"{each['seconds']:.1f}", each["why"] or "approved"]
        for name, each in both.items()
    ]
    columns = ["update", "versions served then", "seconds", "the canary's verdict"]
    title = "three replicas, the first of them a canary that watches its log loss"
    good, harmful = (each["versions"].count(each["version"]) for each in both.values())
    goals = [
        Goal("replicas that do not serve the good update", 3.0 - good, exactly=0),
        Goal("replicas that serve the harmful update", float(harmful), exactly=0),
    ]
    return Report([Table(title, columns, rows)], goals)


PARTS: Final = {
    "pulled": Part(_measure_pulled, _tell_pulled),
    "urgent": Part(_measure_urgent, _tell_urgent),
    "canary": Part(_measure_canary, _tell_canary),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["watch"]:
        _in_trainer(*sys.argv[2:])
    else:
        start("replicas")
