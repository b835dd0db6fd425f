"""Rotary position embeddings (RoFormer, arXiv 2104.09864), of one axis or of several."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# The axes of an image's positions: time, height, width.
AXES = 3


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """How Llama 3.1 and later stretch the wavelengths of a model that was first trained on shorter contexts.

  Attributes:
    factor: divides the frequencies of long wavelengths.
    low_freq_factor: wavelengths above `original_max_position_embeddings / low_freq_factor` are long.
    high_freq_factor: wavelengths below `original_max_position_embeddings / high_freq_factor` stay; those between are
      interpolated.
    original_max_position_embeddings: the shorter context, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """All wavelengths are `factor` times as long."""

  factor: float


def frequencies(half: int, theta: float, scaling: Llama3Scaling | LinearScaling | None = None) -> np.ndarray:
  """The angles of one position, f32[half], computed on the host so that every program has the same constants.

  `half` is H/2, and `theta` the base of the wavelengths; `scaling` is as in `transformers`' rope_types 'llama3' and
  'linear'.
  """
  plain = theta ** (-np.arange(half) / half)
  if isinstance(scaling, LinearScaling):
    return (plain / scaling.factor).astype(np.float32)
  if scaling is not None:
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)  # in the shorter context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 0 for long wavelengths, 1 for short ones
    plain = plain * (kept + (1 - kept) / scaling.factor)
  return plain.astype(np.float32)


def rotary(
  x: jax.Array,
  positions: jax.Array,
  theta: float,
  axes: tuple[int, ...] = (),
  scaling: Llama3Scaling | LinearScaling | None = None,
  width: int = 0,
) -> jax.Array:
  """Rotary embedding of queries or keys [B, T, heads, H], halves convention; the result has the type of `x`.

  `positions` are i32[B, T], or i32[B, T, AXES] if columns have a position on each axis. Each of the H/2 frequencies
  then reads its position from one of `axes`, see `frequency_axes`; a column with equal positions is rotated like one
  with a single position. `frequencies` describes `theta` and `scaling`. With a `width` above 0, only the first `width`
  numbers of a head are rotated, as a head of this width would be.
  """
  if width and width < x.shape[-1]:
    turned = rotary(x[..., :width], positions, theta, axes, scaling)
    return jnp.concatenate([turned, x[..., width:]], axis=-1)
  angles_of_one = frequencies(x.shape[-1] // 2, theta, scaling)  # [H/2]
  if positions.ndim == 2:
    angles = positions[..., None].astype(jnp.float32) * angles_of_one  # [B, T, H/2]
  else:  # each frequency has one axis, and the products with the others are zero
    by_axis = np.where(np.asarray(axes) == np.arange(AXES)[:, None], angles_of_one, np.float32(0))  # [AXES, H/2]
    angles = sum(positions[..., i, None].astype(jnp.float32) * by_axis[i] for i in range(AXES))
  cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
  if x.shape[1] == 1:
    return jax.lax.platform_dependent(x, cos, sin, tpu=_rotated_by_product, default=rotated)
  return rotated(x, cos, sin)


def frequency_axes(sections: tuple[int, ...], *, interleaved: bool) -> tuple[int, ...]:
  """The axis that each frequency of a multi-axis rotary embedding reads its position from.

      sections (2, 3, 3)   blocked      0 0 1 1 1 2 2 2
      sections (4, 2, 2)   interleaved  0 1 2 0 1 2 0 0

  `sections` are the numbers of frequencies of each axis. If `interleaved`, the axes take turns until the second and the
  third have their frequencies; otherwise each has a block.
  """
  if not interleaved:
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
  return tuple(i % AXES if i < AXES * sections[i % AXES] else 0 for i in range(sum(sections)))


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates the two halves of each head: [..., heads, H] with the cosines and sines [..., 1, H/2] of its angles."""
  half = x.shape[-1] // 2
  x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _rotated_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """The same numbers. TPUs copy halves of a head, and exchange them sooner by a product with ones and zeros."""
  swap = jnp.asarray(np.roll(np.eye(x.shape[-1]), x.shape[-1] // 2, axis=1), x.dtype)
  swapped = jnp.einsum(
    'BTNH,HJ->BTNJ', x, swap, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
  cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
  return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)
