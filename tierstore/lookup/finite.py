"""Where values stopped being finite: what a store opened with ``check_finite`` looks at around each update.

Before it the gradient of the output, so that what is not finite there changes no row; after it the distinct rows and
their optimizer state. One sum says whether all is well, as NaN and infinity stay in it.
"""

import logging
import weakref
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..layout import ROW_MASK
from ..pool.joined import Joined

CheckFinite = Literal["error", "log"]  # what is done then
_LOG: Final = logging.getLogger("tierstore")
_LOGGED: Final = weakref.WeakSet[Any]()  # tables


def check_gradient(lookup: Any, gradient: Tensor) -> None:
    """NonFiniteError, or a warning, if the gradient of a lookup's output, float32 [batch, columns], is not finite; if
    a row is not either, and is in this process, it is named as the cause."""
    joined: Joined = lookup.joined
    total = float(gradient.sum(dtype=torch.float64)) + joined.scale.sum(dtype=np.float64)
    if not np.isfinite(total) and len(gradient) == joined.batch:  # else it is of towers, whose rows' owners look
        position = _first_of(lookup, gradient.detach().cpu().numpy())
        if position >= 0:
            check_cause(joined)
            _report(joined, "gradient", position)


def check_cause(joined: Joined) -> None:
    """NonFiniteError, or a warning, if a row, in this process, is not finite before an update."""
    if len(joined) and joined.tables[0] is joined.tables[0].local and (position := _first_row(joined)) >= 0:
        _report(joined, "row", position)


def check_rows(joined: Joined) -> None:
    """NonFiniteError, or a warning, if a row, or its optimizer state, is not finite after an update."""
    for source in ("row", "state"):
        if (position := _first_row(joined, of_state=source == "state")) >= 0:
            _report(joined, source, position, "No more is committed until store.rollback", updates=0)


def _first_of(lookup: Any, gradient: Any) -> int:
    """The first position that has a gradient that is not finite, -1 if none has: it may be one of empty bags."""
    joined, width = lookup.joined, gradient.shape[1]
    begins = np.add.outer(joined.columns.astype(np.int64), np.arange(joined.batch) * width).ravel()
    windows = np.lib.stride_tricks.sliding_window_view(~np.isfinite(gradient.ravel()), joined.tables[0].layout.dim)
    bad = windows[begins]  # bool [bags, dim]
    if lookup.mode == "max" and getattr(lookup, "_arg_max", None) is not None:
        found = torch.as_tensor(lookup._arg_max).cpu().numpy()[bad]
    else:
        scale = joined.scale if len(joined.scale) else np.zeros(1)
        found = np.flatnonzero(np.repeat(bad.any(axis=1), np.diff(joined.starts)) | ~np.isfinite(scale))
    found = found[found >= 0]
    return int(found.min()) if len(found) else -1


def _first_row(joined: Joined, *, of_state: bool = False) -> int:
    """The first position, of which there are some, whose row, or its optimizer state, is not finite; -1 if none is."""
    inverse, keys = joined.distinct
    tier = joined.tables[0].pool.tier
    rows = tier.read_state(keys) if of_state else tier.read(keys)
    bad = ~rows.sum(dim=1, dtype=torch.float64).isfinite().cpu().numpy()
    return int(bad[inverse].argmax()) if bad.any() else -1


def _report(
    joined: Joined, source: str, position: int, outcome: str = "No row was changed by this step", *, updates: int = 1
) -> None:
    part, position = joined.origin(position)
    bag = int(np.searchsorted(part.starts, position, side="right")) - 1
    feature, sample, name = bag // part.batch, None, None
    table, key = part.table_of_feature[feature], int(part.keys[position])
    if part.dynamic_ids is not None:
        ids, has_row = part.dynamic_ids
        row_id = int(ids[np.flatnonzero(has_row)[position]])
    else:
        row_id = key & ROW_MASK if table.local.ids is None else table.local.ids.id_of(key)
    if part._ids is not None or part.dynamic_ids is not None:  # else its rows were given by key
        first, stop = part.features.bounds[part.table_of[feature] :][:2].tolist()
        names, sample = table.config.feature_names, bag % part.batch
        name = names[feature - first] if len(names) == stop - first else None
    found: dict[str, Any] = {"source": source, "table": table.name, "id": row_id, "feature": name, "sample": sample}
    found["update"] = table.local.state.step + updates
    text = f"not finite: {', '.join(f'{name} {each!r}' for name, each in found.items() if each is not None)}"
    if table.local.store.check_finite == "error":
        error = NonFiniteError(f"{text}. {outcome}")
        error.found = found
        raise error
    if table.local not in _LOGGED:
        _LOGGED.add(table.local)
        _LOG.warning("%s; the next of this table are not logged", text)
