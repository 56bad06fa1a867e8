# SPDX-License-Identifier: Apache-2.0
"""Check that task.index was made by the model from which a run begins."""

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly.models import open_model
from bertjax.inference.embed_texts import digest_of
from bertjax.tasks import passage_index
from bertjax.tasks.tables import Say, silent

KEY = "task.index"


def check_index(config: ConfigDict, say: Say) -> None:
    """Refuse an index whose vectors come from another model.

    They must be from the model that a run begins from, or from the one whose
    passage vectors that model trained with. Training changes only the vectors of
    questions: the run's own model is then another one, so the model that it began
    from counts. Raises UserError.
    """
    path, source = config.task.index, config.init_from
    if not path:
        return
    facts = passage_index.read_facts(path, KEY)
    if not source:
        made_by = facts.get("path", "DIR")
        raise UserError(
            f"{KEY}={path}: questions are compared with its vectors: begin from "
            f"the model that made them (--config.init_from={made_by})"
        )
    model = open_model(source, "init_from", silent)
    known = digest_of(model.read_params()), model.meta.get("index_model", "")
    passage_index.check_model(facts, f"{KEY}={path}", known, f"init_from={source}", say)
