"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen projections, as PEFT has them.

A projection with an adapter gives x W + (x A) B * alpha / rank; the sum of W and A B is made only where a merged
checkpoint is written. `partition` says which weights of a model are trained: with adapters, these and all that is not
part of the policy (the value head); without, all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models.qwen import Projection, Qwen

TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
ALL_LINEAR = 'all-linear'

_LEAVES = ('lora_a', 'lora_b')


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Adapters of a model.

  Attributes:
    rank: r, columns of A and rows of B.
    alpha: what the adapter adds is multiplied with alpha / rank.
    targets: names of `TARGETS`, in their order.
  """

  rank: int
  alpha: int | float
  targets: tuple[str, ...] = TARGETS

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def parse_targets(text: str) -> tuple[str, ...]:
  """'all-linear' (every projection of the layers, as in PEFT) or 'q_proj,v_proj' -> names in the order of `TARGETS`.

  Raises:
    ValueError: a name is unknown, or there is none.
  """
  names = TARGETS if text == ALL_LINEAR else tuple(name.strip() for name in text.split(',') if name.strip())
  if not names or set(names) - set(TARGETS):
    raise ValueError(f'allowed: {ALL_LINEAR}, or some of {", ".join(TARGETS)} with commas between them')
  return tuple(name for name in TARGETS if name in names)


class Adapter(nnx.Module):
  """What is added to one projection: (x A) B * scale. Its weights are fp32, whatever those of the projection are."""

  def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], config: LoraConfig, rngs: nnx.Rngs):
    """A is uniform within 1/sqrt(fan-in), as PEFT draws it (Kaiming with a = sqrt(5)); B is zero."""
    bound = math.prod(inputs) ** -0.5
    shape = (*inputs, config.rank)
    self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
    self.lora_b = nnx.Param(jnp.zeros((config.rank, *outputs), jnp.float32))
    self.scale = config.scale

  def __call__(self, x: jax.Array) -> jax.Array:
    """[n, inputs] -> [n, outputs], both flattened."""
    a = self.lora_a[...].astype(x.dtype).reshape(x.shape[-1], -1)
    b = self.lora_b[...].astype(x.dtype).reshape(a.shape[-1], -1)
    return ((x @ a) * jnp.asarray(self.scale, x.dtype)) @ b


def attach(model: Qwen, config: LoraConfig, rngs: nnx.Rngs) -> None:
  """Puts a fresh adapter beside every target; what the model computes stays the same until one is trained."""
  for name, projection in _projections(model):
    if name[-1] in config.targets:
      projection.adapter = nnx.data(Adapter(projection.inputs, projection.outputs, config, rngs))


def _projections(model: Qwen) -> Iterator[tuple[tuple[Any, ...], Projection]]:
  """(path, projection) of all layers, e.g. ('layers', 0, 'self_attn', 'q_proj')."""
  for i, layer in enumerate(model.layers):
    for block, module in (('self_attn', layer.self_attn), ('mlp', layer.mlp)):
      for name in TARGETS:
        if hasattr(module, name):
          yield ('layers', i, block, name), getattr(module, name)


def adapters(model: Qwen) -> dict[tuple[Any, ...], Adapter]:
  """The adapters of a model by the path of their projection; none without LoRA."""
  return {path: p.adapter for path, p in _projections(model) if p.adapter is not None}


def merged(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
  """W + A B * scale in fp32, on the host.

  Args:
    kernel: [*inputs, *outputs].
    a: [*inputs, r].
    b: [r, *outputs].
    scale: alpha / rank.
  """
  product = a.reshape(-1, a.shape[-1]).astype(np.float32) @ b.reshape(b.shape[0], -1).astype(np.float32)
  return kernel.astype(np.float32) + np.float32(scale) * product.reshape(kernel.shape)


def partition(params: nnx.State) -> tuple[nnx.State, nnx.State]:
  """(trained, frozen) weights of an `ActorCritic`: without adapters all are trained and the second state is empty."""
  if not any(path[-1] in _LEAVES for path, _ in nnx.to_flat_state(params)):
    return params, nnx.State({})
  return nnx.split_state(params, lambda path, _: path[0] != 'policy' or path[-1] in _LEAVES, ...)


def join(trained: nnx.State, frozen: nnx.State) -> nnx.State:
  """The inverse of `partition`."""
  return nnx.merge_state(trained, frozen) if frozen else trained


def merge(graphdef: Any, trained: Any, frozen: Any) -> Any:
  """The model, while `trained` is differentiated: its variables are all of this trace, as `nnx.remat` wants them."""
  return nnx.merge(graphdef, trained, jax.tree.map(lambda x: x, frozen))
