# SPDX-License-Identifier: Apache-2.0
"""Build host halves (features) for tests from config keys, without a config file."""

from bertjax.assembly import resolve
from bertjax.config.schema import base
from bertjax.data.masking.vocab_tables import make_tables


def make_half(
    needs, tokenizer, length, tables=None, rate=None, rates=(), accumulate=1, **keys,
):  # fmt: skip
    """Make the features of `needs` ("mlm", "nsp", ...).

    keys: keys of config.data, and id_streams for model.id_streams. A tokenizer without
    the attribute has_mask gets has_mask=True.
    """
    if not hasattr(tokenizer, "has_mask"):
        tokenizer.has_mask = True
    config = base()
    config.accumulate = accumulate
    config.model.id_streams = keys.pop("id_streams", None)
    config.data.update(keys)
    rate = config.data.mask_rate if rate is None else rate
    needs = frozenset(needs.split()) if isinstance(needs, str) else needs
    tables = tables or make_tables(tokenizer)
    return resolve.make_features(config, needs, tokenizer, tables, length, rate, rates)
