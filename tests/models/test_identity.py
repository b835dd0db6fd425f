"""Digests of weights, and what they are compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.models import identity
from ragen_jax.models.int8 import Int8
from ragen_jax.utils.errors import UserError


def _weights():
  rng = np.random.default_rng(0)
  return {
    'a': jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
    'b': jnp.asarray(rng.normal(size=(24,)), jnp.bfloat16),
    'c': Int8(jnp.asarray(rng.integers(-127, 128, (8, 4)), jnp.int8), jnp.ones((1, 4), jnp.float32)),
  }


def test_the_digest_is_the_same_on_every_mesh_and_another_for_other_weights():
  weights = _weights()
  digest = identity.digest_of(weights)
  assert digest.startswith('bfloat16 float32 int8 ') and digest == identity.digest_of(_weights())
  mesh = Mesh(np.asarray(jax.devices()).reshape(-1), ('x',))

  def spread_over(x):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec('x' if x.shape[0] > 1 else None)))

  spread = jax.tree.map(spread_over, weights)
  assert digest == identity.digest_of(spread)
  for name in 'abc':
    for i, leaf in enumerate(leaves := jax.tree.leaves(weights[name])):
      bit = np.asarray(leaf).copy()
      bit.view(np.uint8).reshape(-1)[0] ^= 1
      changed = jax.tree.unflatten(jax.tree.structure(weights[name]), [*leaves[:i], jnp.asarray(bit), *leaves[i + 1 :]])
      assert identity.digest_of(weights | {name: changed}) != digest
  moved = (
    weights | {'a': weights['a'][::-1]},
    weights | {'b': jnp.roll(weights['b'], 1)},
    weights | {'a': weights['a'].T},
  )
  assert len({digest, *map(identity.digest_of, moved)}) == 4
  assert identity.digest_of({}) == identity.digest_of(None) == ''


@pytest.mark.parametrize(
  ('was', 'now', 'refused'),
  [
    ('float32 a', 'float32 a', False), ('float32 a', 'float32 b', True), ('float32 a', 'bfloat16 b', False),
    ('', 'float32 b', False), ('float32 a', '', False),
  ],
)  # fmt: skip
def test_only_other_weights_of_the_same_types_are_refused(was, now, refused):
  meta = {'unsaved': {'frozen': was}} if was else {}
  if refused:
    with pytest.raises(UserError, match=r'^here: the frozen weights of the model .* put the files back'):
      identity.check_unsaved(meta, {'frozen': now}, 'here')
  else:
    identity.check_unsaved(meta, {'frozen': now}, 'here')
