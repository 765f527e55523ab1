"""The commands that move tables between stores and files. What they need is imported when they run."""

import argparse
import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import TableError
from ..system.checks import excerpt, packages_for, require_int
from ..system.sizes import format_count, format_size
from ..system.terminal import arg, byte_bar, command, progress_bar

if TYPE_CHECKING:
    from .. import optim
    from ..exchange import ImportReport

_DDR: Final = "256MiB"
_SHOWN: Final = 10
_FILES: Final = ("rows.lmdb", "manifest.json")  # of a backup
_NEW: Final = ("new tables", "what the file does not say; tables that are there keep theirs")
_ARGUMENTS: Final = {
    r"mapping=\{'?(.*?)'?: '?([^'{}]*)'?\}": r"--map \1=\2",
    r'dtype="(\w+)"': r"--dtype \1",
    r"optimizer=RowWiseAdagrad\(\)": "--optimizer rowwise_adagrad",
    r"optimizer=Adagrad\(\)": "--optimizer adagrad",
    r"optimizer=Adam\(\)": "--optimizer adam",
}
"""Arguments of ``import_files``, as its messages name them, and the flags for them."""
_BY_LOSS: Final = ("by the log loss", "choose the type of each table and layer of a run, in place of --dtype")
_KEY: Final = "embedding_bags.{table}.weight"
_SMALLER: Final = ("int8", "int4", "float16", "bfloat16")
OPTIMIZERS: Final = ("sgd", "rowwise_adagrad", "adagrad", "adam")
_POOLINGS: Final = ("sum", "mean", "max")
_DTYPES: Final = ("float32", "float16", "bfloat16")
DIRECTORY: Final = arg("directory", metavar="DIR", help="folder of the store")
_NEW_DIRECTORY: Final = arg("target", metavar="NEW_DIR", help="folder of the new store; must not exist, or be empty")
_VERSION: Final = arg("--at", type=int, metavar="VERSION", help="a version that the store keeps; default: the last")
_MEMORY: Final = arg("--ddr", default=_DDR, metavar="SIZE", help=f"memory for rows (default: {_DDR})")


def require_outputs(named: Mapping[str, str | None], sources: Sequence[str | None] = (), *, force: bool) -> None:
    """Report what would prevent the files that are written in the end, by their flags, before minutes of work."""
    from ..system.files import require_new, require_other

    paths = [Path(name) for name in named.values() if name]
    for path in paths:
        require_other(path, [each for each in sources if each])
        require_new(path, force=force)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"{' and '.join(named)} are both {paths[0]}; give each a name of its own")


def _export(options: argparse.Namespace) -> int:
    from ..exchange import export_store

    with byte_bar("export") as show:
        given = {name: getattr(options, name) for name in ("key", "state", "dense", "force", "ddr")}
        report = export_store(
            options.directory, options.out, tables=options.table, version=options.at, progress=show, **given
        )
    tensors = f" in {format_count(len(report.keys), 'tensor')}" * bool(report.keys)
    rows, size = format_count(report.rows, "row"), format_size(report.size_bytes)
    print(f"{report.path}: version {report.version}, {rows}{tensors}, {size}")
    _print_some("", report.keys)
    return 0


def _import(options: argparse.Namespace) -> int:
    from ..exchange import import_files

    mapping, optimizer = _mapping(options.map), _optimizer(options)
    given = {name: getattr(options, name) for name in ("dtype", "pooling", "ddr")}
    try:
        with byte_bar("import") as show:
            report = import_files(
                options.directory, options.files, mapping=mapping, optimizer=optimizer, progress=show, **given
            )
    except (ValueError, TableError) as error:
        if type(error) not in (ValueError, TableError):
            raise
        raise type(error)(_in_flags(str(error))) from error
    _describe_import(options.directory, report)
    return 0


def _in_flags(text: str) -> str:
    for argument, flag in _ARGUMENTS.items():
        text = re.sub(argument, flag, text)
    return text


def _describe_import(directory: str, report: "ImportReport") -> None:
    print(f"{directory}: version {report.version}")
    for table in report.tables:
        config, state = table.config, ", with optimizer state" if table.with_state else ""
        made = f"new ({config.pooling}, {type(config.optimizer).__name__} lr {config.optimizer.lr:g}), "
        rows = (
            f"{made if table.created else ''}{format_count(table.rows, 'row')}{state}, {table.changed_rows:,} changed"
        )
        print(f"  {table.name}: {rows}")
        for note in table.notes:
            print(f"    {_in_flags(note)}")
        if table.nonfinite:
            print(f"    {table.nonfinite:,} values are NaN or infinite")
    _print_some("not taken: ", report.left_out)


