"""Which tables make a tower: those whose trained vectors are alike, so that a tower's module sees what interacts.

After Luo et al., "Disaggregated Multi-Tower" (MLSys 2024): similarities of features make distances, a plane has about
these, by classical scaling (Torgerson, 1952) and SMACOF (de Leeuw, 1977), and k-means there finds groups of about equal
lookups and bytes. It moves and exchanges tables (Hartigan, 1975) rather than centres, so it never breaks a bound.

A file of towers is JSON: ``{"towers": [["user", "item"], ["shop"]]}``, names of tables.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from ...kernels.arrays import Float64s, Int64s
from ...settings.sections import converted

Names = tuple[tuple[str, ...], ...]
_STARTS: Final = 16
_MOST_WORK: Final = 10**8
_MOST_CHANGES: Final = 10_000
_MOST_ROUNDS: Final = 300
_LEAST_GAIN: Final = 1e-9


def load_towers(path: str | os.PathLike[str]) -> Names:
    """The towers that a file names. OSError: it cannot be read. ValueError: it is no such file."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or list(fields) != ["towers"]:
            raise ValueError('expected {"towers": [["user", "item"], ["shop"]]}, names of tables')
        towers: Names = converted(fields["towers"], Names, "towers")
    except ValueError as error:
        raise ValueError(f"{path} is no file of towers: {error}") from None
    return towers


def similarity_of(batches: Iterable[Tensor], tables: Sequence[str]) -> Float64s:
    """How alike tables are: float64 [tables, tables], from 0 to 1.

    Of two features it is the mean, over the samples where neither is zero, of the absolute value of the cosine of their
    pooled vectors; of two tables the mean over pairs of their features. A table is 1 to itself.

    Args:
        batches: float [samples, features, dim]: pooled vectors.
        tables: of each feature; the result is in the order of their first features.
    """
    total = there = np.zeros((len(tables), len(tables)))
    for batch in batches:
        vectors = batch.detach().cpu().numpy().astype(np.float64)
        norms = np.linalg.norm(vectors, axis=2, keepdims=True)
        units = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
        total = total + np.abs(units @ units.transpose(0, 2, 1)).sum(axis=0)
        is_there = (norms[:, :, 0] > 0).astype(np.float64)
        there = there + is_there.T @ is_there
    features = total / np.maximum(there, 1)
    names = list(dict.fromkeys(tables))
    member = np.array([[name == each for each in tables] for name in names], np.float64)
    member /= member.sum(axis=1, keepdims=True)
    found: Float64s = member @ features @ member.T
    np.fill_diagonal(found, 1)
    return found


