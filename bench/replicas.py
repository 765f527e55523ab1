"""How soon do many replicas serve a commit, and what does the trainer send?

Hosts are network namespaces of this machine, each joined to a bridge by an interface with a rate in both directions; it
needs root, ``ip`` and ``tc``. The trainer is one, and each replica, a ``tierstore serve`` with updates.
"""

import contextlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tierstore.updates.client import Progress
from tierstore.updates.publish import publish

from .child import Child
from .common import Goal, Report, Run, Table, program

_BURST_BYTES_PER_MBIT: Final = 500  # 4 ms of the rate


def _ip(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


def _python(host: str, module: str) -> list[object]:
    return ["ip", "netns", "exec", host, sys.executable, "-m", module]


@contextlib.contextmanager
def _hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Names of network namespaces 10.78.0.1, the trainer's, and so on."""
    switch, *names = [f"tierstore-{os.getpid()}-{host}" for host in range(count + 1)]
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


def _in_trainer(store: str, token_file: str, fan_out: str, *urls: str) -> None:
    """Publish, and print what the bars and the interface say."""
    sent, whole = Path("/sys/class/net/link0/statistics/tx_bytes"), dict.fromkeys(urls, 0.0)
    before, started = int(sent.read_text()), time.monotonic()

    def bar(label: str) -> AbstractContextManager[Progress]:
        def show(done: int, total: int) -> None:
            if done == total and label in whole and not whole[label]:
                whole[label] = time.monotonic() - started

        return contextlib.nullcontext(show)

    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of a token over plain http
    done = publish(store, urls, token=Path(token_file).read_text(), fan_out=int(fan_out), bar=bar)
    if errors := [each.error for each in done if each.error]:
        raise SystemExit("; ".join(errors))
    seconds, files = time.monotonic() - started, (int(sent.read_text()) - before) / done[0].size_bytes
    print(json.dumps({"seconds": seconds, "whole_seconds": max(whole.values()), "files_sent": round(files, 3)}))


def _measure(request: Run, count: int) -> dict[str, list[dict[str, float]]]:
    """By way, of each turn: with so many replicas, which serve the version before."""
    config, folder = request.config, request.folder / "replicas"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (token := folder / "token").write_text("a-token")
    urls = [f"http://10.78.0.{host + 2}" for host in range(count)]
    ways = {"chain": 1, "each": count} if count > 1 else {"one": 1}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with _hosts(count + 1, config["mbit"]) as (trainer, *names), contextlib.ExitStack() as stack:
        flags: list[object] = ["--updates", "--admin-host", "0.0.0.0", "--ddr", "16MiB", "--threads", "1"]
        flags += ["--grpc-port", "-1", "--log-level", "warning", "--admin-token-file", token]
        for host, name in enumerate(names):
            command = [*_python(name, "tierstore"), "serve", *flags, "--store", folder / f"replica-{host}"]
            server = stack.enter_context(Child(command, log=folder / f"replica-{host}.log"))
            stack.callback(server.process.terminate)
            server.line()
        for turn in range(config["turns"] + 1):  # the first loads what later ones have
            for way, fan_out in ways.items():
                _change(folder / "store", config, turn * len(ways) + fan_out)
                command = [*_python(trainer, "bench.replicas"), "publish", folder / "store", token, fan_out, *urls]
                said = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True).stdout
                found[way].append(json.loads(said))
                print(count, way, found[way][-1], flush=True)
    return {way: each[1:] for way, each in found.items()}


def run(request: Run) -> Report:
    if os.geteuid():
        raise SystemExit("This benchmark makes network namespaces, which takes root.")
    points = [
        {"replicas": count, "way": way, "turns": turns}
        | {name: statistics.median(each[name] for each in turns) for name in turns[0]}
        for count in request.config["counts"]
        for way, turns in _measure(request, count).items()
    ]
    names = ("whole_seconds", "seconds", "files_sent")
    cells = [[f"{each['replicas']}", each["way"], *(f"{each[name]:.2f}" for name in names)] for each in points]
    columns = ["replicas", "sent to", "s to the last byte", "s to served on all", "files sent"]
    last = [each for each in points if each["way"] != "each"][-1]
    return Report(
        question="How soon do many replicas serve a commit, and what does the trainer send?",
        tables=[Table(title="from a commit on", columns=columns, rows=cells)],
        figures={"points": points},
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        _in_trainer(*sys.argv[2:])
    else:
        sys.exit(program("replicas", run))
