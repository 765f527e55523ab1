"""Names for the types of arrays, by element."""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Float64s = NDArray[np.float64]
Ids = Int64s | Int32s
Weights = Floats | NDArray[np.uint16] | Bytes  # rows: float32, the bits of float16 or bfloat16, or quantized
