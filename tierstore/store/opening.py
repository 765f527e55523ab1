"""Opening a store, or making one: ``open_store``."""

import gc
import os
import time
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ..cache.ddr import AUTO, POLICIES
from ..config import MAX_KEPT_VERSIONS, require_slack
from ..errors import StoreLockedError
from ..io.log import DEFAULT_SLACK
from ..kernels.threads import default_threads
from ..layout import FloatName, QuantizedName
from ..lookup.finite import CheckFinite
from ..system.checks import require_choice, require_int
from ..system.files import translate_os_error
from ..system.signals import settle
from ..system.sizes import parse_size, require_memory, resolve_device
from .catalog import KeptAs
from .directory import require_store
from .lifetime import is_open_here
from .pools import Memory
from .store import Store

_PAUSES_SECONDS: Final = (0.0, 0.1, 0.4, 1.0)  # before a store that this process has open is sought in garbage again
_DROPPED_SECONDS: Final = 60.0  # for such a store to be closed


def open_store(
    directory: str | os.PathLike[str] | None = None, *, cold: Literal["lmdb", "memory"] = "lmdb", mode: Literal["r",
    "w"] = "w", version: int | None = None, keep: int = 1, slack: float = DEFAULT_SLACK, ddr: int | str = "50%", hbm:
    int | str = 0, device: str = "cpu", policy: str = AUTO, threads: int | None = None, dtype: KeptAs = None,
    create: bool = True, check_finite: CheckFinite | None = None,
) -> Store:  # fmt: skip
    """Open the store in ``directory``, or create it.

    Args:
        directory: where manifest.json and the row file lie. With mode="r" also a sharded store's, with all ranks'
            parts: whole tables, and ``extra`` and ``tensors`` of rank 0, of the newest commit that all ranks have.
        cold: where cold rows are: "lmdb", in files; or "memory", slow and gone with the process, for tests and
            notebooks: without a directory, and not to be opened again, followed or backed up.
        mode: "w" opens for reading and writing, or creates; "r" opens what is there, read-only.
        version: with mode="r", which of the kept versions to open; default: the last.
        keep: versions that stay, for ``version=`` and ``Store.rollback``; each takes space for rows changed after it.
        slack: how many times the size of its rows the row file may have before it is cleaned: above 1, at most 10.
        ddr: budget of host memory for caches, indexes and write staging: bytes, "512MiB", "50%" (of the machine's
            memory) or "5% of tables" (of all rows and state). A map of rows comes on top: 4 bytes a row of all tables,
            in pages of 4 KiB that take memory once one of their 1,024 rows is stored.
        hbm: budget of device memory for the hottest rows and their index, written as ``ddr`` is ("50%" is of the
            device's memory); 0 for none. With device="cpu" it is the same tier in host memory: slow, for tests.
        device: where the hottest rows and results live: "cpu", or "cuda", "cuda:1" with hbm= above 0.
        policy: which rows leave memory first: "lru", "lfu" or "tinylfu" (by counts that outlive residence, and fade
            as fast as a sample says that it hits most); "auto": now "tinylfu" in host memory, "lru" in device memory,
            where "tinylfu" is "lfu".
        threads: for lookups and updates, which give the same results; default: the CPUs this process may use.
        dtype: with mode="r", what rows are kept in memory as, without optimizer state: "float16", "bfloat16", "int8" or
            "int4" (quantized row by row), where they are stored in more bits; "stored" for what they are stored as.
            Default: as stored, state included.
        create: with mode="w", whether a store is made where there is none.
        check_finite: look for NaN and infinity in each update's gradients, rows and optimizer state. "error":
            NonFiniteError, which says where; "log": a warning, once a table. None: do not look. It waits for a GPU.

    Raises:
        ValueError, TypeError: a wrong argument.
        BudgetError: ``ddr``, or with device="cpu" ``hbm``, is more than the machine has.
        TableError: with hbm= above 0, a table of int8 or int4 rows, or, unless mode="r", of rounding="stochastic".
        StoreNotFoundError: mode="r" or create=False, and no store or version. StoreLockedError: a writer has it open.
        DamagedError: a file is not what was written.
    """
    _require_place(directory, cold, mode, version, dtype)
    require_choice(policy, POLICIES, "policy")
    require_memory(parse_size(ddr, name="ddr"), f"ddr={ddr!r}")
    keep = require_int(keep, "keep", 1, MAX_KEPT_VERSIONS)
    require_slack(slack)
    require_choice(check_finite or "log", get_args(CheckFinite), "check_finite")
    threads = require_int(default_threads() if threads is None else threads, "threads", 1, 1024)
    place = None if directory is None else Path(directory)
    if place is not None and not create:
        require_store(place)
    memory = Memory(ddr=ddr, hbm=hbm, device=resolve_device(device, hbm), policy=policy)
    options: dict[str, Any] = {"version": version, "keep": keep, "slack": slack, "threads": threads, "dtype": dtype}
    options["check_finite"] = check_finite
    pauses = [*_PAUSES_SECONDS] if place is not None and mode == "w" else []
    while True:
        is_here = False
        try:
            is_here = bool(pauses) and place is not None and is_open_here(place)
            return Store(place, memory, readonly=mode == "r", **options)
        except StoreLockedError:
            if not is_here:
                raise
        except OSError as error:
            raise translate_os_error(error, error.filename or str(directory)) from error
        # A store that was dropped, as by a function that raised, may be open until a thread at work lets it go.
        time.sleep(pauses.pop(0))
        gc.collect()
        settle(_DROPPED_SECONDS)


def _require_place(directory: object, cold: str, mode: str, version: int | None, dtype: str | None) -> None:
    """ValueError, TypeError for a wrong mode, or what does not go with it or with the directory."""
    require_choice(mode, ("r", "w"), "mode")
    if version is not None:
        require_int(version, "version", 1, 2**40)
        if mode != "r":
            raise ValueError(
                f'version={version} goes with mode="r"; to write from there on: open(..., mode="w").rollback({version})'
            )
    if dtype is not None:
        require_choice(dtype, ("stored", *get_args(FloatName), *get_args(QuantizedName)), "dtype")
        if mode != "r":
            raise ValueError(f'dtype={dtype!r} goes with mode="r": rows that are trained are kept as they are stored')
    require_choice(cold, ("lmdb", "memory"), "cold")
    if cold == "lmdb" and directory is None:
        raise ValueError('a store needs a directory; for one that ends with the process: tierstore.open(cold="memory")')
    if cold == "memory" and directory is not None:
        raise ValueError(
            f'directory={str(directory)!r} does not go with cold="memory", which writes no files; leave it out'
        )
    if cold == "memory" and mode == "r":
        raise ValueError('mode="r" does not go with cold="memory": there is nothing yet to open; leave it out')
