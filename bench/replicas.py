"""How soon do many replicas serve a commit, and what does the trainer send?

Hosts are network namespaces of this machine, each joined to a bridge by an interface with a rate in both directions; it
needs root, ``ip`` and ``tc``. The trainer is one, and each replica, a ``tierstore serve`` with updates. What a run that
was killed left behind is removed by the next one.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
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
from .common import Goal, Part, Report, Run, Table, Told, program, run_parts

_QUESTION: Final = "How soon do many replicas serve a commit, and what does the trainer send?"
_PREFIX: Final = "tierstore-"
_BURST_BYTES_PER_MBIT: Final = 500  # 4 ms of the rate


def _ip(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


def _python(host: str, module: str) -> list[object]:
    return ["ip", "netns", "exec", host, sys.executable, "-m", module]


def _remove_stale() -> None:
    """Namespaces, and processes in them, of runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    for name in (line.split()[0] for line in listed if line.startswith(_PREFIX)):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            for pid in found.split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("ip", "netns", "del", name)


@contextlib.contextmanager
def _hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Names of network namespaces 10.78.0.1, the trainer's, and so on."""
    _remove_stale()
    switch, *names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(count + 1)]
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST_BYTES_PER_MBIT * mbit, "latency", "400ms")
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _ip("ip", "netns", "add", name)
            stack.callback(_ip, "ip", "netns", "del", name)
        _ip("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("ip", "-n", switch, "link", "set", "br0", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            _ip("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "link0", "netns", name)
            _ip("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("ip", "-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "link0")
            for each in ("link0", "lo"):
                _ip("ip", "-n", name, "link", "set", each, "up")
            for where, link in ((switch, port), (name, "link0")):
                _ip("tc", "-n", where, "qdisc", "add", "dev", link, *limit)
        yield names


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


@contextlib.contextmanager
def _fleet(request: Run, count: int, *flags: object) -> Iterator[tuple[Path, list[object]]]:
    """A folder with so many replicas, started at once, and the beginning of a command of the trainer's."""
    shutil.rmtree(folder := request.folder / "replicas", ignore_errors=True)
    folder.mkdir(parents=True)
    (token := folder / "token").write_text("a-token")
    with _hosts(count + 1, request.config["mbit"]) as (trainer, *names), contextlib.ExitStack() as stack:
        words: list[object] = ["--updates", "--admin-host", "0.0.0.0", "--ddr", "16MiB", "--threads", "1", *flags]
        words += ["--grpc-port", "-1", "--log-level", "warning", "--admin-token-file", token]
        servers = []
        for host, name in enumerate(names):
            command = [*_python(name, "tierstore"), "serve", *words, "--store", folder / f"replica-{host}"]
            servers.append(stack.enter_context(Child(command, log=folder / f"replica-{host}.log")))
            stack.callback(servers[-1].process.terminate)
        for server in servers:
            server.line()
        yield folder, [*_python(trainer, "bench.replicas")]


def _ask(command: list[object], *words: object) -> Any:
    said = subprocess.run([*map(str, command), *map(str, words)], stdout=subprocess.PIPE, check=True).stdout
    return json.loads(said)


def _urls(count: int) -> list[str]:
    return [f"http://10.78.0.{host + 2}" for host in range(count)]


