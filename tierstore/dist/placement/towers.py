"""Which tables make a tower: those whose trained vectors are alike, so that a tower's module sees what interacts.

After the tower partitioner of Luo et al., "Disaggregated Multi-Tower" (MLSys 2024): similarities of features make
distances, a plane has about these distances, and k-means there finds groups of about equal lookups and bytes. The plane
is that of classical scaling (Torgerson, 1952), improved by SMACOF (de Leeuw, 1977). k-means moves and exchanges tables
(Hartigan, 1975) rather than centres, so that it never breaks a bound.

A file of towers is JSON: ``{"towers": [["user", "item"], ["shop"]]}``, names of tables.
"""

import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ...kernels.arrays import Float64s, Int64s
from ...system.output import write_text

Names = tuple[tuple[str, ...], ...]
_STARTS: Final = 16
_MOST_CHANGES: Final = 10_000
_MOST_WORK: Final = 10**8
_MOST_ROUNDS: Final = 300
_LEAST_GAIN: Final = 1e-9


class TowerPlan(NamedTuple):
    """A partition of tables.

    Attributes:
        towers: the tables of each, in the order that tables were given in.
        tables: all of them, in that order.
        plane: float64 [tables, 2], where each is.
        stress: Kruskal's stress-1 of the plane: 0 where its distances are those wanted.
        shares: float64 [towers, loads], each tower's part of a load, of the mean: 1 for all were they equal.
        alike: float64 [towers, towers], mean similarity of two tables, one of each.
    """

    towers: Names
    tables: tuple[str, ...]
    plane: Float64s
    stress: float
    shares: Float64s
    alike: Float64s

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the file that ``load_towers`` reads; FileExistsError if there is one, without ``force``."""
        lines = ",\n  ".join(json.dumps(tower) for tower in self.towers)
        write_text(Path(path), f'{{"towers": [\n  {lines}]}}\n', force=force)

    def svg(self) -> str:
        """The plane as a picture: tables by their names, in the colours of their towers."""
        low, size = self.plane.min(axis=0), max(float(np.ptp(self.plane, axis=0).max()), 1e-9)
        tower_of = {name: number for number, tower in enumerate(self.towers) for name in tower}
        parts = []
        for name, (x, y) in zip(self.tables, 50 + 650 * (self.plane - low) / size, strict=True):
            text, tower = html.escape(name), tower_of[name]
            parts.append(
                f'<g fill="hsl({360 * tower // len(self.towers)} 65% 40%)"><title>{text}: tower {tower}</title>'
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7"/><text x="{x + 10:.1f}" y="{y + 5:.1f}">{text}</text></g>'
            )
        begin = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 750" font-family="sans-serif" font-size="15">'
        ground = '<rect width="800" height="750" fill="#fffefb"/>'
        about = f'<text x="10" y="20">tables by similarity, stress {self.stress:.2f}</text>'
        return "\n".join([begin, ground, about, *parts, "</svg>", ""])


def load_towers(path: str | os.PathLike[str]) -> Names:
    """The towers that a file names. OSError: it cannot be read. ValueError: it is no such file."""
    try:
        fields: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    towers = fields.get("towers") if isinstance(fields, dict) and len(fields) == 1 else None
    if not isinstance(towers, list) or not all(
        isinstance(tower, list) and all(isinstance(name, str) for name in tower) for tower in towers
    ):
        raise ValueError(f'{path} has no towers: expected {{"towers": [["user", "item"], ["shop"]]}}, names of tables')
    return tuple(tuple(tower) for tower in towers)


def similarity_of(batches: Iterable[Tensor], tables: Sequence[str]) -> Float64s:
    """How alike tables are: float64 [tables, tables], from 0 to 1.

    Of two features it is the mean, over the samples where neither is zero, of the absolute value of the cosine of their
    pooled vectors; of two tables the mean over pairs of their features. A table is 1 to itself.

    Args:
        batches: float [samples, features, dim]: pooled vectors.
        tables: that of each feature; the result is in the order in which they appear.
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
    tables: Sequence[str],
    similarity: Float64s,
    loads: Float64s,
    count: int,
    *,
    coherent: bool = True,
    slack: float = 0.1,
    seed: int = 0,
) -> TowerPlan:
    """Tables in ``count`` towers of about equal loads, those that are alike together. The same for the same seed.

    Args:
        tables: their names.
        similarity: float64 [tables, tables], of ``similarity_of``.
        loads: float64 [tables, loads], at least 0: lookups and bytes, say. None of a tower's exceeds 1 + ``slack`` of
            the towers' mean, or what the largest tables, dealt out first, leave to the fullest tower if that is more.
        coherent: False puts tables together that are not alike.

    Raises:
        ValueError: fewer tables than towers, or no tower.
    """
    if not 1 <= count <= len(tables):
        raise ValueError(f"{count} towers of {len(tables)} tables: expected 1 to {len(tables)}")
    distances = 1 - similarity if coherent else similarity * (1 - np.eye(len(tables)))
    plane, stress = plane_of(distances)
    mean = np.asarray(loads, np.float64).sum(axis=0) / count
    shares = np.divide(loads, mean, out=np.zeros(np.shape(loads)), where=mean > 0)
    groups = _Groups(plane, shares, count)
    dealt = groups.dealt(np.argsort(-shares.max(axis=1), kind="stable"))
    groups.most = max(1 + slack, groups.held(dealt).max()) + _LEAST_GAIN
    generator, starts = np.random.default_rng(seed), min(_STARTS, _MOST_WORK // len(tables) ** 3)
    others = [groups.dealt(generator.permutation(len(tables))) for _ in range(starts)]
    allowed = [dealt, *(each for each in others if groups.held(each).max() <= groups.most)]
    best = min(map(groups.improved, allowed), key=groups.spread)
    members = sorted((np.flatnonzero(best == tower) for tower in range(count)), key=lambda own: int(own[0]))
    towers = tuple(tuple(tables[int(place)] for place in own) for own in members)
    held = np.array([shares[own].sum(axis=0) for own in members])
    pairs = 1 - np.eye(len(tables))  # without those of a table with itself
    member = np.array([[place in own for place in range(len(tables))] for own in members], np.float64)
    alike = (member @ (similarity * pairs) @ member.T) / np.maximum(member @ pairs @ member.T, 1)
    return TowerPlan(towers, tuple(tables), plane, stress, held, alike)


def plane_of(distances: Float64s) -> tuple[Float64s, float]:
    """Points whose distances are about those wanted: float64 [n, 2]; and Kruskal's stress-1.

    Args:
        distances: float64 [n, n], symmetric, with zeros in the diagonal.
    """
    size = len(distances)
    centre = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-0.5 * centre @ distances**2 @ centre)
    points: Float64s = np.zeros((size, 2))
    for axis, place in enumerate(range(size - 1, max(size - 3, -1), -1)):
        vector = vectors[:, place]
        turned = vector * np.sign(vector[np.abs(vector).argmax()])  # LAPACK leaves the sign open
        points[:, axis] = turned * np.sqrt(max(values[place], 0.0))
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


