# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.config import load_config
from bertjax.sweeps.trainer import SweepLoop, check_same
from bertjax.training.loop import LoopState


@pytest.mark.parametrize("more, tokens", [({}, [5, 3]), ({"text_tokens": 7}, [14, 14])])
def test_tokens_are_those_that_a_run_counts(more, tokens):
    """Rows with copies or targets have their own count, text_tokens."""
    mask = np.array([[[1, 1, 1], [1, 1, 0]], [[1, 0, 0], [1, 1, 0]], [[1, 1, 1]] * 2])
    batch = {"attention_mask": mask}  # three runs, the last is filler
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


def test_more_runs_than_those_under_way():
    """More runs may join a finished sweep; the message says so only in this case."""
    config = load_config("finetune/classify.py:smoke")
    facts = {"config": config.to_dict(), "stores": {"a": "1"}, "tokenizer": "t"}
    two, three = ([[seed, 1e-3] for seed in range(n)] for n in (2, 3))

    def refusal(before, wanted, **other):
        before = {**facts, "runs": before, "size": 2, **other}
        with pytest.raises(UserError) as e:
            check_same("w", before, {**facts, "runs": wanted}, config, True)
        return str(e.value)

    first = "--workdir=w holds another sweep: "
    assert refusal(two, three) == (
        f"{first}seeds: 0, 1 -> 0, 1, 2; finish it first, by the command that began "
        "it, and more runs can join it; or take another workdir"
    )
    assert refusal(three, two).endswith("0, 1, 2 -> 0, 1; take another workdir")
    assert refusal(two, three, stores={}).endswith("other text; take another workdir")
    changed = {**facts["config"], "batch_size": 999}
    told = refusal(two, three, config=changed)
    assert told.startswith(f"{first}batch_size: 999 -> ") and "finish" not in told