def _print_some(prefix: str, names: tuple[str, ...]) -> None:
    """The names, one a line, but not all of very many; files may have given them."""
    for name in names[:_SHOWN]:
        print(f"  {prefix}{excerpt(name)[1:-1]}")
    if len(names) > _SHOWN:
        print(f"  {prefix}{len(names) - _SHOWN} more")


def _mapping(pairs: list[str]) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for pair in pairs:
        key, separator, table = pair.rpartition("=")
        if not (separator and key and table):
            raise ValueError(f"--map {pair}: write KEY=TABLE, as --map model.item.weight=item")
        if mapping.setdefault(key, table) != table:
            raise ValueError(f"--map names {key!r} twice, as {mapping[key]!r} and {table!r}; a tensor is one table")
    return mapping


def _optimizer(options: argparse.Namespace) -> "optim.Optimizer | None":
    """The optimizer that the flags describe; None if there are none."""
    from ..optim.configs import RULES

    if options.optimizer is None and options.lr is not None:
        raise ValueError("--lr goes with --optimizer NAME; give both")
    given = {} if options.lr is None else {"lr": options.lr}
    return None if options.optimizer is None else RULES[options.optimizer](**given)


EXPORT: Final = command(
    _export,
    (
        DIRECTORY,
        arg("out", metavar="OUT", help="file to write: .safetensors, or of one table .npy, .csv or .parquet"),
        arg("--table", action="append", metavar="NAME", help="a table to export; default: all"),
        arg("--key", default=_KEY, metavar="TEXT", help=f"name of a table's tensor (default: {_KEY})"),
        arg("--state", help="add the optimizer state, as sum, exp_avg, exp_avg_sq"),
        arg("--dense", help="add the dense tensors of the commit, under their names"),
        _VERSION,
        arg("--force", help="replace OUT if it exists"),
        _MEMORY,
    ),
    "write tables to a file: safetensors, npy, CSV, Parquet",
    "Write every row of a store's tables to one file. Nothing is changed; training may go on meanwhile.",
    """examples:
  tierstore export shop shop.safetensors
  tierstore export shop item.safetensors --table item --key weight
  tierstore export shop item.parquet --table item
  tierstore export shop whole.safetensors --state --dense""",
)
IMPORT: Final = command(
    _import,
    (
        arg("directory", metavar="DIR", help="folder of the store; made if it is not there"),
        arg("files", metavar="FILE", nargs="+", help="safetensors files or torch checkpoints"),
        arg("--map", action="append", default=[], metavar="KEY=TABLE", help="take KEY as TABLE, and no other tensor"),
        arg("--optimizer", group=_NEW, choices=OPTIMIZERS, help="of the rows (default: sgd)"),
        arg("--lr", group=_NEW, type=float, metavar="X", help="its learning rate"),
        arg("--pooling", group=_NEW, choices=_POOLINGS, help="of bags (default: sum)"),
        arg("--dtype", choices=_DTYPES, help="convert weights to it (default: as in the file)"),
        _MEMORY,
    ),
    "take tables from safetensors files or torch checkpoints",
    "Take tables from files, and commit once all rows are there. A run cut short changes nothing; repeat it.",
    """examples:
  tierstore import shop shop.safetensors
  tierstore import shop item.pt --map weight=item --optimizer rowwise_adagrad --lr 0.05
  tierstore import shop part-1.safetensors part-2.safetensors --dtype bfloat16""",
)


def _change(change: str, options: argparse.Namespace) -> int:
    from ..store import open_store

    name, given = options.table, vars(options)
    with open_store(options.directory, create=False, ddr="64MiB") as store:
        if change in ("grow", "rename"):
            store.change_table(name, num_embeddings=given.get("rows"), name=given.get("name"))
        elif not options.yes:
            raise ValueError(f"the rows of {name!r} would be gone from all versions that are kept; add --yes")
        else:
            store.drop_table(name)
        print(*store.tables.values(), sep="\n")
    return 0


_TABLE: Final = arg("table", metavar="TABLE", help="its name")
TABLE_COMMANDS: Final = {
    name: command(partial(_change, name), (DIRECTORY, _TABLE, last), text, f"{text.capitalize()}.", "")
    for name, text, last in (
        ("grow", "give a table more rows", arg("rows", type=int, metavar="ROWS", help="how many it is to have")),
        ("rename", "give a table another name", arg("name", metavar="NAME", help="the new name")),
        ("drop", "drop a table with all its rows", arg("--yes", help="all its rows go; tierstore backup keeps them")),
    )
}


