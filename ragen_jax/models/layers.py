"""Parts that the decoder and the vision tower share: linear maps, norms, and a loop over layers of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import SCALE, exchanged, gathered, path_of
from ragen_jax.models.int8 import Int8

# Parts of the paths of weights that are used in fp32: norms, the decays of linear attention, and scales of `Int8`.
_KEEP_TYPE = ('norm', 'A_log', 'dt_bias', f'kernel{SCALE}')

# Below this width, the q/k/v and the gate/up projections of a layer run as one matrix product each: small products are
# bound by launch overhead. For wide models, joining the kernels would only copy weights.
FUSE_BELOW_WIDTH = 512


def fan_in_normal(key: jax.Array, shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
  """Gaussian initial values with standard deviation 1/sqrt(fan_in).

  The fixed 0.02 that is usual for wide models is too small at width 64: layers would hardly change the residual stream.
  """
  return (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + weight) over the last axis, in fp32."""

  def __init__(self, size: int, eps: float, param_dtype: Any, offset: int = 0):
    """At first, x is multiplied by 1. `offset` is 1 for models that store the factor's difference from 1."""
    self.weight = nnx.Param(jnp.full((size,), 1 - offset, param_dtype))
    self.eps = eps
    self.offset = offset

  def __call__(self, x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
    weight = self.weight[...].astype(jnp.float32)
    return (x32 * (self.offset + weight if self.offset else weight)).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean) / deviation * weight + bias over the last axis, in fp32."""

  def __init__(self, size: int, eps: float, param_dtype: Any):
    self.weight = nnx.Param(jnp.ones((size,), param_dtype))
    self.bias = nnx.Param(jnp.zeros((size,), param_dtype))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
    return (x32 * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
  """A linear map from axes `inputs` to axes `outputs`: kernel of shape `inputs + outputs`, bias of shape `outputs`."""

  def __init__(
    self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, param_dtype: Any, rngs: nnx.Rngs
  ):
    fan_in = math.prod(inputs)
    self.kernel = nnx.Param(fan_in_normal(rngs.params(), inputs + outputs, fan_in, param_dtype))
    self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None
    self.inputs = inputs
    self.outputs = outputs
    self.adapter = None  # set by `lora.attach`

  def matrix(self, dtype: Any) -> jax.Array:
    """The kernel as a matrix [prod(inputs), prod(outputs)]."""
    return self.kernel[...].astype(dtype).reshape(math.prod(self.inputs), math.prod(self.outputs))

  def vector(self, dtype: Any) -> jax.Array:
    """The bias as a vector [prod(outputs)]; zeros if there is none."""
    if self.bias is None:
      return jnp.zeros((math.prod(self.outputs),), dtype)
    return self.bias[...].astype(dtype).reshape(-1)

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., *inputs] -> [..., *outputs]."""
    batch = x.shape[: x.ndim - len(self.inputs)]
    # Compilers choose the layout of rows and columns if they are two axes. With one column a row, one axis is better.
    x = x.reshape(*(batch if math.prod(batch[1:]) > 1 else (-1,)), math.prod(self.inputs))
    kernel = self.kernel.get_value()
    y = kernel(x) if isinstance(kernel, Int8) else x @ self.matrix(x.dtype)
    if self.bias is not None:
      y = y + self.vector(x.dtype)
    if self.adapter is not None:
      y = y + self.adapter(x)
    return y.reshape(batch + self.outputs)


def project(x: jax.Array, projections: list[Projection], *, fused: bool) -> list[jax.Array]:
  """Several projections of one input: [..., D] -> [..., *outputs] for each; as a single matrix product if `fused`."""
  if not fused or any(isinstance(p.kernel.get_value(), Int8) for p in projections):
    return [projection(x) for projection in projections]
  kernel = jnp.concatenate([p.matrix(x.dtype) for p in projections], axis=1)
  batch, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
  y = x @ kernel
  if any(p.bias is not None for p in projections):
    y = y + jnp.concatenate([p.vector(x.dtype) for p in projections])
  outs, start = [], 0
  for p in projections:
    width = math.prod(p.outputs)
    out = y[:, start : start + width]
    if p.adapter is not None:
      out = out + p.adapter(x)
    outs.append(out.reshape(batch + p.outputs))
    start += width
  return outs


