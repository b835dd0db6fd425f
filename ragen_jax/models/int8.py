"""Matrices of layers in 8 bits: int8 numbers, with a float32 scale for each output.

They take the place of arrays in the `nnx.Param` of a kernel, so that a model has one structure in both forms. They are
never trained: gradients pass through products with them to what they are multiplied with. Embeddings, the output
projection, norms, biases, routers and the small gates of linear attention stay as they are.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import NamedSharding, Sharding

from ragen_jax.distributed.sharding import SCALE, path_of, weight_spec

# Pattern for the path of a kernel in a policy -> its axes of inputs, from behind, so that experts may be in front.
_KERNELS = (
  (r'([qkv]_proj|in_proj_(qkv|z))', (-3,)),  # [D, heads, H]
  (r'(o|out)_proj', (-3, -2)),  # [heads, H, D]
  (r'(gate|up|down)_proj', (-2,)),  # [D, F], [F, D]
)

_LARGEST = 127


@struct.dataclass
class Int8:
  """A kernel, `value * scale`.

  Attributes:
    value: int8, of the kernel's shape, from -127 to 127.
    scale: f32, of the same shape, but of length 1 along the axes of inputs.
  """

  value: jax.Array
  scale: jax.Array

  @property
  def size(self) -> int:
    """Number of weights."""
    return self.value.size

  def __call__(self, x: jax.Array) -> jax.Array:
    """The product [..., prod(inputs)] -> [..., prod(outputs)]; the kernel is not of experts."""
    y = _product(x, self.value.reshape(x.shape[-1], -1))
    return (y * self.scale.reshape(-1)).astype(x.dtype)


@jax.custom_vjp
def _product(x: jax.Array, values: jax.Array) -> jax.Array:
  return x @ values.astype(x.dtype)  # int8 is exact in bfloat16


# The backward pass keeps the kernel in 8 bits, not as computed with.
_product.defvjp(
  lambda x, values: (_product(x, values), values),
  lambda values, gradient: (gradient @ values.astype(gradient.dtype).T, None),
)


def input_axes(path: str) -> tuple[int, ...] | None:
  """The axes of inputs, from behind, of a weight that can be `Int8`, by its path; None for any other."""
  for pattern, axes in _KERNELS:
    if re.search(rf'^(policy/)?layers/.*/{pattern}/kernel$', path):
      return axes
  return None


def quantised(kernel: jax.Array | np.ndarray, axes: tuple[int, ...]) -> Int8:
  """The nearest `Int8`: each number changes by at most half the scale of its output.

  The scale is a 127th of an output's largest number; 1 for an output without weights, and not finite for one with a
  number that is not, so that its products are NaN, too. An array of the host stays there.
  """
  xp: Any = np if isinstance(kernel, np.ndarray) else jnp
  kernel = kernel.astype(np.float32)
  scale = xp.max(xp.abs(kernel), axis=axes, keepdims=True) * np.float32(1 / _LARGEST)
  scale = xp.where(scale == 0, np.float32(1), scale)
  finite = xp.isfinite(scale)
  numbers = xp.round(xp.where(finite, kernel, 0) / xp.where(finite, scale, 1))
  return Int8(xp.clip(numbers, -_LARGEST, _LARGEST).astype(np.int8), scale)


def scale_sharding(path: str, shape: tuple[int, ...], like: Sharding | None) -> Sharding | None:
  """The layout of the scale of the kernel at `path`, where the kernel has the layout `like`."""
  if not isinstance(like, NamedSharding):
    return like
  return NamedSharding(like.mesh, weight_spec(path + SCALE, shape, like.mesh))


def abstract(params: Any) -> Any:
  """Weights with shapes, types and layouts of `Int8` in place of the arrays that can be; others as they are."""

  def of(path, x):
    name = path_of(path)
    axes = input_axes(name)
    if axes is None or isinstance(x, Int8):
      return x
    outputs = [1 if i - x.ndim in axes else n for i, n in enumerate(x.shape)]
    return Int8(
      jax.ShapeDtypeStruct(x.shape, np.int8, sharding=x.sharding),
      jax.ShapeDtypeStruct(outputs, np.float32, sharding=scale_sharding(name, tuple(outputs), x.sharding)),
    )

  return jax.tree_util.tree_map_with_path(of, params, is_leaf=_is_int8)


def quantise(model: nnx.Module) -> None:
  """Makes all kernels of a policy that can be `Int8`."""

  def of(path, x):
    axes = input_axes(path_of(path))
    return x if axes is None else quantised(x, axes)

  nnx.update(model, jax.tree_util.tree_map_with_path(of, nnx.state(model, nnx.Param)))


def like(x: jax.Array | Int8, wanted: Any) -> jax.Array | Int8:
  """A weight in the form and type of another one, perhaps abstract. An `Int8` stays as it is."""
  if isinstance(x, Int8):
    return x
  if isinstance(wanted, Int8):
    return quantised(x, tuple(i for i, n in enumerate(wanted.scale.shape) if n == 1))
  return x.astype(wanted.dtype)


def leaves(tree: Any) -> list[Any]:
  """The leaves of a tree of weights, of which an `Int8` is one."""
  return jax.tree.leaves(tree, is_leaf=_is_int8)


def replaced(tree: Any, changes: dict[int, Any]) -> Any:
  """A tree of weights with other `leaves`, by their indices."""
  structure = jax.tree.structure(tree, is_leaf=_is_int8)
  return jax.tree.unflatten(structure, [changes.get(i, x) for i, x in enumerate(leaves(tree))])


def _is_int8(x: Any) -> bool:
  return isinstance(x, Int8)