def _backup(options: argparse.Namespace) -> int:
    from ..store import open_store
    from ..system.places import bring, local, send, shown

    source, target = local(options.directory), local(options.target)
    with contextlib.ExitStack() as held:
        work = Path() if source and target else Path(held.enter_context(tempfile.TemporaryDirectory()))
        if source is None:
            bring(options.directory, source := work / "source", *_FILES)
        with open_store(source, mode="r", ddr=_DDR) as store, byte_bar("backup") as show:
            report = store.backup(target or work / "copy", progress=show)
        if target is None:
            send(report.target, options.target, *_FILES)
    print(f"{shown(options.target)}: version {report.version}, {format_size(report.size_bytes)}")
    return 0


BACKUP: Final = command(
    _backup,
    (
        arg("directory", metavar="DIR", help="folder of the store, which may be trained on, or a backup's URL"),
        arg("target", metavar="NEW_DIR", help="folder or URL of the backup; must not exist, or be empty"),
    ),
    "copy a store while it is trained on",
    "Copy all versions that a store keeps, as of its last commit, page by page. DIR is not changed. A backup that was "
    "cut short is no store; run the command again. Send one backup at a time to a URL.",
    """examples:
  tierstore backup shop /backups/shop-monday
  tierstore verify /backups/shop-monday
  tierstore backup shop s3://bucket/shop-monday""",
)


def _compact(options: argparse.Namespace) -> int:
    from ..offline.compaction import compact_store

    with byte_bar("compact") as show:
        report = compact_store(options.directory, options.target, trace=options.trace, progress=show)
    print(
        f"{report.target}: version {report.version}, {format_count(report.rows, 'row')} in "
        f"{format_count(report.segments, 'segment')}, verified; "
        f"{format_size(report.bytes_before)} before, {format_size(report.bytes_after)} after"
    )
    return 0


COMPACT: Final = command(
    _compact,
    (
        DIRECTORY,
        arg("target", metavar="NEW_DIR", help="folder of the copy; must not exist, or be empty"),
        arg("--trace", metavar="FILE.npz", help="put rows side by side that this trace reads together"),
    ),
    "copy a store without its unused space",
    "Copy all versions kept, rows in order of their numbers, without free pages; then verify the copy. "
    "DIR is not changed.",
    """examples:
  tierstore compact shop shop-compact
  tierstore compact shop shop-packed --trace shop.npz""",
)


def _reshard(options: argparse.Namespace) -> int:
    from ..dist.plan import Plan
    from ..dist.reshard import reshard

    with progress_bar("reshard", unit=" rows", unit_scale=True) as show:
        report = reshard(
            Path(options.directory),
            Path(options.target),
            plan=None if options.plan is None else Plan.load(options.plan),
            num_ranks=0 if options.plain else options.ranks,
            progress=show,
        )
    print(report)
    return 0


RESHARD: Final = command(
    _reshard,
    (
        arg("directory", metavar="DIR", help="folder of the store, sharded (with all ranks' parts) or not"),
        arg("target", metavar="NEW_DIR", help="new or empty folder of the copy, or what a killed reshard left"),
        arg("--ranks", type=int, default=1, metavar="N", help="make a part for each of so many ranks (default: 1)"),
        arg("--plan", metavar="FILE", help="how tables are sharded, a file of tierstore.dist.Plan"),
        arg("--plain", help="make a store that is not sharded"),
    ),
    "copy a store for another number of ranks, or for none",
    "Copy the last commit of a store for tierstore.dist.open_sharded in so many ranks, or with --plain for "
    "tierstore.open in one process: rows, optimizer state, and rank 0's extra and tensors. DIR is not changed.",
    """examples:
  tierstore reshard shop shop-sharded --ranks 4
  tierstore reshard shop-sharded shop-again --plain""",
)


