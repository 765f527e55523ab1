"""Ranks meet again whenever torchrun restarts them: its store, which outlives them, has what earlier ones left."""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ..errors import RankError

_POLL_SECONDS: Final = 0.02


@contextlib.contextmanager
def meeting(seconds: int) -> Iterator[None]:
    """All ranks are in a process group within. RankError: they did not come in time."""
    _meet(seconds)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meet(seconds: int) -> None:
    """``init_process_group`` of gloo by torchrun's environment, with a store of this start's own."""
    try:
        timeout = timedelta(seconds=seconds)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        own: Any = dist.PrefixStore(_start(store, rank, size, seconds), store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RankError(
            f"the {os.environ['WORLD_SIZE']} ranks did not meet within {seconds} s: start all of them, and let each "
            f"reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({error})"
        ) from error


def _start(store: Any, rank: int, size: int, seconds: int) -> str:
    """A name of this start, the same in all ranks and in no other start. Each rank draws a token and shows which
    tokens it sees. All see the same once each shows those of now: what a rank of an earlier start shows has an
    earlier token."""
    token, deadline = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"tierstore/token/{rank}", token)
    others = range(size)
    while time.monotonic() < deadline:
        tokens = _read(store, "token", others)
        seen = " ".join(tokens)
        store.set(f"tierstore/seen/{rank}", seen)
        if all(tokens) and set(_read(store, "seen", others)) == {seen}:
            return hashlib.sha256(seen.encode()).hexdigest()
        time.sleep(_POLL_SECONDS)
    missing = ", ".join(str(other) for other, one in enumerate(tokens) if not one)
    raise RuntimeError(f"rank {missing} did not come" if missing else "a rank left again")


def _read(store: Any, what: str, ranks: range) -> list[str]:
    """What each left; "" if nothing yet."""
    keys = [f"tierstore/{what}/{rank}" for rank in ranks]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
