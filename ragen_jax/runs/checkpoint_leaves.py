"""The arrays of a checkpoint by name: which there are, whether they fit a model, and where they are restored to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

PyTree = Any


def named_leaves(tree: PyTree) -> dict[str, Any]:
  """{'params/layers/0/kernel': leaf, ...} in the order of the tree; raises TypeError if a leaf is not an array."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='/') or 'state'
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
      raise TypeError(f'leaf {name} of the state is a {type(leaf).__name__}, not an array; put it into meta')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(f'leaf {name} of the state is a typed PRNG key; save its jax.random.key_data')
    if name in leaves:
      raise TypeError(f'two leaves of the state are named {name}')
    leaves[name] = leaf
  return leaves


def describe_leaf(leaf: Any) -> str:
  """'float32[4,8]': dtype and shape, which must be equal for a leaf to be restored."""
  return f'{np.dtype(leaf.dtype).name}[{",".join(map(str, leaf.shape))}]'


def first_difference(saved: Mapping[str, str], wanted: Mapping[str, Any], partial: bool) -> str | None:
  """A description of the first leaf that differs in name, shape or dtype; None if all are equal."""
  for name, leaf in wanted.items():
    if name not in saved:
      return f'it has no {name}, which is {describe_leaf(leaf)} here'
    if saved[name] != describe_leaf(leaf):
      return f'{name} is {saved[name]} there and {describe_leaf(leaf)} here'
  for name in saved:
    if name not in wanted and not partial:
      return f'{name}, which is {saved[name]} there, does not exist here'
  return None


def restore_target(leaf: Any) -> Any:
  """The leaf as an argument of Orbax's restore: a NumPy array, or shape, dtype and sharding."""
  if isinstance(leaf, np.ndarray):
    return leaf
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def empty_array(target: Any) -> Any:
  """An array without elements, because Orbax does not store such arrays."""
  if isinstance(target, np.ndarray):
    return np.zeros(target.shape, target.dtype)
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: np.zeros(target.shape, target.dtype)[index]
  )
