"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen projections, compatible with PEFT.

A projection with an adapter computes x W + (x A) B * alpha / rank; W and A B are only added when a merged checkpoint is
written. `partition` splits the weights of a model into trained and frozen ones. With adapters, the adapters, the
policy's vision tower and all weights outside of the policy (the critic) are trained; without adapters, all weights are.
`Frozen` weights are never trained, which is how a vision tower is frozen (`layers.freeze`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import trained_shardings, tree_shardings
from ragen_jax.models.layers import Frozen, Projection
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig

TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
# Those of linear attention, which only some models have.
LINEAR_TARGETS = ('in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a', 'out_proj')
# That of the expert that all columns use. The experts that a router chooses have no adapters; nor have MLPs in other
# layers of Qwen3, whose names PEFT takes for those of the experts.
SHARED_GATE = 'shared_expert_gate'
ALL_LINEAR = 'all-linear'

# The attribute of `Qwen` that holds the vision tower.
VISION = 'visual'

_LEAVES = ('lora_a', 'lora_b')


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """The adapters of a model: their rank r and alpha, and the projections that have them, in the order of `targets`."""

  rank: int
  alpha: int | float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    """Factor of the adapters' output."""
    return self.alpha / self.rank


def targets(cfg: QwenConfig) -> tuple[str, ...]:
  """The projections that can have adapters in models of this shape."""
  found = TARGETS
  if cfg.experts is not None:
    shared = cfg.experts.shared_width > 0
    found = (*TARGETS, SHARED_GATE) if shared else TARGETS[:4]
  return found if cfg.linear is None else found + LINEAR_TARGETS


def parse_targets(text: str, known: tuple[str, ...] = TARGETS) -> tuple[str, ...]:
  """Parses `lora.targets`: 'all-linear' (every projection, as in PEFT), or names such as 'q_proj,v_proj'.

  The result is in the order of `known`, the `targets` of the model.

  Raises:
    ValueError: a name is unknown, or there is none.
  """
  names = known if text == ALL_LINEAR else tuple(name.strip() for name in text.split(',') if name.strip())
  if not names or set(names) - set(known):
    raise ValueError(f'allowed: {ALL_LINEAR}, or some of {", ".join(known)} with commas between them')
  return tuple(name for name in known if name in names)


class Adapter(nnx.Module):
  """The adapter of one projection, (x A) B * scale. Its weights are fp32, independent of the projection's type."""

  def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], config: LoraConfig, rngs: nnx.Rngs):
    """Initialises A uniformly in +-1/sqrt(fan-in), like PEFT (Kaiming with a = sqrt(5)), and B with zeros."""
    bound = math.prod(inputs) ** -0.5
    shape = (*inputs, config.rank)
    self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
    self.lora_b = nnx.Param(jnp.zeros((config.rank, *outputs), jnp.float32))
    self.scale = config.scale

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., prod(inputs)] -> [..., prod(outputs)]."""
    a = self.lora_a[...].astype(x.dtype).reshape(x.shape[-1], -1)
    b = self.lora_b[...].astype(x.dtype).reshape(a.shape[-1], -1)
    return ((x @ a) * jnp.asarray(self.scale, x.dtype)) @ b


def attach(model: Qwen, config: LoraConfig, rngs: nnx.Rngs) -> None:
  """Adds a new adapter to every target. The output of the model does not change until an adapter is trained."""
  for name, projection in _projections(model):
    if name[-1] in config.targets:
      projection.adapter = nnx.data(Adapter(projection.inputs, projection.outputs, config, rngs))


def _projections(model: Qwen) -> Iterator[tuple[tuple[Any, ...], Projection]]:
  """Yields (path, projection) of all layers; a path is such as ('layers', 0, 'self_attn', 'q_proj')."""
  for i, layer in enumerate(model.layers):
    for block in (('self_attn',), ('linear_attn',), ('mlp',), ('mlp', 'shared_expert')):
      module = functools.reduce(lambda found, name: getattr(found, name, None), block, layer)
      for name in targets(model.cfg):
        if getattr(module, name, None) is not None:
          yield ('layers', i, *block, name), getattr(module, name)


def adapters(model: Qwen) -> dict[tuple[Any, ...], Adapter]:
  """The adapters of a model by the path of their projection; empty without LoRA."""
  return {path: p.adapter for path, p in _projections(model) if p.adapter is not None}


def merged(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
  """Adds an adapter to its kernel: W + A B * scale, f32[*inputs, *outputs], on the host.

  W is [*inputs, *outputs], A [*inputs, r] and B [r, *outputs]; the scale is alpha / rank.
  """
  product = a.reshape(-1, a.shape[-1]).astype(np.float32) @ b.reshape(b.shape[0], -1).astype(np.float32)
  return kernel.astype(np.float32) + np.float32(scale) * product.reshape(kernel.shape)


def has_adapters(params: nnx.State) -> bool:
  """Whether the weights of an `ActorCritic` include adapters."""
  return any(path[-1] in _LEAVES for path, _ in nnx.to_flat_state(params))


def is_adapter(path: Sequence[Any]) -> bool:
  """Whether a weight is part of an adapter, by the keys on the way to it in a tree of weights."""
  return any(getattr(key, 'key', getattr(key, 'name', key)) in _LEAVES for key in path)


def partition(params: nnx.State) -> tuple[nnx.State, nnx.State]:
  """Splits the weights of an `ActorCritic` into (trained, frozen). `frozen` is empty if all weights are trained."""
  flat, adapted = nnx.to_flat_state(params), has_adapters(params)

  def is_trained(path, weight):
    if isinstance(weight, Frozen):
      return False
    return not adapted or path[0] != 'policy' or path[1] == VISION or path[-1] in _LEAVES

  if all(is_trained(path, weight) for path, weight in flat):
    return params, nnx.State({})
  return nnx.split_state(params, is_trained, ...)


def shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
  """The layout of each weight of an `ActorCritic` between programs: only trained ones are divided over `data`."""
  trained, frozen = partition(params)
  return join(trained_shardings(trained, mesh), tree_shardings(frozen, mesh))


def join(trained: nnx.State, frozen: nnx.State) -> nnx.State:
  """All weights; the inverse of `partition`."""
  return nnx.merge_state(trained, frozen) if frozen else trained


def merge(graphdef: Any, trained: Any, frozen: Any) -> Any:
  """Rebuilds the model inside a gradient trace.

  Frozen weights are copied, so that `nnx.remat` sees variables of this trace only.
  """
  return nnx.merge(graphdef, trained, jax.tree.map(lambda x: x, frozen))
