"""Members of an IntEnum as indexes of arrays in kernels, which numba before 0.68 does not take."""

# ruff: noqa: ARG001 (numba wants an overload and what it gives to take the same arguments)

import operator
from typing import Any

from numba import types
from numba.extending import overload


@overload(operator.getitem)
def _getitem(array: Any, index: Any) -> Any:
    def get(array: Any, index: Any) -> Any:
        return array[index.value]

    return get if isinstance(array, types.Array) and isinstance(index, types.IntEnumMember) else None


@overload(operator.setitem)
def _setitem(array: Any, index: Any, value: Any) -> Any:
    def put(array: Any, index: Any, value: Any) -> None:
        array[index.value] = value

    return put if isinstance(array, types.Array) and isinstance(index, types.IntEnumMember) else None
