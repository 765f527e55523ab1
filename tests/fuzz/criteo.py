"""Criteo's text, plain or compressed, against a slow and plain parser."""

import gzip
import math
import re

from tests.train.readers.rows import matrix
from tierstore.train.readers import CriteoReader, DataError

from .target import FindingError, Target, scratch_folder

_PATH = scratch_folder() / "day.tsv"
_LABEL = re.compile(rb"-?0{1,19}|0{0,18}1")
_INTEGER = re.compile(rb"(-?[0-9]{1,18})?")
_CATEGORY = re.compile(rb"[0-9a-fA-F]{0,15}")


def _expected(text: bytes) -> list[list[float]] | None:
    """The rows, or None if a line is broken."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for line in lines:
        fields = line.removesuffix(b"\r").split(b"\t")
        kinds = [_LABEL, *[_INTEGER] * 13, *[_CATEGORY] * 26]
        if len(fields) != 40 or not all(map(re.fullmatch, kinds, fields)):
            return None
        dense = [float(int(field)) if field else math.nan for field in fields[1:14]]
        rows.append([float(int(fields[0])), *dense, *[float(int(f, 16)) if f else -1.0 for f in fields[14:]]])
    return rows


def run(data: bytes) -> None:
    """If the first byte is ``!``, the rest is compressed first; if it is ``?``, it is the file as it is."""
    text = data[1:] if data[:1] in (b"!", b"?") else data
    _PATH.write_bytes(gzip.compress(text, 1, mtime=0) if data[:1] == b"!" else text)
    try:
        list(CriteoReader(_PATH).read_chunks(2, None, 3))
        chunks = list(CriteoReader(_PATH).read_chunks(0, None, 3))
    except DataError as error:
        if len(str(error)) > 1000:
            raise FindingError("an error without bound") from error
        chunks = None
    if data[:1] != b"?":
        _compare(chunks, _expected(text))


def _compare(chunks: list | None, expected: list[list[float]] | None) -> None:
    if (chunks is None) != (expected is None):
        raise FindingError("a broken line was taken" if expected is None else "a right line was refused")
    if chunks is None or expected is None:
        return
    rows = []
    for chunk in chunks:
        for label, dense, categories in zip(chunk.labels, chunk.dense, matrix(chunk.categories), strict=True):
            rows.append([float(label), *map(float, dense), *map(float, categories)])
    if len(rows) != len(expected):
        raise FindingError(f"{len(rows)} rows instead of {len(expected)}")
    for row, wanted in zip(rows, expected, strict=True):
        for value, want in zip(row, wanted, strict=True):
            if not (math.isclose(value, want, rel_tol=1e-6) or (math.isnan(value) and math.isnan(want))):
                raise FindingError(f"{value} instead of {want}")


def seeds() -> list[bytes]:
    line = b"\t".join([b"1", *[b"-3", b"", b"77"] * 4, b"5", *[b"0a1b2c3d", b""] * 13])
    text = line + b"\n" + line.replace(b"77", b"123456789012345678") + b"\r\n" + line
    return [text, b"!" + text, b"?" + gzip.compress(text, mtime=0)]


TARGET = Target(run=run, seeds=seeds, dictionary=(b"\t", b"\n", b"\r\n", b"\x00", b"-", b"\t0\t", b"fffffffffffffff"))
