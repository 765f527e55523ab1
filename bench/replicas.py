"""How soon do many replicas serve a commit, and what does the trainer send?

Hosts are network namespaces of this machine with links of a rate in both directions, which takes root, ``ip`` and
``tc``. The trainer is one, and each replica, a ``tierstore serve`` with updates.
"""

import contextlib
import json
import logging
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tierstore.system import killpoints
from tierstore.train import RunConfig, train
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, StoreSection
from tierstore.train.synthetic import CARDINALITIES, write_synthetic
from tierstore.updates.canary import Canary
from tierstore.updates.client import AdminClient, Progress
from tierstore.updates.publish import publish

from .child import Child
from .common import Goal, Part, Report, Run, Table, fresh_folder, median_of, start
from .hosts import address, joined_hosts, python_on

__all__ = ["PARTS"]


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


def _in_trainer(store: str, token_file: str, fan_out: str, urgent: str, canary: str, *urls: str) -> None:
    """Publish, and print what the bars and the interface say."""
    sent, whole = Path("/sys/class/net/link0/statistics/tx_bytes"), dict.fromkeys(urls, 0.0)
    shown = [0.0]  # seconds until all show the urgent rows
    before, started = int(sent.read_text()), time.monotonic()

    def bar(label: str) -> AbstractContextManager[Progress]:
        def show(done: int, total: int) -> None:
            if done == total and label in whole and not whole[label]:
                whole[label] = time.monotonic() - started

        return contextlib.nullcontext(show)

    def hook(name: str) -> None:
        if name == "publish: urgent rows shown":
            shown[0] = time.monotonic() - started
            whole.update(dict.fromkeys(urls, 0.0))

    killpoints.hook = hook
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of a token over plain http
    share, token, guard = float(urgent) or None, Path(token_file).read_text(), None
    if int(canary):
        guard = Canary(seconds=int(canary))
    done = publish(store, urls, token=token, fan_out=int(fan_out), urgent=share, canary=guard, bar=bar)
    errors = [each.error for each in done if each.error]
    if errors and guard is None:
        raise SystemExit("; ".join(errors))
    seconds, files = time.monotonic() - started, (int(sent.read_text()) - before) / (done[0].size_bytes or 1)
    if guard is not None:
        origins = [AdminClient(url, token=token).origin() for url in urls]
        told = {"versions": [each and each.version for each in origins], "errors": errors, "seconds": seconds}
        print(json.dumps(told | {"watch": AdminClient(urls[0], token=token).status(1)["watch"]}))
        return
    told = {"seconds": seconds, "whole_seconds": max(whole.values()), "files_sent": round(files, 3)}
    print(json.dumps(told | {"urgent_seconds": shown[0]}))


class _Fleet:
    """So many replicas, started at once, and a trainer, all in one folder."""

    def __init__(self, request: Run, count: int, stack: contextlib.ExitStack, *flags: object) -> None:
        self.folder = folder = stack.enter_context(fresh_folder(request.folder / "replicas"))
        folder.mkdir(parents=True)
        (token := folder / "token").write_text("a-token")
        self.store, self._urls = folder / "store", [f"http://{address(host + 1)}" for host in range(count)]
        trainer, *names = stack.enter_context(joined_hosts(count + 1, request.config["mbit"]))
        self._publish = [*python_on(trainer, "bench.replicas"), "publish", self.store, token]
        words: list[object] = ["--updates", "--admin-host", "0.0.0.0", "--ddr", "16MiB", "--threads", "1", *flags]
        words += ["--grpc-port", "-1", "--log-level", "warning", "--admin-token-file", token]
        servers = []
        for host, name in enumerate(names):
            command = [*python_on(name, "tierstore"), "serve", *words, "--store", folder / f"replica-{host}"]
            servers.append(stack.enter_context(Child(command, log=folder / f"replica-{host}.log")))
            stack.callback(servers[-1].process.terminate)
        for server in servers:
            server.line()

    def publish(self, fan_out: int = 1, urgent: float = 0.0, canary: int = 0) -> Any:
        """What the trainer found. ``urgent``: share of the rows; ``canary``: seconds that the first replica watches."""
        command = [*self._publish, fan_out, urgent, canary, *self._urls]
        return json.loads(subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True).stdout)


