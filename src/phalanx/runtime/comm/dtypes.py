"""Data types by name: DTYPE_NAMES maps torch's types to names as events use them, DTYPES names to types."""

import torch

DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