def partition(
    tables: Sequence[str], similarity: Float64s, loads: Float64s, count: int, *, slack: float = 0.1, seed: int = 0
) -> Names:
    """Tables in ``count`` towers of about equal loads, those that are alike together. The same for the same seed.
    ValueError: fewer tables than towers, or no tower.

    Args:
        similarity: float64 [tables, tables], of ``similarity_of``. With 1 - similarity, unlike tables come together.
        loads: float64 [tables, loads], at least 0: lookups and bytes, say. None of a tower's exceeds 1 + ``slack`` of
            the towers' mean, or what the largest tables, dealt out first, leave to the fullest tower if that is more.
    """
    if not 1 <= count <= len(tables):
        raise ValueError(f"{count} towers of {len(tables)} tables: expected 1 to {len(tables)}")
    plane, _ = plane_of((1 - similarity) * (1 - np.eye(len(tables))))
    mean = np.asarray(loads, np.float64).sum(axis=0) / count
    shares = np.divide(loads, mean, out=np.zeros(np.shape(loads)), where=mean > 0)
    dealt, fullest = _dealt(np.argsort(-shares.max(axis=1), kind="stable"), shares, count)
    most = max(1 + slack, fullest) + _LEAST_GAIN
    generator, starts = np.random.default_rng(seed), min(_STARTS, _MOST_WORK // len(tables) ** 3)
    others = (_dealt(generator.permutation(len(tables)), shares, count) for _ in range(starts))
    allowed = [dealt, *(groups for groups, fullest in others if fullest <= most)]
    _, best = min((_improved(each, plane, shares, most) for each in allowed), key=lambda found: found[0])
    members = sorted((np.flatnonzero(best == tower) for tower in range(count)), key=lambda own: int(own[0]))
    return tuple(tuple(tables[int(place)] for place in own) for own in members)


def plane_of(distances: Float64s) -> tuple[Float64s, float]:
    """Points, float64 [n, 2], about as far apart as wanted, float64 [n, n] with zeros in the diagonal; and Kruskal's
    stress-1."""
    size = len(distances)
    centre = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-0.5 * centre @ distances**2 @ centre)
    scaled = vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0))
    points: Float64s = np.pad(scaled, ((0, 0), (0, 2 - scaled.shape[1])))
    last = np.inf
    for _ in range(_MOST_ROUNDS):
        apart = _distances(points)
        raw = float(((distances - apart) ** 2).sum())
        if raw > last * (1 - 1e-6):
            break
        last = raw
        ratio = np.divide(distances, apart, out=np.zeros_like(apart), where=apart > 0)
        points = (np.diag(ratio.sum(axis=1)) - ratio) @ points / size
    return points, float(np.sqrt(((distances - _distances(points)) ** 2).sum() / max((distances**2).sum(), 1e-300)))


def _distances(points: Float64s) -> Float64s:
    found: Float64s = np.linalg.norm(points[:, None] - points[None], axis=2)
    return found


def _dealt(order: Int64s, shares: Float64s, count: int) -> tuple[Int64s, float]:
    """The group of each point: in this order, the one that is then least full, so that none is empty; and the largest
    load of a group."""
    groups, held, sizes = order.copy(), np.zeros((count, shares.shape[1])), np.zeros(count)
    for place in order:
        own = np.lexsort((sizes, (held + shares[place]).max(axis=1)))[0]
        groups[place] = own
        held[own] += shares[place]
        sizes[own] += 1
    return groups, float(held.max())


def _improved(groups: Int64s, points: Float64s, shares: Float64s, most: float) -> tuple[float, Int64s]:
    """Groups after moves and exchanges of points that lower the sum of the squared distances from the groups' centres,
    with no load above ``most``; and that sum."""
    groups, apart, count = groups.copy(), _distances(points) ** 2, int(groups.max()) + 1
    for _ in range(_MOST_CHANGES):
        member = np.eye(count)[groups]
        sizes, held = member.sum(axis=0), member.T @ shares
        far = ((points[:, None] - member.T @ points / sizes[:, None]) ** 2).sum(axis=2)
        own, own_sizes = (far * member).sum(axis=1), sizes[groups]
        # One moves: what its group gains without it, less what the other one loses.
        moved = (own_sizes / np.maximum(own_sizes - 1, 1) * own)[:, None] - sizes / (sizes + 1) * far
        fits = (held + shares[:, None] <= most).all(axis=2) & (own_sizes > 1)[:, None] & (member == 0)
        moved = np.where(fits, moved, -np.inf)
        # Two change places: [first, second] is what the first's group gains.
        gained = own[:, None] - far[:, groups].T + apart / own_sizes[:, None]
        fits = (held[groups][:, None] - shares[:, None] + shares <= most).all(axis=2)
        swapped = np.where(fits & fits.T & (groups[:, None] != groups), gained + gained.T, -np.inf)
        if max(moved.max(), swapped.max()) <= _LEAST_GAIN:
            break
        if moved.max() >= swapped.max():
            place, group = np.unravel_index(moved.argmax(), moved.shape)
            groups[place] = group
        else:
            pair = list(np.unravel_index(swapped.argmax(), swapped.shape))
            groups[pair] = groups[pair[::-1]]
    return float(own.sum()), groups
