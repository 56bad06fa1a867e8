# SPDX-License-Identifier: Apache-2.0
"""Turn text into token stores: python -m bertjax.prepare --config=...

Training does the same when the stores are missing; this does it beforehand.
"""

import sys
from collections.abc import Sequence

from bertjax import build
from bertjax import config as c


def main(argv: Sequence[str]) -> int:
    config = c.parse(argv).config
    c.check(config)
    build.check_inputs(config)
    prepared = build.prepare(
        config, lambda text: print(text, file=sys.stderr, flush=True)
    )
    for name, store in {"train": prepared.train, **prepared.valid}.items():
        print(f"{name} {store.path} {store.content_hash}")
    return 0


if __name__ == "__main__":
    c.command(main)
