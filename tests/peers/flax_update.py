# SPDX-License-Identifier: Apache-2.0
"""A training step of transformers' FlaxBertForMaskedLM, as its users train it.

Logits are computed at every position; the loss covers positions whose label is not
-100. Needs transformers 4.57 and JAX 0.10 (Python 3.11).
"""

import jax
import jax.numpy as jnp
import optax


def make_update(model, tx, dropout):
    """Make (params, opt_state, key, batch) -> (params, opt_state, key, loss), jitted.

    tx: an optax transformation; dropout: whether the model has dropout. params and
    opt_state are donated.
    """

    def loss_fn(params, batch, key):
        logits = model(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            params=params,
            dropout_rng=key if dropout else None,
            train=dropout,
        )[0]
        weights = batch["labels"] >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), jnp.where(weights, batch["labels"], 0)
        )
        return (losses * weights).sum() / weights.sum()

    def update(params, opt_state, key, batch):
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, now)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    return jax.jit(update, donate_argnums=(0, 1))
