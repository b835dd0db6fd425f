"""How many devices divide the MLP and the vocabulary among them while they sample."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ragen_jax.distributed.mesh import AXES
from ragen_jax.models import presets
from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.sampling import division
from ragen_jax.utils.errors import UserError

SMALL, LARGE = (presets.shape(name, '') for name in ('qwen2.5-0.5b', 'qwen2.5-7b'))


def _mesh(shape, kind, hosts=1):
  """A mesh of devices that are only named."""
  size = int(np.prod(shape))
  devices = [
    types.SimpleNamespace(device_kind=kind, platform='none', id=i, process_index=i * hosts // size) for i in range(size)
  ]
  return types.SimpleNamespace(devices=np.asarray(devices).reshape(shape), shape=dict(zip(AXES, shape, strict=True)))


@pytest.mark.parametrize(
  ('cfg', 'shape', 'kind', 'hosts', 'expected'),
  [
    (LARGE, (1, 8, 1), 'NVIDIA H100', 1, 8),  # reads a fifth of the weights
    (LARGE, (1, 4, 1), 'TPU v5', 1, 4),
    (LARGE, (2, 4, 1), 'NVIDIA H100', 2, 4),  # not across hosts
    (LARGE, (1, 8, 1), 'cpu', 1, 1),
    (LARGE, (1, 1, 8), 'NVIDIA H100', 1, 1),  # all of it is divided already
    (SMALL, (8, 1, 1), 'NVIDIA H100', 1, 1),  # too small: exchanges take longer than reading
    (SMALL, (8, 1, 1), 'TPU v5 lite', 1, 1),
  ],
)
def test_large_models_are_divided_as_far_as_it_pays(cfg, shape, kind, hosts, expected):
  assert division.choose(0, cfg, 'bfloat16', _mesh(shape, kind, hosts)) == expected


def test_a_number_is_taken_if_it_divides_and_refused_with_those_that_do():
  mesh = _mesh((2, 2, 2), 'cpu')
  assert [division.choose(n, SMALL, 'float32', mesh) for n in (1, 2, 4)] == [1, 2, 4]
  odd = QwenConfig(vocab_size=12, intermediate_size=36)
  for asked, cfg, allowed in ((3, SMALL, '1, 2, 4'), (8, SMALL, '1, 2, 4'), (4, odd, '1, 2')):
    with pytest.raises(UserError, match=rf'^agent\.decode_shards={asked}: .*allowed are 0, {allowed}$') as e:
      division.choose(asked, cfg, 'float32', mesh)
    assert '\n' not in str(e.value)


def test_the_weights_that_a_device_reads():
  cfg = QwenConfig(
    vocab_size=6, hidden_size=4, intermediate_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2
  )
  attention, mlp, head = 4 * 2 * (2 + 1 + 1 + 2), 3 * 4 * 8, 6 * 4  # q, k, v and o
  assert division.weights_read(1, cfg, 1) == 3 * (attention + mlp) + head
  assert division.weights_read(2, cfg, 1) == 3 * (attention + mlp / 2) + head / 2
  assert division.weights_read(2, cfg, 2) == division.weights_read(2, cfg, 1) / 2


def test_experts_are_divided_and_read_as_a_whole():
  experts = ExpertsConfig(count=12, chosen=2, width=5, normalised=True)
  cfg = QwenConfig(
    vocab_size=16, hidden_size=4, intermediate_size=7, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2,
    experts=experts,
  )  # fmt: skip
  mesh = _mesh((2, 2, 2), 'cpu')
  assert division.choose(2, cfg, 'float32', mesh) == 2  # the 7 of an MLP that no layer has do not count
  with pytest.raises(UserError, match=r'=4: must divide the 4 row shards, and the 12 experts .*allowed are 0, 1, 2$'):
    division.choose(4, cfg, 'float32', mesh)
  attention, layer, head = 4 * 2 * (2 + 1 + 1 + 2), 4 * 12 + 12 * 3 * 4 * 5, 16 * 4
  assert division.weights_read(2, cfg, 1) == 2 * (attention + layer / 2) + head / 2