def _turns(request: Run, count: int, rows: int, ways: dict[str, tuple[int, float]]) -> list[dict[str, Any]]:
    """Medians by way, which is fan-out and urgent share: with so many replicas, which serve the version before."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with _fleet(request, count) as (folder, trainer):
        for turn in range(request.config["turns"] + 1):  # the first loads what later ones have
            for place, (way, settings) in enumerate(ways.items()):
                _change(folder / "store", request.config | {"rows": rows}, turn * len(ways) + place)
                words = ["publish", folder / "store", folder / "token", *settings, 0, *_urls(count)]
                found[way].append(_ask(trainer, *words))
                print(count, way, found[way][-1], flush=True)
    return [
        {"replicas": count, "way": way, "turns": turns[1:]}
        | {name: statistics.median(each[name] for each in turns[1:]) for name in turns[0]}
        for way, turns in found.items()
    ]


def _measure_chain(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    points = []
    for count in request.config["counts"]:
        ways = {"chain": (1, 0.0), "each": (count, 0.0)} if count > 1 else {"one": (1, 0.0)}
        points += _turns(request, count, request.config["rows"], ways)
    return {"points": points}


def _tell_chain(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    names = ("whole_seconds", "seconds", "files_sent")
    cells = [[f"{each['replicas']}", each["way"], *(f"{each[name]:.2f}" for name in names)] for each in points]
    columns = ["replicas", "sent to", "s to the last byte", "s to served on all", "files sent"]
    last = [each for each in points if each["way"] != "each"][-1]
    return Told(
        tables=[Table(title="from a commit on", columns=columns, rows=cells)],
        goals=[
            Goal(name="files that the trainer sends to the most replicas", value=last["files_sent"], at_most=2),
            Goal(
                name="time to the last byte over one replica's",
                value=last["whole_seconds"] / points[0]["whole_seconds"],
                at_most=1.5,
            ),
        ],
        notes=["To the last byte: what the links take, and making the update. All replicas apply it on one machine."],
    )


def _measure_urgent(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, points = request.config, []
    for count in config["urgent_counts"]:
        ways = {"whole": (1, 0.0), "urgent first": (1, config["urgent_share"])}
        points += _turns(request, count, config["urgent_rows"], ways)
    return {"points": points, "share": config["urgent_share"]}


def _tell_urgent(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    names = ("urgent_seconds", "seconds", "files_sent")
    columns = ["replicas", "way", "s to urgent rows served on all", "s to served on all", "files sent"]
    cells = [
        [f"{each['replicas']}", each["way"], *(f"{each[name]:.2f}" if each[name] else "" for name in names)]
        for each in points
    ]
    pairs = list(zip(points[::2], points[1::2], strict=True))
    shares = [urgent["urgent_seconds"] / whole["seconds"] for whole, urgent in pairs]
    title = f"with the most urgent {100 * figures['share']:g} % of the rows first"
    return Told(
        tables=[Table(title=title, columns=columns, rows=cells)],
        goals=[Goal(name="time to urgent rows over the whole's", value=max(shares), at_most=1 / 3)],
    )


def _clicks(folder: Path, rows: int, test_rows: int) -> dict[str, Path]:
    """Files of clicks that can be learned, by what they are for; those for harm have each label turned round."""
    shutil.rmtree(folder, ignore_errors=True)
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
    files = _clicks(request.folder / "replicas-clicks", config["train_rows"], config["watched_rows"])
    sizes = tuple(min(max(1000, size), config["table_rows"]) for size in CARDINALITIES)
    with _fleet(request, 3, "--watch", files["watched"]) as (folder, trainer):
        run = RunConfig(
            store=StoreSection(path=str(folder / "store"), ddr="200% of tables", keep=2),
            data=DataSection(format="criteo"),
            embedding=EmbeddingSection(dim=16, num_embeddings=sizes),
            model=ModelSection(bottom_mlp=(64,), top_mlp=(64,)),
        )
        for epochs, name in enumerate(("first", "good", "harmful"), 1):
            data, section = replace(run.data, path=str(files[name])), replace(run.train, epochs=epochs)
            train(replace(run, data=data, train=section), resume=epochs > 1)
            seconds = config["canary_seconds"] if epochs > 1 else 0
            words = ["publish", folder / "store", folder / "token", 1, 0, seconds, *_urls(3)]
            found[name] = _ask(trainer, *words)
            time.sleep(0 if seconds else config["canary_seconds"])  # the watch measures the first version
            print(name, found[name], flush=True)
    return {name: found[name] for name in ("good", "harmful")}


def _tell_canary(figures: dict[str, Any]) -> Told:
    good, harmful = figures["good"], figures["harmful"]
    losses = [each["watch"]["log_loss"] for each in (good, harmful)]
    said = [f"its log loss is {losses[0]:.5g}", *(error.partition(": ")[2] for error in harmful["errors"][:1])]
    named = zip(("good", "trained on labels turned round"), (good, harmful), said, strict=True)
    cells = [[name, " ".join(map(str, each["versions"])), f"{each['seconds']:.1f}", what] for name, each, what in named]
    columns = ["update", "versions served then", "seconds", "what the publisher says of the canary"]
    left = sum(after != before for after, before in zip(harmful["versions"], good["versions"], strict=True))
    return Told(
        tables=[
            Table(
                title="three replicas, the first of them a canary that watches its log loss",
                columns=columns,
                rows=cells,
            )
        ],
        goals=[
            Goal(name="replicas that do not serve the good update", value=float(bool(good["errors"])), exactly=0),
            Goal(name="replicas that serve the harmful update", value=left + float(not harmful["errors"]), exactly=0),
        ],
    )


_PARTS: Final = {
    "chain": Part(_measure_chain, _tell_chain),
    "urgent": Part(_measure_urgent, _tell_urgent),
    "canary": Part(_measure_canary, _tell_canary),
}


def run(request: Run) -> Report:
    if os.geteuid():
        raise SystemExit("This benchmark makes network namespaces, which takes root.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and remove them
    return run_parts(request, _QUESTION, _PARTS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        _in_trainer(*sys.argv[2:])
    else:
        sys.exit(program("replicas", run, parts=tuple(_PARTS)))
