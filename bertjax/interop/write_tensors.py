# SPDX-License-Identifier: Apache-2.0
"""Write safetensors files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


def write_tensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file with the permissions of other new files.

    Raises OSError if it cannot be written, for instance on a full disk.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors makes its files private to their owner
    try:
        save_file({**tensors}, path, metadata=metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    path.chmod(mode)