def _quantize(options: argparse.Namespace) -> int:
    if (options.dtype is None) == (options.loss is None):
        raise ValueError("give either --dtype, a type for all tables, or --loss, by which types are chosen")
    for name in ("data", "rows") if options.loss is None else ("table", "at"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} goes with --{'dtype' if options.dtype is None else 'loss'}; leave it out")
    if options.loss is not None:
        return _quantize_by_loss(options)
    from ..offline.quantization import quantize

    with byte_bar("quantize") as show:
        chosen = {"dtype": options.dtype, "tables": options.table, "version": options.at}
        report = quantize(options.directory, options.target, **chosen, progress=show)
    print(
        f"{report.target}: version {report.version}, verified; "
        f"{format_size(report.bytes_before)} before, {format_size(report.bytes_after)} after"
    )
    _print_some("", tuple(f"{table.name}: {table.dtype}, {table.rows:,} rows written" for table in report.tables))
    return 0


def _quantize_by_loss(options: argparse.Namespace) -> int:
    from ..precision import MAX_ROWS, quantize_run, text_of

    source, new, rows = options.directory, options.target, MAX_ROWS if options.rows is None else options.rows
    with progress_bar("quantize", unit=" points") as show:
        made = quantize_run(source, new, loss=options.loss, data=options.data or "", max_rows=rows, progress=show)
    print(text_of(made.units, made.found), *made.summary, sep="\n")
    print(f"{new}: version {made.version}, verified; {made.measured} points measured; see {new}/quantize.html")
    return 0


QUANTIZE: Final = command(
    _quantize,
    (
        arg("directory", metavar="DIR", help="folder of the trained store"),
        _NEW_DIRECTORY,
        arg("--dtype", choices=_SMALLER, help="of the new rows"),
        arg("--table", action="append", metavar="NAME", help="a table to convert; default: all; others stay"),
        _VERSION,
        arg("--loss", type=float, metavar="X", group=_BY_LOSS, help="by what share it may rise on held-out rows"),
        arg("--data", metavar="PATH", group=_BY_LOSS, help="these (default: the run's own test rows)"),
        arg("--rows", type=int, metavar="N", group=_BY_LOSS, help="that are taken, from the start (default: 32,768)"),
    ),
    "make a store for inference, its rows in fewer bytes",
    "Copy a store's tables in another dtype, without optimizer state, into a new store; then verify it. int8 and int4 "
    "rows are looked up, not trained. With --loss, DIR is the store of a run, and a search finds few bytes within that "
    "loss; killed and run again, it goes on. DIR is not changed.",
    """examples:
  tierstore quantize run run-small --loss 0.0005
  tierstore quantize shop shop-int8 --dtype int8
  tierstore quantize shop shop-mixed --dtype int4 --table item --table user""",
)


def _publish(options: argparse.Namespace) -> int:
    from ..serve.credentials import read_token
    from ..updates.fetch import Source
    from ..updates.publish import Publisher

    token = None if options.token_file is None else read_token(options.token_file)
    publisher = Publisher(
        options.directory,
        options.into or None,
        urgent=options.urgent,
        canary=None if options.canary is None else Source(options.canary, token),
        silent_seconds=options.canary_silent,
        lookups=[Source(url, token) for url in options.lookups],
        say=lambda text: print(text, flush=True),
    )
    if options.once:
        with publisher.folder.held():
            print(end="" if publisher.step() else "nothing is new\n")
    elif options.into:
        with contextlib.suppress(KeyboardInterrupt), publisher.folder.held():
            publisher.run()
    else:
        from ..serve.offer import offer  # which needs what only servers need

        tls = (options.tls_certificate, options.tls_key)
        offer(publisher, host=options.host, port=options.port, token=token, tls=tls)
    return 0


PUBLISH: Final = command(
    _publish,
    (
        arg("directory", metavar="DIR", help="folder of the store; may be trained on meanwhile"),
        arg("--into", metavar="DIR", help="write list and files there, and serve nothing (default: DIR.updates)"),
        arg("--once", help="write what is new, and end"),
        arg("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (default: 127.0.0.1)"),
        arg("--port", type=int, default=8002, metavar="N", help="its port; 0: any that is free (default: 8002)"),
        arg("--token-file", metavar="PATH", help="file with the token that replicas show, their admin token"),
        arg("--tls-certificate", default="", metavar="FILE", help="certificate chain in PEM"),
        arg("--tls-key", default="", metavar="FILE", help="its key"),
        arg("--urgent", type=float, metavar="SHARE", help="offer this share of the changed rows first, as 0.05"),
        arg("--lookups", action="append", default=[], metavar="URL", help="server that says which rows are looked up"),
        arg("--canary", metavar="URL", help="admin port of the canary, whose approval each version needs"),
        arg("--canary-silent", type=float, default=600.0, metavar="S", help="seconds until it counts as silent (600)"),
    ),
    "offer a store's versions to servers elsewhere",
    "Write the rows that change from version to version, and the dense weights, to files that replicas pull: those of "
    "tierstore serve --from. Each applies them as one version, and offers them to others. With --canary, replicas show "
    "a version only if the canary approved it. Started again, it goes on.",
    """examples:
  tierstore publish shop --host 0.0.0.0 --token-file token --urgent 0.05
  tierstore publish shop --into /srv/www/shop""",
)


