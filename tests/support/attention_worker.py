"""Attention on several devices; run by test_attention_kernels.py, and prints what it found as JSON.

python -m tests.support.attention_worker mesh
python -m tests.support.attention_worker tpu COLUMNS HEADS,KV_HEADS,HEAD_WIDTH MESH

`mesh` compares all implementations on 8 devices with one device, and one in a model. `tpu` compiles attention and its
gradient for one row per part of the rows, for TPUs that need not be there, with libtpu.
"""

from __future__ import annotations

import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed.mesh import AXES, make_mesh
from ragen_jax.distributed.sharding import ROW_AXES, row_sharding, row_shards, tree_shardings
from ragen_jax.models.attention import causal
from ragen_jax.models.attention_settings import EINSUM, AttentionSettings
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from tests.support.trees import seen_until_of

_COLLECTIVE = re.compile(r' (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(')


def program(settings, heads):
  """Compiles to the output and the gradients of its sum of squares; heads and rows are divided."""

  def both(q, k, v, seen_until):
    attend = jax.checkpoint(lambda *x: causal(*x, seen_until, settings))
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(2 * out)

  return jax.jit(both, out_shardings=heads)


def gradient_of_model(settings, mesh=None):
  """Gradient of a layer's output by its weights, which are divided as in a run."""
  cfg = QwenConfig(
    architecture='qwen3', vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=8,
    num_kv_heads=2, head_dim=16,
  )  # fmt: skip
  model = Qwen(cfg, attention=settings, rngs=nnx.Rngs(0))
  tokens = np.random.default_rng(1).integers(0, 64, (4, 140))
  if mesh is not None:
    model.activation_sharding = row_sharding(mesh)
    tokens = jax.device_put(tokens, row_sharding(mesh))
  graphdef, params = nnx.split(model)
  if mesh is not None:
    params = jax.device_put(params, tree_shardings(params, mesh))

  @jax.jit
  @jax.grad
  def gradient(params, tokens):
    model = nnx.merge(graphdef, params)
    return jnp.mean(jnp.sin(model(model.embed(tokens), remat='layers')[0]))

  return [np.asarray(x) for x in jax.tree.leaves(gradient(params, tokens))]


def on_mesh():
  mesh = make_mesh(2, 2, 2)
  heads = NamedSharding(mesh, PartitionSpec(ROW_AXES, None, 'tensor'))
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(4, 140, n, 64)).astype(np.float32) for n in (8, 2, 2))
  seen_until = seen_until_of(np.sort(rng.integers(0, 3, (4, 140)), axis=1))
  want = [np.asarray(x) for x in program(EINSUM, None)(q, k, v, seen_until)]
  found = {}
  for name in ('einsum', 'blocks', 'splash', 'flash'):
    settings = AttentionSettings(name, mesh, interpret=True)
    run = program(settings, heads)
    placed = [*jax.device_put((q, k, v), heads), jax.device_put(seen_until, row_sharding(mesh))]
    outs = run(*placed)
    differences = [np.abs(np.asarray(x) - y).max() / np.abs(y).max() for x, y in zip(outs, want, strict=True)]
    found[name] = {
      'difference': float(max(differences)),
      'parts': [len({str(s.index) for s in x.addressable_shards}) for x in outs],
      'collectives': len(_COLLECTIVE.findall(run.lower(*placed).compile().as_text())),
    }
  in_model = zip(gradient_of_model(settings, mesh), gradient_of_model(EINSUM), strict=True)
  found['model'] = float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in in_model))
  return found


def on_tpu(kernel, columns, heads, mesh):
  devices = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4').devices
  shape = [*map(int, mesh.split('x'))]
  mesh = Mesh(np.asarray(devices[: np.prod(shape)]).reshape(shape), AXES)
  by_heads = NamedSharding(mesh, PartitionSpec(ROW_AXES, None, 'tensor'))
  n, k, h = map(int, heads.split(','))
  rows = row_shards(mesh)

  def abstract(count):
    return jax.ShapeDtypeStruct((rows, int(columns), count, h), jnp.bfloat16, sharding=by_heads)

  seen_until = jax.ShapeDtypeStruct((rows, int(columns)), jnp.int32, sharding=row_sharding(mesh))
  settings = AttentionSettings(kernel, mesh if mesh.size > 1 else None)
  compiled = program(settings, by_heads).lower(abstract(n), abstract(k), abstract(k), seen_until).compile()
  text = compiled.as_text()
  return {
    'temp': compiled.memory_analysis().temp_size_in_bytes,
    'kernels': text.count('custom_call_target="tpu_custom_call"'),
    'collectives': len(_COLLECTIVE.findall(text)),
  }


def main() -> None:
  task, *arguments = sys.argv[1:]
  if task == 'tpu':
    # The compiler is all that is used of libtpu.
    os.environ |= {'TPU_ACCELERATOR_TYPE': 'none', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    jax.config.update('jax_platforms', 'cpu')
  print(json.dumps({'mesh': on_mesh, 'tpu': on_tpu}[task](*arguments)))


if __name__ == '__main__':
  main()