def scan_layers(
  layers: Sequence[nnx.Module],
  x: jax.Array,
  run: Callable[[nnx.Module, jax.Array, Any], tuple[jax.Array, Any]],
  *,
  mesh: Mesh | None,
  checkpoint: Callable[[Callable], Callable] | None,
  inputs: Any = None,
  runs: Sequence[int] = (1,),
) -> tuple[jax.Array, Any]:
  """`x, outputs[i] = run(layer, x, inputs[i])` for each layer i, as one loop over their weights; gives x, outputs.

  The weights are stored layer by layer and stacked here, in the type of the computations, which is half the copy. Those
  of `_KEEP_TYPE`, which are used in fp32, and int8 stay as they are. `x` has the type of the computations, too.

  Args:
    run: a layer, x and its part of `inputs` -> x after it, of the same shape and type, and a tree of arrays.
    mesh: the devices over which the weights are gathered and their gradients exchanged; None for one device.
    checkpoint: applied to each layer in the body of the loop, to compute parts of it again in the backward pass; None
      keeps all.
    inputs: a tree of arrays [layers, ...], as the outputs are.
    runs: the layers of one turn of the loop, as the lengths of runs of layers of one structure. Every turn has the
      same. A run of several is a loop of its own, or the compiler would compute several layers again at a time.
  """

  def stack(path, *weights):
    keep = weights[0].dtype == jnp.int8 or any(name in path_of(path) for name in _KEEP_TYPE)
    return jnp.stack([w if keep else w.astype(x.dtype) for w in weights])

  period, first, graphdefs, stacks = sum(runs), 0, [], []
  for count in runs:
    parts = [nnx.split(layer) for i, layer in enumerate(layers) if first <= i % period < first + count]
    stacked = jax.tree_util.tree_map_with_path(stack, *(weights for _, weights in parts))
    if mesh is not None:
      stacked = gathered(stacked, mesh, stacked=True)  # one exchange for all layers, without a copy into the stack
    if count > 1:
      stacked = jax.tree.map(lambda w, count=count: w.reshape(-1, count, *w.shape[1:]), stacked)
    graphdefs.append(parts[0][0])
    stacks.append(stacked)
    first += count

  def body(x, of_turn):
    (weights, given), at, outputs = of_turn, 0, []
    for graphdef, count, of_run in zip(graphdefs, runs, weights, strict=True):

      def one(x, of_layer, own, graphdef=graphdef):
        of_layer = of_layer if mesh is None else exchanged(of_layer, mesh)
        return run(nnx.merge(graphdef, of_layer), x, own)

      again = one if checkpoint is None else checkpoint(one)
      if count == 1:
        x, output = again(x, of_run, jax.tree.map(lambda a, i=at: a[i], given))
        output = jax.tree.map(lambda a: a[None], output)
      else:
        own = jax.tree.map(lambda a, i=at, n=count: a[i : i + n], given)
        x, output = jax.lax.scan(lambda x, parts, again=again: again(x, *parts), x, (of_run, own))
      outputs.append(output)
      at += count
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)

  inputs = jax.tree.map(lambda a: a.reshape(-1, period, *a.shape[1:]), inputs)
  x, outputs = jax.lax.scan(body, x, (tuple(stacks), inputs))
  return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


class Frozen(nnx.Param):
  """A weight that no run trains; `lora.partition` puts it beside the weights under adapters."""


def is_frozen(module: nnx.Module) -> bool:
  """Whether the weights of a module are `Frozen`."""
  return all(isinstance(weight, Frozen) for _, weight in nnx.to_flat_state(nnx.state(module, nnx.Param)))


def freeze(module: nnx.Module) -> None:
  """Makes all weights of a module `Frozen`."""
  for _, part in nnx.iter_modules(module):
    for name, value in list(vars(part).items()):
      if isinstance(value, nnx.Param) and not isinstance(value, Frozen):
        setattr(part, name, Frozen(value.get_value()))
