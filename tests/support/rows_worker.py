"""Serves rows on several meshes of eight devices and compares them with one device; run by test_mesh.py.

python -m tests.support.rows_worker
"""

from __future__ import annotations

import math

import jax
import numpy as np
from flax import nnx

from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import tree_shardings
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling.draw import RowSampling
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.engine.device_rows import DeviceRows, Feed

_SHAPE = QwenConfig(
  vocab_size=1024, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
# data, fsdp, tensor, and the devices that divide the MLP.
_MESHES = ((1, 1, 1, 1), (2, 2, 2, 4), (8, 1, 1, 2), (1, 8, 1, 8))
_ROWS = 16


def _serve(model: ActorCritic, shape: tuple[int, int, int], decode_shards: int):
  """The replies of all rows, each with numbers of its own, and then of two of them, one of which was cut."""
  mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
  params = nnx.split(model)[1]
  params = jax.device_put(params, tree_shardings(params, mesh))
  sampler = Sampler(model, stop_ids=(3,), mesh=mesh, decode_shards=decode_shards, vocab_limit=1000)
  rows, rng = DeviceRows(sampler, params, rows=_ROWS, columns=72, chunk=8, widths=(8,)), np.random.default_rng(0)
  rows.feed([Feed(i, rng.integers(5, 900, size=6).astype(np.int32), True) for i in range(_ROWS)], 8)
  keys, every = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), _ROWS))), np.arange(_ROWS)
  sampling = RowSampling(
    temperature=np.where(every % 3 == 0, 0, 1).astype(np.float32),
    top_p=np.where(every % 2 == 0, 0.9, 1).astype(np.float32),
    top_k=np.where(every % 5 == 0, 20, 0).astype(np.int32),
  )
  first = rows.decode(every.tolist(), keys, np.full(_ROWS, 8, np.int32), sampling, alternatives=True)
  rows.copy(3, 3, 4)
  plain = RowSampling(np.ones(2, np.float32), np.ones(2, np.float32), np.zeros(2, np.int32))
  return first, rows.decode([0, 3], keys[:2], np.full(2, 8, np.int32), plain, alternatives=False)


def main() -> None:
  model = ActorCritic(Qwen(_SHAPE, rngs=nnx.Rngs(0)))
  one, *others = (_serve(model, mesh[:3], mesh[3]) for mesh in _MESHES)
  for found in others:
    for ours, theirs in zip(found, one, strict=True):
      np.testing.assert_array_equal(ours.tokens, theirs.tokens)
      np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
      np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=1e-3)


if __name__ == '__main__':
  main()
