"""The layout of arrays on the mesh: a table for weights, and rows divided over the axes `data` and `fsdp`."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ragen_jax.utils.errors import UserError

# Pattern for the path of a weight -> mesh axis of each dimension. The first match counts. Weights that match no pattern
# (norms, the value head) are copied to every device. This is how programs compute. Between programs, trained weights,
# gradients and the optimiser's state are divided further, see `trained_spec` and `optimizer_spec`.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r'embed_tokens$', ('tensor', 'fsdp')),  # [V, D]
  (r'[qkv]_proj/kernel$', ('fsdp', 'tensor', None)),  # [D, heads, H]
  (r'[qkv]_proj/bias$', ('tensor', None)),  # [heads, H]
  (r'o_proj/kernel$', ('tensor', None, 'fsdp')),  # [N, H, D]
  (r'(gate|up)_proj/kernel$', ('fsdp', 'tensor')),  # [D, F]
  (r'down_proj/kernel$', ('tensor', 'fsdp')),  # [F, D]
  (r'lm_head/kernel$', ('fsdp', 'tensor')),  # [D, V]
  (r'experts/(gate|up)_proj/kernel$', ('tensor', 'fsdp', None)),  # [E, D, F]
  (r'experts/down_proj/kernel$', ('tensor', None, 'fsdp')),  # [E, F, D]
  # Linear attention: heads of keys with their channels, or heads of values.
  (r'in_proj_(qkv|z)/kernel$', ('fsdp', 'tensor', None)),  # [D, heads, channels]
  (r'in_proj_[ab]/kernel$', ('fsdp', 'tensor')),  # [D, heads]
  (r'out_proj/kernel$', ('tensor', None, 'fsdp')),  # [heads, W, D]
  (r'conv1d$', ('tensor', None, None)),  # [heads, channels, taps]
  (r'(A_log|dt_bias)$', ('tensor',)),  # [heads]
  # Vision towers, with U for their width.
  (r'patch_embed/proj/kernel$', (None, 'fsdp')),  # [values of a patch, U]
  (r'pos_embed$', (None, 'fsdp')),  # [positions, U]
  (r'attn/qkv/kernel$', ('fsdp', None, 'tensor', None)),  # [U, 3, heads, H]
  (r'attn/qkv/bias$', (None, 'tensor', None)),  # [3, heads, H]
  (r'attn/proj/kernel$', ('tensor', None, 'fsdp')),  # [heads, H, U]
  (r'linear_fc1/kernel$', ('fsdp', 'tensor')),  # [U, F], of mergers [4 U, 4 U]
  (r'linear_fc2/kernel$', ('tensor', 'fsdp')),  # [F, U], of mergers [4 U, D]
  # LoRA with rank r: A has the input axes of its projection, B the output axes.
  (r'[qkv]_proj/adapter/lora_a$', ('fsdp', None)),  # [D, r]
  (r'[qkv]_proj/adapter/lora_b$', (None, 'tensor', None)),  # [r, heads, H]
  (r'o_proj/adapter/lora_a$', ('tensor', None, None)),  # [N, H, r]
  (r'(gate|up)_proj/adapter/lora_a$', ('fsdp', None)),  # [D, r]
  (r'(gate|up)_proj/adapter/lora_b$', (None, 'tensor')),  # [r, F]
  (r'down_proj/adapter/lora_a$', ('tensor', None)),  # [F, r]
  (r'(o|down|out)_proj/adapter/lora_b$', (None, 'fsdp')),  # [r, D]
  (r'in_proj_\w+/adapter/lora_a$', ('fsdp', None)),  # [D, r]
  (r'in_proj_(qkv|z)/adapter/lora_b$', (None, 'tensor', None)),  # [r, heads, channels]
  (r'in_proj_[ab]/adapter/lora_b$', (None, 'tensor')),  # [r, heads]
  (r'out_proj/adapter/lora_a$', ('tensor', None, None)),  # [heads, W, r]
)


# What follows the path of a kernel in 8 bits in that of its scales, which have its shape, but length 1 along inputs
# (`models.int8`).
SCALE = '/scale'


def weight_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The layout of one weight, whose path is joined by '/', on a mesh with the axes `mesh.AXES`.

  Raises UserError if a mesh axis does not divide a dimension; the message lists smaller sizes that do.
  """
  scales = path.endswith(f'/kernel{SCALE}')
  for pattern, axes in RULES:
    if re.search(pattern, path.removesuffix(SCALE) if scales else path) and len(axes) == len(shape):
      if scales:
        axes = tuple(None if size == 1 else axis for size, axis in zip(shape, axes, strict=True))
      for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
          fits = [n for n in range(1, mesh.shape[axis] + 1) if size % n == 0]
          raise UserError(
            f'mesh.{axis}={mesh.shape[axis]}: does not divide the {size} of {path} {list(shape)}; smaller sizes that '
            f'divide it: {", ".join(map(str, fits))}'
          )
      return PartitionSpec(*axes)
  return PartitionSpec()


