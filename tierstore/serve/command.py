"""``tierstore serve``: a flag for each field of ``ServeConfig``, and a file of the same keys."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from ..settings.sections import described, nearest, read_toml
from ..system.checks import packages_for
from ..system.processes import address
from ..system.signals import handlers_restored
from .config import ServeConfig

if TYPE_CHECKING:
    from .program import Ports

_WAIT_POLICY: Final = "OMP_WAIT_POLICY"
"""How the threads of a lookup and of the model wait for each other: asleep.

By default those of torch spin, each on a core, while they wait. Alongside the event loop, and whatever else the machine
runs, that starves the one they wait for: with two threads on two cores a ranking query of 200 samples took 30 ms
instead of 5. OpenMP reads how to wait when it is loaded, before any code of ours, so the process begins again once."""
_METAVARS: Final = {
    "store": "DIR", "model": "FILE.pt2", "ddr": "SIZE", "record": "FILE.npz", "record_rate": "X", "watch": "FILE",
    "watch_loss": "X", "sources": "URL", "canary_loss": "X", "canary_errors": "X", "canary_p99": "X",
}  # fmt: skip


_FLAGS: Final = {"sources": "--from"}


class _Once(argparse.Action):
    """Of two the first would be lost unseen."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        if getattr(namespace, self.dest) is not None or ("=" in value and not Path(value).exists()):
            parser.error(f"{self.option_strings[0]} takes one folder; a file lists several stores, as [[stores]]")
        setattr(namespace, self.dest, value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; what is not given is None."""
    parser.add_argument("file", metavar="FILE.toml", nargs="?", help="settings; keys as the flags, with _ for -")
    hints = get_type_hints(ServeConfig)
    for each in (each for each in fields(ServeConfig) if each.name != "stores"):  # which a file gives
        flag, default = _FLAGS.get(each.name, "--" + each.name.replace("_", "-")), each.default
        text = str(each.metadata["help"]).replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=text)
            continue
        text += f" (default: {str(default).replace('%', '%%')})" if default not in ("", 0, ()) else ""
        kind, choices = type(default), get_args(hints[each.name]) if get_origin(hints[each.name]) is Literal else None
        metavar = _METAVARS.get(each.name, {int: "N", float: "SECONDS"}.get(kind, "TEXT"))
        actions: dict[str, Any] = {"sources": "append", "store": _Once}
        action, kind = actions.get(each.name, "store"), str if each.name == "sources" else kind
        parser.add_argument(
            flag, type=kind, metavar=None if choices else metavar, choices=choices, help=text, action=action,
            dest=each.name,
        )  # fmt: skip


def serve(options: argparse.Namespace) -> int:
    """Serve as the flags say; returns the exit status. ImportError: what only servers need is not installed.
    StoreNotFoundError, DamagedError: there is no store."""
    with packages_for("a server", "'PATH_OF_THE_CHECKOUT[serve]'"):
        from ..store.directory import require_store
        from ..store.recording import require_recordable
        from .program import recording_paths, run, run_workers
    names = [each.name for each in fields(ServeConfig)]
    given = _read(Path(options.file), names) if options.file else {}
    given |= {name: flag for name in names if (flag := getattr(options, name, None)) is not None}
    if options.store:
        given["stores"] = []
    config = described(ServeConfig, given)
    if not config.sources:  # a replica may wait for its store; else it is reported before a port is opened
        for each in config.by_store().values():
            require_store(Path(each.store).absolute())
    for path in recording_paths(config):
        require_recordable(path)

    def tell(ports: "Ports") -> None:
        scheme = "https" if config.tls_certificate else "http"
        places = [f"REST {scheme}://{address(config.host, ports.rest)}"]
        places += [f"gRPC {address(config.host, ports.grpc)}"] if ports.grpc >= 0 else []
        places += [f"admin {scheme}://{address(config.admin_host, ports.admin)}"] if ports.admin >= 0 else []
        print(f"ready: {', '.join(places)}", flush=True)

    is_said = _WAIT_POLICY in os.environ
    os.environ.setdefault(_WAIT_POLICY, "PASSIVE")
    if config.workers > 1:
        return run_workers(config, on_ready=tell)
    if config.num_threads > 1 and not is_said:
        begin_anew(options.words)
    with handlers_restored(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return run(config, on_ready=tell)


def _read(path: Path, names: list[str]) -> dict[str, Any]:
    found = {
        "sources" if name == "from" else name: value for name, value in read_toml(path, "file of settings").items()
    }
    for name in found:
        if name not in names:
            raise ValueError(f"{path}: unknown key {name!r}; {nearest(name, names)}")
    return found


def begin_anew(words: Sequence[str]) -> None:
    """Become ``tierstore WORDS`` again, in the environment of now and with the interpreter's own arguments."""
    sys.stdout.flush()
    sys.stderr.flush()
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    begun = own if own and sys.orig_argv[1 + len(own) :] == list(words) else ["-m", "tierstore"]
    os.execv(sys.executable, [sys.executable, *begun, *words])
