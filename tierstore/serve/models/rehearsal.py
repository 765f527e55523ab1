"""Each model run once before the first request, which would else wait until kernels are compiled or loaded."""

import logging
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ...errors import TierstoreError
from ..base import Model
from ..messages import DATATYPES, InferTensor, TensorSpec

__all__ = ["rehearse"]

_LOG: Final = logging.getLogger("tierstore.serve")


def rehearse(models: Iterable[Model]) -> None:
    """Ask each model for its tables' first rows: one request alone, and two together. What fails is told in the log."""
    for model in models:
        specs = {spec.name: spec for spec in model.metadata("").inputs}
        num_ids = specs["lengths"].shape[0] if "lengths" in specs else 1
        inputs = {name: _input(spec, max(1, num_ids)) for name, spec in specs.items()}
        try:
            query = model.parse(inputs)
            model.run([query])
            model.run([query, query])
        except TierstoreError as error:
            _LOG.warning("model %s fails on its first row: %s", model.name, error)


def _input(spec: TensorSpec, num_ids: int) -> InferTensor:
    """One sample: each feature has id 0."""
    dtype: Any = DATATYPES[spec.datatype]
    if spec.name == "lengths":
        return InferTensor(spec.datatype, np.ones([max(1, size) for size in spec.shape], dtype))
    shape = (num_ids,) if len(spec.shape) == 1 else tuple(max(1, size) for size in spec.shape)
    return InferTensor(spec.datatype, np.zeros(shape, dtype))
