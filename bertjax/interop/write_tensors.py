# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of a directory: a safetensors file."""

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
    """Write a safetensors file, which may be read by whom other new files may.

    Raises OSError where it cannot be written, for a full disk too.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors lets the owner alone read what it writes
    try:
        save_file({**tensors}, path, metadata=metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    path.chmod(mode)