def _turns(request: Run, count: int, rows: int, ways: dict[str, tuple[int, float]]) -> list[dict[str, Any]]:
    """Medians by way, which is fan-out and urgent share: with so many replicas, which serve the version before."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        fleet = _Fleet(request, count, stack)
        for turn in range(request.config["turns"] + 1):  # the first loads what later ones have
            for place, (way, settings) in enumerate(ways.items()):
                _change(fleet.store, request.config | {"rows": rows}, turn * len(ways) + place)
                found[way].append(fleet.publish(*settings))
                print(count, way, found[way][-1], flush=True)
    return [{"replicas": count, "way": way, "turns": turns[1:]} | median_of(turns[1:]) for way, turns in found.items()]


def _measure_chain(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    points = []
    for count in request.config["counts"]:
        ways = {"chain": (1, 0.0), "each": (count, 0.0)} if count > 1 else {"one": (1, 0.0)}
        points += _turns(request, count, request.config["rows"], ways)
    return {"points": points}


def _measure_urgent(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, points = request.config, []
    for count in config["urgent_counts"]:
        ways = {"whole": (1, 0.0), "urgent first": (1, config["urgent_share"])}
        points += _turns(request, count, config["urgent_rows"], ways)
    return {"points": points, "share": config["urgent_share"]}


def _table(title: str, way: str, columns: dict[str, str], points: list[dict[str, Any]]) -> Table:
    rows = [
        [f"{each['replicas']}", each["way"], *(f"{each[name]:.2f}" if each[name] else "" for name in columns)]
        for each in points
    ]
    return Table(title, ["replicas", way, *columns.values()], rows)


_SERVED: Final = {"seconds": "s to served on all", "files_sent": "files sent"}


def _tell_chain(figures: dict[str, Any]) -> Report:
    points = figures["points"]
    last, columns = [each for each in points if each["way"] != "each"][-1], {"whole_seconds": "s to the last byte"}
    times = last["whole_seconds"] / points[0]["whole_seconds"]
    return Report(
        [_table("from a commit on", "sent to", columns | _SERVED, points)],
        [
            Goal("files that the trainer sends to the most replicas", last["files_sent"], at_most=2),
            Goal("time to the last byte over one replica's", times, at_most=1.5),
        ],
        ["To the last byte: what the links take, and making the update. All replicas apply it on one machine."],
    )


def _tell_urgent(figures: dict[str, Any]) -> Report:
    points, columns = figures["points"], {"urgent_seconds": "s to urgent rows served on all"} | _SERVED
    pairs = zip(points[::2], points[1::2], strict=True)
    worst = max(urgent["urgent_seconds"] / whole["seconds"] for whole, urgent in pairs)
    title = f"with the most urgent {100 * figures['share']:g} % of the rows first"
    goal = Goal("time to urgent rows over the whole's", worst, at_most=1 / 3)
    return Report([_table(title, "way", columns, points)], [goal])


def _clicks(folder: Path, rows: int, test_rows: int) -> dict[str, Path]:
    """Files of clicks that can be learned, by what they are for; those for harm have each label turned round."""
    folder.mkdir(parents=True)
    lines = write_synthetic(folder / "all", train_rows=2 * rows, test_rows=test_rows).path.read_text().splitlines()
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
        fleet = _Fleet(request, 3, stack, "--watch", files["watched"])
        run = RunConfig(
            store=StoreSection(path=str(fleet.store), ddr="200% of tables", keep=2),
            data=DataSection(format="criteo"),
            embedding=EmbeddingSection(dim=16, num_embeddings=sizes),
            model=ModelSection(bottom_mlp=(64,), top_mlp=(64,)),
        )
        for epochs, name in enumerate(("first", "good", "harmful"), 1):
            data, section = replace(run.data, path=str(files[name])), replace(run.train, epochs=epochs)
            train(replace(run, data=data, train=section), resume=epochs > 1)
            seconds = config["canary_seconds"] if epochs > 1 else 0
            found[name] = fleet.publish(canary=seconds)
            time.sleep(0 if seconds else config["canary_seconds"])  # the watch measures the first version
            print(name, found[name], flush=True)
    return {name: found[name] for name in ("good", "harmful")}


def _tell_canary(figures: dict[str, Any]) -> Report:
    good, harmful = figures["good"], figures["harmful"]
    said = [f"its log loss is {good['watch']['log_loss']:.5g}"]
    said += [error.partition(": ")[2] for error in harmful["errors"][:1]]
    named = zip(("good", "trained on labels turned round"), (good, harmful), said, strict=True)
    rows = [[name, " ".join(map(str, each["versions"])), f"{each['seconds']:.1f}", what] for name, each, what in named]
    columns = ["update", "versions served then", "seconds", "what the publisher says of the canary"]
    left = sum(after != before for after, before in zip(harmful["versions"], good["versions"], strict=True))
    title = "three replicas, the first of them a canary that watches its log loss"
    return Report(
        [Table(title, columns, rows)],
        [
            Goal("replicas that do not serve the good update", float(bool(good["errors"])), exactly=0),
            Goal("replicas that serve the harmful update", left + float(not harmful["errors"]), exactly=0),
        ],
    )


PARTS: Final = {
    "chain": Part(_measure_chain, _tell_chain),
    "urgent": Part(_measure_urgent, _tell_urgent),
    "canary": Part(_measure_canary, _tell_canary),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        _in_trainer(*sys.argv[2:])
    else:
        start("replicas")
