"""``tierstore serve``: a flag for each field of ``ServeConfig``, and a file of the same keys."""

import argparse
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..settings.names import nearest
from . import waiting_threads
from .config import ServeConfig

if TYPE_CHECKING:
    from .program import Ports

__all__ = ["add_arguments", "serve"]

_METAVARS: Final = {
    "store": "DIR",
    "ddr": "SIZE",
    "pooled_cache": "SIZE",
    "dtype": "NAME",
    "policy": "NAME",
    "record": "FILE.npz",
    "record_rate": "X",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; what is not given is None."""
    parser.add_argument("file", metavar="FILE.toml", nargs="?", help="settings; keys as the flags, with _ for -")
    for each in fields(ServeConfig):
        flag, default = "--" + each.name.replace("_", "-"), each.default
        text = str(each.metadata["help"]).replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=text)
            continue
        text += f" (default: {str(default).replace('%', '%%')})" if default not in ("", 0) else ""
        kind = str if each.name == "pooled_cache" else type(default)
        metavar = _METAVARS.get(each.name, {int: "N", float: "SECONDS"}.get(kind, "TEXT"))
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)


def serve(options: argparse.Namespace) -> int:
    """Serve as the flags say; returns the exit status.

    Raises:
        ImportError: what only servers need is not installed. StoreNotFoundError, DamagedError: there is no store.
    """
    try:
        from ..store.manifest import Manifest
        from ..store.recording import require_recordable
        from .program import run
        from .workers import recording_paths, run_workers
    except ImportError as error:
        raise ImportError(f"{error}; a server needs more packages: pip install 'tierstore[serve]'") from None
    names = [each.name for each in fields(ServeConfig)]
    given = _read(Path(options.file), names) if options.file else {}
    given |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    try:
        config = ServeConfig(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None

    if not config.updates:  # a replica may wait for its store; else it is told before a port is opened
        Manifest.read(Path(config.store).absolute())
    for path in recording_paths(config):
        require_recordable(path)

    def tell(ports: "Ports") -> None:
        scheme = "https" if config.tls_certificate else "http"
        places = [f"REST {scheme}://{config.host}:{ports.rest}"]
        places += [f"gRPC {config.host}:{ports.grpc}"] if ports.grpc >= 0 else []
        places += [f"status {scheme}://{config.admin_host}:{ports.admin}/"] if ports.admin >= 0 else []
        print(f"ready: {', '.join(places)}", flush=True)

    if config.workers > 1:
        waiting_threads.set_for_children()
        return run_workers(config, on_ready=tell)
    if config.num_threads > 1 and not waiting_threads.is_set():
        waiting_threads.begin_anew(options.words)
    return run(config, on_ready=tell)


def _read(path: Path, names: list[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for name in found:
        if name not in names:
            raise ValueError(f"{path}: unknown key {name!r}; {nearest(name, names)}")
    return found
