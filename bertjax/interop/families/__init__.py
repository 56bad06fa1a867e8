# SPDX-License-Identifier: Apache-2.0
"""List the families of Hugging Face models: the Family objects of the files here.

Another package adds one by an entry point of the group "bertjax.families" whose value
is such an object ("my_package.my_family:FAMILY").
"""

import functools
import importlib
from importlib import metadata

from bertjax import UserError, registry
from bertjax.interop.family import Family

GROUP = "bertjax.families"


@functools.cache
def all_families() -> dict[str, Family]:
    """Return the families by model_type, in the order in which a writer tries them.

    Raises UserError if another package's family cannot be imported.
    """
    own = [importlib.import_module(f"{__name__}.{n}") for n in registry.names(__name__)]
    families = [f for m in own for f in vars(m).values() if isinstance(f, Family)]
    # Some families whose names come first share RoBERTa's code, so RoBERTa goes first.
    families.sort(key=lambda f: (f.model_type not in ("bert", "roberta"), f.model_type))
    for entry in metadata.entry_points(group=GROUP):
        try:
            families.append(entry.load())
        except (ImportError, AttributeError) as e:
            raise UserError(f"{GROUP}: {entry.value} cannot be imported: {e}") from e
    return {family.model_type: family for family in families}
