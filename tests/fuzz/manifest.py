"""manifest.json, with the right checksum over whatever the body is, as one who means harm would have it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from tierstore import TableConfig, init, optim
from tierstore.errors import TierstoreError
from tierstore.store.manifest import MANIFEST_NAME, Manifest, _digest

from .target import FindingError, Target, scratch_folder

_FOLDER = scratch_folder()


def _sealed(data: bytes) -> bytes:
    try:
        body = json.loads(data)
        return json.dumps({"body": body, "sha256": _digest(body)}).encode()
    except (ValueError, RecursionError):
        return b'{"body": ' + data + b', "sha256": "' + hashlib.sha256(data).hexdigest().encode() + b'"}'


def run(data: bytes) -> None:
    """The bytes are the body; if the first is ``!``, the rest is the whole file."""
    (_FOLDER / MANIFEST_NAME).write_bytes(data[1:] if data[:1] == b"!" else _sealed(data))
    try:
        manifest = Manifest.read(_FOLDER)
    except TierstoreError as error:
        if len(str(error)) > 1000:
            raise FindingError("an error without bound") from error
        return
    manifest.write(_FOLDER)
    again = Manifest.read(_FOLDER)
    if again != manifest:
        raise FindingError(f"{manifest} is read back as {again}")


def seeds() -> list[bytes]:
    tables = [
        TableConfig(name="t", num_embeddings=5, embedding_dim=4),
        TableConfig(
            name="u", num_embeddings=9, embedding_dim=8, dtype="bfloat16", rounding="stochastic",
            feature_names=("a", "b"), pooling="max",
            init=init.Normal(std=0.5, seed=3), optimizer=optim.Adam(betas=(0.8, 0.9)),
        ),
    ]  # fmt: skip
    replace(Manifest.new(4096), tables=tuple(tables)).write(_FOLDER)
    whole = Path(_FOLDER / MANIFEST_NAME).read_bytes()
    return [json.dumps(json.loads(whole)["body"]).encode(), b"!" + whole]


_WORDS = (
    b'NaN|Infinity|-1|1e999|null|true|[]|{}|"\\ud800"|[|{"a":|"kind"|"init"|"lr"|"seed"|9999999999999999999|"tables"'
)

TARGET = Target(run=run, seeds=seeds, dictionary=tuple(_WORDS.split(b"|")))