# Weights that neighbouring devices divide among them while tokens are sampled: most of a model, and no heads.
_SHARED = re.compile(r'^policy/(embed_tokens|layers/.*/(gate|up|down)_proj/.*|lm_head/.*)$')


def sampling_mesh(mesh: Mesh, group: int) -> Mesh:
  """The same devices in the same order, with `group` neighbours along `fsdp`; `group` divides `row_shards`."""
  shape = (row_shards(mesh) // group, group, mesh.shape['tensor'])
  return Mesh(mesh.devices.reshape(shape), mesh.axis_names)


def sampling_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The layout of one weight while tokens are sampled: heads over `tensor`, MLP and vocabulary over `fsdp` too.

  A device attends with its own rows, and computes the MLP and the logits of its neighbours' rows as well, with its part
  of these weights. Arguments and errors are those of `weight_spec`; the mesh is that of `sampling_mesh`.
  """
  # The neighbours are not those of the training: what `fsdp` divides there stays whole here.
  whole = AbstractMesh((1, 1, mesh.shape['tensor']), mesh.axis_names)
  spec = without_axis(weight_spec(path, shape, whole), 'fsdp')
  if not _SHARED.search(path):
    return spec
  axes = tuple(('tensor', 'fsdp') if name == 'tensor' else name for name in spec)
  parts = mesh.shape['tensor'] * mesh.shape['fsdp']
  for size, axis in zip(shape, axes, strict=True):
    if axis is not None and size % parts:
      raise UserError(
        f'agent.decode_shards={mesh.shape["fsdp"]}: with mesh.tensor={mesh.shape["tensor"]} it does not divide the '
        f'{size} of {path} {list(shape)}'
      )
  return PartitionSpec(*axes)


# Smaller arrays of the optimiser stay whole: to exchange their parts takes longer than to compute all of them.
_LEAST_DIVIDED = 2**12


def optimizer_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The layout of the gradient of a weight and of its moments: that of the weight, divided over `data` as well.

  Every copy of the weights would otherwise hold the same gradients and moments and compute the same update (ZeRO, arXiv
  1910.02054). The first dimension that `data` divides is divided; if there is none, or the array is small, the layout
  is that of the weight. Arguments and errors are those of `weight_spec`.
  """
  spec, parts = weight_spec(path, shape, mesh), mesh.shape['data']
  if parts == 1 or math.prod(shape) < _LEAST_DIVIDED:
    return spec
  axes = [*spec, *[None] * (len(shape) - len(spec))]
  for i, (size, axis) in enumerate(zip(shape, axes, strict=True)):
    if size % (parts * (1 if axis is None else mesh.shape[axis])) == 0:
      return PartitionSpec(*axes[:i], 'data' if axis is None else (axis, 'data'), *axes[i + 1 :])
  return spec


def trained_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The layout of a trained weight between programs: that of its moments, so that `apply` exchanges no weights.

  The programs that compute with it gather it (`gathered`). Vision towers stay as `weight_spec` has them: the programs
  that look at images run for every observation, and would gather them each time. Arguments and errors are those of
  `weight_spec`.
  """
  return (weight_spec if _TOWER.search(path) else optimizer_spec)(path, shape, mesh)


_TOWER = re.compile('(^|/)visual/')


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
  """A tree of `NamedSharding`, one for each leaf of a tree of weights that programs compute with."""
  return _shardings(tree, mesh, weight_spec)


def trained_shardings(tree: Any, mesh: Mesh) -> Any:
  """A tree of `NamedSharding`, one for each leaf of a tree of trained weights between programs."""
  return _shardings(tree, mesh, trained_spec)


def optimizer_shardings(tree: Any, mesh: Mesh) -> Any:
  """A tree of `NamedSharding`, one for each leaf of a tree of gradients or of an optimiser's state."""
  return _shardings(tree, mesh, optimizer_spec)


def _shardings(tree: Any, mesh: Mesh, spec: Callable[[str, tuple[int, ...], Mesh], PartitionSpec]) -> Any:
  def of(path, leaf):
    return NamedSharding(mesh, spec(path_of(path), leaf.shape, mesh))

  return jax.tree_util.tree_map_with_path(of, tree)


def path_of(path: Sequence[Any]) -> str:
  """The path of a leaf of a tree of weights, as `RULES` has it."""
  names = [str(getattr(p, 'key', getattr(p, 'name', getattr(p, 'idx', p)))) for p in path]
  return '/'.join(n for n in names if n != 'value')


def gathered(weights: Any, mesh: Mesh, dtype: Any = None, *, stacked: bool = False) -> Any:
  """Inside a program: the same weights, laid out as programs compute with them; gradients keep their layout and type.

  Args:
    dtype: type in which arrays of several axes are sent if it is smaller than theirs, which rounds them; None for their
      own. The type of the result is that of `weights`, so that its gradient adds up in it.
    stacked: each array has an axis of layers in front.
  """

  def gather(path, x):
    name, shape = path_of(path), x.shape[stacked:]
    spec = weight_spec(name, shape, mesh)
    if trained_spec(name, shape, mesh) == spec:
      return x
    sent = x.dtype if dtype is None or len(shape) < 2 else min(x.dtype, jnp.dtype(dtype), key=lambda t: t.itemsize)
    return _gathered(x, NamedSharding(mesh, PartitionSpec(*[None] * stacked, *spec)), sent)

  return jax.tree_util.tree_map_with_path(gather, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, whole: NamedSharding, sent: Any) -> jax.Array:
  return jax.lax.with_sharding_constraint(x.astype(sent), whole).astype(x.dtype)


_gathered.defvjp(lambda x, whole, sent: (_gathered(x, whole, sent), None), lambda whole, sent, _, gradient: (gradient,))


def exchanged(weights: Any, mesh: Mesh) -> Any:
  """The same weights; in the backward pass the devices of `mesh` add up their gradients, and each keeps its part."""
  return jax.tree.map(_exchanged, weights, tree_shardings(weights, mesh), optimizer_shardings(weights, mesh))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _exchanged(x: jax.Array, whole: NamedSharding, divided: NamedSharding) -> jax.Array:
  del whole, divided
  return x


def _exchange(whole: NamedSharding, divided: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  # In two steps. In one, the partitioner would compute the parts one after the other, between which it sends them.
  return (jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(gradient, whole), divided),)


def copied_to_rows(weights: Any, mesh: Mesh) -> Any:
  """A copy of weights for each part of the rows: [...] -> [row_shards, ...], a copy on each device.

  The gradient of a copy needs no other device; the gradients of all copies are exchanged as `exchanged` says.
  """

  def copy(x, sharding):
    spec = PartitionSpec(ROW_AXES, *without_axis(sharding.spec, 'fsdp'))
    return jax.lax.with_sharding_constraint(
      jnp.broadcast_to(x, (row_shards(mesh), *x.shape)), NamedSharding(mesh, spec)
    )

  return jax.tree.map(copy, exchanged(weights, mesh), tree_shardings(weights, mesh))


_exchanged.defvjp(lambda x, *_: (x, None), _exchange)


# The mesh axes that rows are divided over.
ROW_AXES = ('data', 'fsdp')


def row_shards(mesh: Mesh) -> int:
  """Number of parts that rows are divided into."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def row_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """The layout of arrays [B, ...] with rows divided; of arrays whose rows are another `axis`."""
  return NamedSharding(mesh, PartitionSpec(*[None] * axis, ROW_AXES))


@dataclasses.dataclass(frozen=True)
class SamplingLayout:
  """How the computations of sampled tokens are laid out."""

  mesh: Mesh | None  # the devices that rows are divided over; None for one
  # Weights are laid out as `sampling_spec` says, so a device needs the rows of its neighbours for the MLP and the
  # logits. The mesh is a `sampling_mesh`.
  shared: bool
  least_rows: int  # least rows of a product with weights on each device; zeros are added to fewer

  def gathered(self, x: jax.Array) -> jax.Array:
    """Rows [B, ...] with those of the neighbours, if they are needed."""
    if not self.shared:
      return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec('data')))

  def divided(self, x: jax.Array) -> jax.Array:
    """The rows that `gathered` gathered, each on its own device."""
    return jax.lax.with_sharding_constraint(x, row_sharding(self.mesh)) if self.shared else x

  def padded(self, x: jax.Array) -> jax.Array:
    """Rows [B, ...] with as many rows of zeros as are missing, behind the rows of each device."""
    shards = 1 if self.mesh is None else row_shards(self.mesh)
    missing = self.least_rows - len(x) // shards
    if missing <= 0:
      return x
    x = x.reshape(shards, -1, *x.shape[1:])
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))).reshape(-1, *x.shape[2:])

  def without_padding(self, x: jax.Array, rows: int) -> jax.Array:
    """The `rows` rows that `padded` got."""
    if len(x) == rows:
      return x
    shards = 1 if self.mesh is None else row_shards(self.mesh)
    return x.reshape(shards, -1, *x.shape[1:])[:, : rows // shards].reshape(rows, *x.shape[1:])


def looked_up(mesh: Mesh) -> NamedSharding:
  """The layout of the result [B, T, D] of an embedding look-up, with D divided over `fsdp` like the embedding.

  From this layout, one exchange along `fsdp` yields complete rows. Without it as an intermediate step, the partitioner
  would compute all rows on every device.
  """
  return NamedSharding(mesh, PartitionSpec('data', None, 'fsdp'))


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any, mesh: Mesh) -> jax.Array:
  """Embeds tokens i32[B, T] with a table [V, D] of embeddings: [B, T, D] of type `dtype`, laid out as `looked_up` says.

  If there are more tokens than rows of the table, devices along `data` add up the gradient of the table in the backward
  pass. Otherwise the compiler may exchange the smaller gradients of the embedded tokens instead, from which each device
  makes its part of the gradient of the table.
  """
  if mesh.shape['data'] > 1 and tokens.size > len(table):
    table = exchanged({'embed_tokens': table}, mesh)['embed_tokens']
  rows = jnp.take(table, tokens, axis=0, mode='clip').astype(dtype)
  return jax.lax.with_sharding_constraint(rows, looked_up(mesh))


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
  """The layout of an array that is no longer divided over one mesh axis."""
  left = [tuple(n for n in (names if isinstance(names, tuple) else (names,)) if n != axis) for names in spec]
  return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in left))


def place_rows(tree: Any, mesh: Mesh) -> Any:
  """Puts host arrays [B, ...] on the mesh, rows divided. Every process has all rows and places those of its devices."""
  return place(tree, jax.tree.map(lambda _: row_sharding(mesh), tree))


def copied(tree: Any, mesh: Mesh) -> Any:
  """Puts host arrays on the mesh, each device with a copy of all of them."""
  return place(tree, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree))


def place(tree: Any, shardings: Any) -> Any:
  """Puts arrays, the same on every process, on devices; those that already have the layout are not copied."""
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def one(x, sharding):
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
      return x
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(one, tree, shardings)
