"""Where every array lives on the mesh: one table for weights, and rows divided over `data` and `fsdp`."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.utils.errors import UserError

# Path of a weight -> the mesh axis of each of its dimensions; the first match counts. Whatever matches none is on every
# device: norms, and the value head. The optimiser's state lies as the weights that it belongs to.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r'embed_tokens$', ('tensor', 'fsdp')),  # [V, D]
  (r'[qkv]_proj/kernel$', ('fsdp', 'tensor', None)),  # [D, heads, H]
  (r'[qkv]_proj/bias$', ('tensor', None)),  # [heads, H]
  (r'o_proj/kernel$', ('tensor', None, 'fsdp')),  # [N, H, D]
  (r'(gate|up)_proj/kernel$', ('fsdp', 'tensor')),  # [D, F]
  (r'down_proj/kernel$', ('tensor', 'fsdp')),  # [F, D]
  (r'lm_head/kernel$', ('fsdp', 'tensor')),  # [D, V]
  # LoRA, with r: A has its projection's inputs and B its outputs.
  (r'[qkv]_proj/adapter/lora_a$', ('fsdp', None)),  # [D, r]
  (r'[qkv]_proj/adapter/lora_b$', (None, 'tensor', None)),  # [r, heads, H]
  (r'o_proj/adapter/lora_a$', ('tensor', None, None)),  # [N, H, r]
  (r'(gate|up)_proj/adapter/lora_a$', ('fsdp', None)),  # [D, r]
  (r'(gate|up)_proj/adapter/lora_b$', (None, 'tensor')),  # [r, F]
  (r'down_proj/adapter/lora_a$', ('tensor', None)),  # [F, r]
  (r'(o|down)_proj/adapter/lora_b$', (None, 'fsdp')),  # [r, D]
)


def weight_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The layout of one weight.

  Args:
    path: its names joined by '/'.
    shape: its shape.
    mesh: with the axes of `mesh.AXES`.

  Raises:
    UserError: a dimension does not divide; the message says which axis, and what would.
  """
  for pattern, axes in RULES:
    if re.search(pattern, path) and len(axes) == len(shape):
      for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
          fits = [n for n in range(1, mesh.shape[axis] + 1) if size % n == 0]
          raise UserError(
            f'mesh.{axis}={mesh.shape[axis]}: does not divide the {size} of {path} {list(shape)}; up to there '
            f'{", ".join(map(str, fits))} would'
          )
      return PartitionSpec(*axes)
  return PartitionSpec()


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
  """A `NamedSharding` for each leaf of a tree of weights, or of an optimiser's state for them."""

  def of(path, leaf):
    names = [str(getattr(p, 'key', getattr(p, 'name', getattr(p, 'idx', p)))) for p in path]
    names = [n for n in names if n != 'value']
    return NamedSharding(mesh, weight_spec('/'.join(names), leaf.shape, mesh))

  return jax.tree_util.tree_map_with_path(of, tree)


# The mesh axes that rows are divided over.
ROW_AXES = ('data', 'fsdp')


def row_shards(mesh: Mesh) -> int:
  """In how many parts rows are divided."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Layout of arrays whose first axis are rows."""
  return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def looked_up(mesh: Mesh) -> NamedSharding:
  """Layout of [B, T, D] as a look-up in the embedding gives it, whose width is divided over `fsdp`.

  From here one exchange along `fsdp` gives whole rows; without the step the partitioner makes all rows everywhere.
  """
  return NamedSharding(mesh, PartitionSpec('data', None, 'fsdp'))


def place_rows(tree: Any, mesh: Mesh) -> Any:
  """Puts host arrays [B, ...] on the mesh, rows divided; every process has all rows and places those of its devices."""
  return place(tree, jax.tree.map(lambda _: row_sharding(mesh), tree))


def place(tree: Any, shardings: Any) -> Any:
  """Puts arrays that every process has alike where `shardings`, a tree of the same structure, says.

  What lies there already is not copied.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def one(x, sharding):
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
      return x
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(one, tree, shardings)
