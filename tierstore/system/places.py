"""Files at URLs, as s3://, gs://, file:// and memory://: copied to this machine and from it, through fsspec."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import TierstoreError
from .checks import excerpt_names

_STATE: Final = {"size", "etag", "mtime", "lastmodified", "created", "updated", "generation", "md5hash", "contentmd5"}


def local(place: str) -> Path | None:
    """The path of what is on this machine, that of file://, too; None of other URLs."""
    path = place.removeprefix("file://")
    return None if "://" in path else Path(path)


def shown(url: str) -> str:
    """For messages: without user, password and query."""
    return re.sub(r"(?<=://)[^/]*@|\?.*", "", url)


@contextlib.contextmanager
def _there(url: str) -> Iterator[tuple[Any, str]]:
    """A file system of fsspec, and the path in it. ImportError: a package is missing. ValueError: no kind of URL.
    TierstoreError: a call fails."""
    try:
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{shown(url)}: {error}: pip install fsspec s3fs, and gcsfs for gs://") from None
    except (TierstoreError, ValueError):
        raise
    except Exception as error:  # fsspec's file systems have errors of their own
        said = f"{type(error).__name__}: {error}".replace(url, shown(url))
        raise TierstoreError(f"{shown(url)}: {said}; check the URL, the credentials and the network") from error


def _files(there: Any, path: str) -> dict[str, dict[str, Any]]:
    """What the file system tells of each file at a path, now, by the name below it."""
    there.invalidate_cache()
    found = there.find(path, detail=True).items()
    infos = {name: info if info.get("size") is not None else there.info(name) for name, info in found}
    return {name.removeprefix(path).strip("/"): info for name, info in infos.items()}


def _state(there: Any, path: str) -> str:
    """A hash by which one state of what is at a path differs from another; "" if there is nothing."""
    told = (
        f"{name}\n{key}\n{each}"
        for name, info in _files(there, path).items()
        for key, each in info.items()
        if re.sub("[-_]", "", key.lower()) in _STATE
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16] if (text := "\n".join(sorted(told))) else ""


def near(url: str) -> Path:
    """What is at a place, on this machine: of a URL a copy of its last state, in the user's cache folder."""
    if (path := local(url)) is not None:
        return path
    name, cache = Path(shown(url)).name, os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(cache, "tierstore", hashlib.sha256(url.encode()).hexdigest()[:16])
    with _there(url) as (there, place):
        if not (state := _state(there, place)):
            raise TierstoreError(f"there is nothing at {shown(url)}; check the URL")
        if not (copy := home / state).exists():
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=home) as work:
                there.get(place, f"{work}/{state}/{name}", recursive=True)
                if _state(there, place) != state:
                    raise TierstoreError(f"{shown(url)} changed while it was copied; try again when that is over")
                try:
                    Path(work, state).rename(copy)
                except OSError:
                    if not copy.exists():  # else another process was faster
                        raise
        for other in {*home.glob("[!.]*")} - {copy}:
            shutil.rmtree(other, ignore_errors=True)
    return copy / name


def bring(url: str, folder: Path, *names: str) -> None:
    """Copy files from a folder at a URL into a new one. TierstoreError unless it holds these and no others."""
    with _there(url) as (there, path):
        if (held := {*_files(there, path)}) != {*names}:
            what = f"which is {' and '.join(names)}: it holds {excerpt_names(sorted(held)) or 'nothing'}"
            raise TierstoreError(f"{shown(url)} is no finished backup, {what}; check the URL, or make the backup again")
        there.get(path, str(folder), recursive=True)


def send(folder: Path, url: str, *names: str) -> None:
    """Copy files to a folder at a URL, the last once the others are there whole; on an error none is left. Only one
    process at a time. TierstoreError: the folder holds others, or the last."""
    with _there(url) as (there, path):
        if {*_files(there, path)} - {*names[:-1]}:
            raise TierstoreError(f"{shown(url)} is not empty; choose another place")
        there.makedirs(path, exist_ok=True)
        try:
            for name in names:
                there.put_file(str(folder / name), f"{path}/{name}")
                if there.size(f"{path}/{name}") != (folder / name).stat().st_size:
                    raise TierstoreError(f"{shown(url)}: {name} was not written whole; try again")
        except BaseException:
            for name in names:
                with contextlib.suppress(Exception):
                    there.rm_file(f"{path}/{name}")
            raise