class _Groups:
    """Groups of points, int64 [points] each; no load of a group may exceed ``most`` of the mean.

    Args:
        points: float64 [points, 2].
        shares: float64 [points, loads], of the groups' means.
    """

    def __init__(self, points: Float64s, shares: Float64s, count: int) -> None:
        self._points, self._shares, self._count = points, shares, count
        self._apart = _distances(points) ** 2
        self.most = np.inf

    def held(self, groups: Int64s) -> Float64s:
        """Float64 [groups, loads]."""
        found: Float64s = np.zeros((self._count, self._shares.shape[1]))
        np.add.at(found, groups, self._shares)
        return found

    def dealt(self, order: Int64s) -> Int64s:
        """Points in this order, each to the group that is then least full. No group is empty."""
        groups, held, sizes = order.copy(), np.zeros((self._count, self._shares.shape[1])), np.zeros(self._count)
        for place in order:
            own = np.lexsort((sizes, (held + self._shares[place]).max(axis=1)))[0]
            groups[place] = own
            held[own] += self._shares[place]
            sizes[own] += 1
        return groups

    def spread(self, groups: Int64s) -> float:
        """The sum of the squared distances from the groups' centres."""
        own = (self._points[groups == group] for group in range(self._count))
        return float(sum(((points - points.mean(axis=0)) ** 2).sum() for points in own))

    def improved(self, groups: Int64s) -> Int64s:
        """With points moved to other groups, and exchanged, as long as that makes the spread less and breaks no
        bound."""
        groups, rows = groups.copy(), np.arange(len(groups))
        for _ in range(_MOST_CHANGES):
            sizes, held = np.bincount(groups, minlength=self._count).astype(np.float64), self.held(groups)
            member = np.eye(self._count)[groups]
            centres = member.T @ self._points / sizes[:, None]
            far = ((self._points[:, None] - centres[None]) ** 2).sum(axis=2)
            own, own_sizes = far[rows, groups], sizes[groups]
            # One moves: what its group gains without it, less what the other one loses.
            moved = (own_sizes / np.maximum(own_sizes - 1, 1) * own)[:, None] - sizes / (sizes + 1) * far
            fits = (held[None] + self._shares[:, None] <= self.most).all(axis=2) & (own_sizes > 1)[:, None]
            moved = np.where(fits & (member == 0), moved, -np.inf)
            # Two change places: [first, second] is what the first's group gains.
            to_first = own[:, None] - far[:, groups].T + self._apart / own_sizes[:, None]
            after = held[groups][:, None] - self._shares[:, None] + self._shares[None]
            fits_first = (after <= self.most).all(axis=2)
            is_pair = fits_first & fits_first.T & (groups[:, None] != groups[None])
            swapped = np.where(is_pair, to_first + to_first.T, -np.inf)
            if max(moved.max(), swapped.max()) <= _LEAST_GAIN:
                break
            if moved.max() >= swapped.max():
                place, group = np.unravel_index(moved.argmax(), moved.shape)
                groups[place] = group
            else:
                first, second = np.unravel_index(swapped.argmax(), swapped.shape)
                groups[[first, second]] = groups[[second, first]]
        return groups
