"""From a plan file to what it names: workload, host, setup, accesses."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..settings.sections import ConfigError
from ..system.excerpt import excerpt
from ..system.sizes import format_size, parse_size
from .accesses import Accesses
from .host import Host
from .parts import host_names, load_host
from .plan_file import PlanFile
from .prediction import Setup
from .presets import PRESETS, load_workload, preset, scaled
from .queueing import parse_query_sizes
from .search import SearchSpace, Target, with_memory
from .traces import read_accesses
from .workload import Workload

__all__ = ["accesses_of_plan", "hosts_of", "query_sizes_of", "setup_of", "space_of", "target_of", "workload_of"]

_Part = TypeVar("_Part")


def workload_of(asked: PlanFile) -> Workload:
    """The model, with what the section says otherwise.

    Raises:
        ValueError: it names none, or one that there is not, or a value that cannot be.
    """
    section = asked.workload
    if section.preset:
        found = preset(section.preset)
    elif section.file:
        found = load_workload(Path(section.file))
    elif section.tables:
        found = Workload(
            name=section.name or "workload", tables=tuple(shape for spec in section.tables for shape in spec.shapes())
        )
    else:
        raise ConfigError(
            f"workload.preset = '': give one of {', '.join(PRESETS)}; or workload.file, or [[workload.tables]]"
        )
    found = scaled(found, section.scale) if section.scale != 1 else found
    given = {
        name: getattr(section, name)
        for name in ("name", "batch_samples", "optimizer", "dtype", "dense_flops")
        if getattr(section, name)
    }
    try:
        return replace(found, **given)
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None


def hosts_of(asked: PlanFile) -> tuple[Host, ...]:
    """The host, with the counts that the section says, and after it those that the search compares it with.

    Raises:
        ValueError: it names none, or one that there is not, or counts parts that the host has none of.
    """
    section = asked.host
    if not section.name and not section.file:
        raise ConfigError(f"host.name = '': give one of {', '.join(host_names())}; or host.file")
    own = load_host(section.name) if section.name else load_host(Path(section.file))
    return _counted(own, asked), *map(load_host, section.others)


def _counted(host: Host, asked: PlanFile) -> Host:
    section = asked.host
    if section.ssds >= 0:
        host = replace(host, storage=_repeated(host.storage, section.ssds, "ssds", host.name))
    if section.accelerators >= 0:
        wanted = _repeated(host.accelerators, section.accelerators, "accelerators", host.name)
        host = replace(host, accelerators=wanted)
    if section.memory != "":
        size_bytes = parse_size(section.memory, name="memory", memory_bytes=int(host.ddr.capacity_bytes))
        if not size_bytes or not host.ddr.capacity_bytes:
            raise ConfigError(
                f"host.memory = {excerpt(section.memory)} is {format_size(size_bytes)}, host {excerpt(host.name)} has "
                f'{format_size(int(host.ddr.capacity_bytes))}: expected a size, as "512GiB", or "50%" of what it has'
            )
        host = with_memory(host, size_bytes)
    return host


def _repeated(parts: tuple[_Part, ...], count: int, key: str, name: str) -> tuple[_Part, ...]:
    if count and not parts:
        raise ConfigError(f"host.{key} = {count}: host {excerpt(name)} has none to have more of")
    return parts[:1] * count


def setup_of(asked: PlanFile, workload: Workload, host: Host) -> Setup:
    """The setup that the file gives; what it leaves open is the least: one host, no memory of GPUs.

    Raises:
        ValueError: a size cannot be read.
    """
    section = asked.setup
    memory, hbm = int(host.ddr.capacity_bytes), int(min((a.hbm.capacity_bytes for a in host.accelerators), default=0))

    def size(value: int | str, key: str, of_bytes: int) -> int:
        given = 0 if value == "" else value
        return parse_size(given, name=f"setup.{key}", table_bytes=workload.table_bytes, memory_bytes=of_bytes)

    return Setup(
        workload=workload,
        host=host,
        ddr_bytes=size(section.ddr, "ddr", memory),
        hbm_bytes=size(section.hbm, "hbm", hbm),
        page_cache_bytes=size(section.page_cache, "page_cache", memory),
        hosts=max(1, section.hosts),
        policy=section.policy,
        prefetch_depth=section.prefetch_depth,
        threads=section.threads or host.processor.cores,
        rows_per_read=section.rows_per_read,
        workers=section.workers,
        replicas=max(1, section.replicas),
        batch_samples_max=section.batch_samples_max,
    )


def accesses_of_plan(asked: PlanFile) -> Accesses | None:
    """Those of the trace; None without one."""
    return read_accesses(asked.trace.path) if asked.trace.path else None


def query_sizes_of(asked: PlanFile) -> tuple[float, ...] | None:
    """Samples of queries, each as likely; None where the file names none.

    Raises:
        ValueError: the file cannot be read, or has something else in it.
    """
    path = asked.target.query_sizes
    if not path:
        return None
    try:
        return parse_query_sizes(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"target.query_sizes = {excerpt(path)}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def target_of(asked: PlanFile) -> Target:
    """What the search must reach.

    Raises:
        ValueError: the section asks for nothing.
    """
    section = asked.target
    scales = {"samples_per_s": 1, "queries_per_s": 1, "p95_ms": 1e-3, "p99_ms": 1e-3}
    scales |= {"usd": 1, "usd_a_month": 1, "watts": 1}
    given = {name.replace("_ms", "_s"): scale * getattr(section, name) for name, scale in scales.items()}
    try:
        return Target(**{name: value for name, value in given.items() if value})
    except ValueError as error:
        raise ConfigError(f"[target]: {error}; or give setup.ddr, to predict one setup") from None


def space_of(asked: PlanFile, workload: Workload) -> SearchSpace:
    """What may vary: as the section says; rows stay of their type, and hosts as many as the setup has, if it says."""
    hosts = (asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts
    return replace(asked.search, dtypes=asked.search.dtypes or (workload.dtype,), hosts=hosts)
