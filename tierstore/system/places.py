"""Files at URLs, as s3://, gs://, file:// and memory://: copied to this machine and from it, through fsspec."""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any


def is_url(place: object) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)) is not None


def _there(url: str) -> tuple[Any, str]:
    """A file system of fsspec, and the path in it. ImportError: a package is missing. ValueError: no kind of URL."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ImportError(f"{url}: {error}: pip install fsspec s3fs, and gcsfs for gs://") from None


def fetch(url: str, folder: Path) -> Path:
    """Copy the file or folder at a URL into a folder; where it is then. FileNotFoundError: there is nothing."""
    (there, path), made = _there(url), folder / Path(url).name
    if not there.exists(path):
        raise FileNotFoundError(f"there is nothing at {url}; check the URL")
    there.get(path, str(made), recursive=True)
    return made


def near(url: str) -> Path:
    """What is at a URL, on this machine: a copy in the user's cache folder for each state of it; of file:// itself."""
    there, path = _there(url)
    if "file" in there.protocol:
        return Path(path)
    state = hashlib.sha256("".join([url, *map(there.ukey, there.find(path))]).encode()).hexdigest()
    copy = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tierstore", state[:16])
    if not copy.exists():
        fetch(url, work := copy.with_suffix(f".{os.getpid()}"))
        with contextlib.suppress(OSError):  # another process was faster
            work.rename(copy)
    return copy / Path(url).name


def send(folder: Path, url: str, *names: str) -> None:
    """Copy files to a folder at a URL, in this order. FileExistsError: it holds something."""
    there, path = _there(url)
    if there.exists(path) and there.find(path):
        raise FileExistsError(f"{url} is not empty; choose another place")
    there.makedirs(path, exist_ok=True)
    for name in names:
        there.put_file(str(folder / name), f"{path}/{name}")
