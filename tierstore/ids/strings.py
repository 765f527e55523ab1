"""``tierstore.ids.of_strings``: ids of a list of texts, for users and servers; ``texts`` has the rules and kernels."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from ..layout import MAX_ROWS
from ..system.checks import excerpt, require_int

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SEED: Final = (1 << 63) - 1
_MAX_COLUMN: Final = 1 << 20


def of_strings(
    strings: Iterable[str | bytes], *, num_embeddings: int | None = None, column: int = 0, seed: int = 0
) -> "Tensor":
    """Ids of texts, int64 [n]: those of ``tierstore train`` and servers with ``data.hashing = "mix"``, and dynamic ids.
    Readers differ in two things: CSV's ``12.0`` is 12, and a Criteo category is ``int(text, 16)`` unless it is an id.

    Args:
        strings: texts, or their UTF-8 bytes.
        num_embeddings: rows of the table, over which ids are spread as by ``data.hashing = "mix"``; several texts may
            share a row. None: ids of a table with ``DynamicIds``, any int64.
        column: with ``num_embeddings``, the place in ``data.sparse_columns``: a text has other rows in other columns.
        seed: ``data.hash_seed``, in [0, 2**63).

    Raises:
        TypeError: not texts. ValueError: an empty text, which stands for a missing category; a wrong option.
    """
    import torch  # here, as torch and numba take seconds to load

    from .texts import CategoryRule, spread, text_categories

    rule = CategoryRule(num_embeddings is None, require_int(seed, "seed", 0, _MAX_SEED))
    require_int(column, "column", 0, _MAX_COLUMN)
    if num_embeddings is None and column:
        raise ValueError(f"column={column} goes with num_embeddings; dynamic ids are the same in every column")
    ids = text_categories(list(_utf8(strings)), rule)
    if num_embeddings is not None:
        spread(ids, require_int(num_embeddings, "num_embeddings", 1, MAX_ROWS), column, ids)
    return torch.from_numpy(ids)


def _utf8(strings: Iterable[str | bytes]) -> Iterator[bytes]:
    if isinstance(strings, str | bytes):
        raise TypeError(f"strings is one text, {excerpt(strings)}; give a list of texts")
    for place, each in enumerate(strings):
        if not isinstance(each, str | bytes):
            raise TypeError(f"strings[{place}] is of {type(each).__name__}, not str or bytes; integers are ids already")
        if not each:
            raise ValueError(f"strings[{place}] is empty, a missing category: leave it out of its bag")
        yield each.encode() if isinstance(each, str) else each
