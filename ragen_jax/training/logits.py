"""Log-probs and entropies from logits over a long vocabulary, read as few times as possible.

    forward    m = max x    Z = sum exp(x - m)    E = sum exp(x - m) (x - m) / Z
               log p(t) = x[t] - m - log Z        H = log Z - E
    backward   dx = g (1[t] - p) - h p (x - m - E)    for gradients g of log p(t) and h of H

The forward pass reads the logits twice, the second time for both sums; the backward pass once, because it has the sums.
`losses.token_logprobs` and `losses.token_entropy`, which are differentiated operation by operation, read them more
often.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The name of the sums of a position, which a backward pass may keep.
SUMS = 'sums of logits'


@jax.custom_vjp
def logprobs_and_entropies(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Log-probs of tokens `targets` i32[...], and entropies in nats, each f32[...], from logits f32[..., V].

  Tokens without probability have a large negative logit, not -inf.
  """
  return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array):
  most = jnp.max(logits, axis=-1)
  shifted = logits - most[..., None]
  weights = jnp.exp(shifted)
  total, weighted = jnp.sum(weights, axis=-1), jnp.sum(weights * shifted, axis=-1)
  mean = weighted / total
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  most, total, mean = (checkpoint_name(x, SUMS) for x in (most, total, mean))
  return (chosen - (most + jnp.log(total)), jnp.log(total) - mean), (logits, targets, most, total, mean)


def _backward(kept, gradients):
  logits, targets, *sums = kept
  most, total, mean, of_logprobs, of_entropies = (x[..., None] for x in (*sums, *gradients))
  shifted = logits - most
  p = jnp.exp(shifted) / total
  chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
  return of_logprobs * (chosen - p) - of_entropies * p * (shifted - mean), None


logprobs_and_entropies.defvjp(_forward, _backward)
