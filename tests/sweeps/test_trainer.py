# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.sweeps.trainer import SweepLoop
from bertjax.training.loop import LoopState


@pytest.mark.parametrize("more, tokens", [({}, [5, 3]), ({"text_tokens": 7}, [14, 14])])
def test_tokens_are_those_that_a_run_counts(more, tokens):
    """Rows that hold copies, or targets too, say themselves how many they are."""
    mask = np.array([[[1, 1, 1], [1, 1, 0]], [[1, 0, 0], [1, 1, 0]], [[1, 1, 1]] * 2])
    batch = {"attention_mask": mask}  # of three runs, the last of which is a filler
    batch |= {name: np.full((3, 2), n) for name, n in more.items()}
    loop = SimpleNamespace(
        batches=iter([batch]),
        groups=SimpleNamespace(advance=lambda *given: None),
        scores=SimpleNamespace(ended=set()),
        progress=SimpleNamespace(add=lambda n: None, done=0),
        stop=SimpleNamespace(number=0),
        state=LoopState(),
        runs=[(0, 1e-3), (1, 1e-3)],
        tokens=[0, 0],
    )
    SweepLoop.update(loop)
    assert loop.tokens == tokens and loop.state.step == 1