def _feed(options: argparse.Namespace) -> int:
    from ..feed import Feed, consumer_of, open_sink
    from ..store import open_store
    from ..train.build import loaded

    given = {name: value for name in ("prefix", "dtype", "ttl") if (value := getattr(options, name)) is not None}
    is_own = not given and re.fullmatch(r"[\w.]+:[\w.]+", options.to)
    consumer = options.consumer or consumer_of(options.to, options.prefix or "")
    with contextlib.ExitStack() as held:
        sink = loaded(options.to, "--to")() if is_own else open_sink(options.to, **given)
        held.callback(sink.close)
        store = held.enter_context(open_store(options.directory, mode="r", ddr=0))
        feed = Feed(store, sink, consumer=consumer, tables=options.table, say=partial(print, flush=True))
        if options.metrics_port is not None:
            _offer_metrics(feed, options.metrics_port)
        if options.once:
            print(end="" if feed.step() else "nothing is new\n")
        else:
            held.enter_context(contextlib.suppress(KeyboardInterrupt))
            feed.follow()
    return 0


def _offer_metrics(feed: object, port: int) -> None:
    with packages_for("--metrics-port", "prometheus-client"):
        import prometheus_client as prometheus
    registry = prometheus.CollectorRegistry()
    for key, name in {"rows_total": "num_rows", "version": "version", "event_time_seconds": "event_time"}.items():
        gauge = prometheus.Gauge(f"tierstore_feed_{key}", f"{name} of tierstore.feed.Feed", registry=registry)
        gauge.set_function(partial(getattr, feed, name))
    prometheus.start_http_server(require_int(port, "--metrics-port", 0, 65_535), registry=registry)


FEED: Final = command(
    _feed,
    (
        DIRECTORY,
        arg("--to", required=True, metavar="SINK", help="folder, redis://HOST:PORT/DB, or package.module:Class"),
        arg("--follow", action="store_const", const=False, dest="once", help="go on until Ctrl-C; the default"),
        arg("--once", help="take what is new, and end"),
        arg("--table", action="append", default=[], metavar="NAME", help="a table to take; default: all"),
        arg("--consumer", metavar="NAME", help="of the store's cursor for this sink (default: made of SINK)"),
        arg("--prefix", metavar="TEXT", help="of Redis: keys are TEXT:TABLE:ID (default: tierstore)"),
        arg("--dtype", choices=("float32", "stored"), help="of Redis: type of the values (default: float32)"),
        arg("--ttl", type=int, metavar="S", help="of Redis: seconds until a row that is not written again is gone"),
        arg("--metrics-port", type=int, metavar="N", help="serve metrics for Prometheus there"),
    ),
    "keep Parquet files, Redis or an index equal to a store",
    "Take the rows that each commit changed or deleted to a folder of Parquet files, to Redis, or to a class of your "
    "own. Killed and started again, it goes on: the sink is equal to the store's last commit. DIR may be trained on.",
    """examples:
  tierstore feed shop --to /srv/feed/shop --once
  tierstore feed shop --to redis://localhost:6379/0 --prefix shop --table item
  tierstore feed shop --to package.module:Class""",
)


def _compile(_: argparse.Namespace) -> int:
    from ..warm_up import warm_up

    with progress_bar("compile", unit=" kernels") as show:
        done = warm_up(progress=show)
    what = (
        f"compiled {format_count(done.compiled, 'kernel')} in {done.seconds:.0f} s"
        if done.compiled
        else "nothing to do"
    )
    print(f"{what}; {done.folder} holds {format_size(done.size_bytes)} of machine code")
    return 0


COMPILE: Final = command(
    _compile,
    (),
    "compile all kernels now, as for a container image",
    "Compile everything that training and serving use on this machine's CPU, on all processors, so that later "
    "processes need not. The machine code is kept in this user's cache folder or in NUMBA_CACHE_DIR. "
    "Processes use it that can write there too, on the same model of CPU.",
    """example, in a Dockerfile:
  RUN pip install PATH_OF_THE_CHECKOUT && tierstore compile""",
)
