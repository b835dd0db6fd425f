"""Which implementation of attention is taken on which devices, and what is refused."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ragen_jax.distributed.mesh import AXES, make_mesh
from ragen_jax.models import attention_kernels
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.attention_settings import IMPLEMENTATIONS, AttentionSettings
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError

CFG, WIDE = QwenConfig(), QwenConfig(head_dim=160)


class Device:
  """What is read of a device of another machine."""

  def __init__(self, platform: str, index: int, compute_capability: str | None = None):
    self.platform, self.id = platform, index
    if compute_capability:
      self.compute_capability = compute_capability


def mesh_of(platform: str, count: int = 1, capability: str | None = None) -> Mesh:
  devices = [Device(platform, i, capability) for i in range(count)]
  return Mesh(np.asarray(devices).reshape(count, 1, 1), AXES)


@pytest.fixture(autouse=True)
def _choose_anew():
  choose_attention.cache_clear()
  yield
  choose_attention.cache_clear()


@pytest.fixture
def cudnn(monkeypatch):
  """A cuDNN that supports bfloat16 and heads of up to 128 numbers, as the real one says it when it is traced."""

  def attend(q, k, v, segments):
    assert segments.shape == q.shape[:2] and (q.shape[2], k.shape[2]) == (14, 2)
    if q.dtype != jnp.bfloat16:
      raise NotImplementedError(f'Q must be bf16, got {q.dtype}.')
    if q.shape[3] > 128:
      raise NotImplementedError(f'The head dim must be <= 128,\nbut got {q.shape[3]}.')
    return q

  monkeypatch.setattr(attention_kernels, 'cudnn', attend)


def test_cpus_attend_as_before_kernels():
  one = choose_attention('auto', CFG, jnp.float32, mesh_of('cpu'))
  assert (one.implementation, one.mesh, one.shards, one.interpret) == ('blocks', None, 1, False)
  mesh = mesh_of('cpu', 8)
  many = choose_attention('auto', CFG, jnp.bfloat16, mesh)
  assert (many.implementation, many.mesh, many.shards) == ('einsum', mesh, 8)


def test_tpus_have_kernels_of_their_own():
  mesh = mesh_of('tpu', 4)
  assert choose_attention('auto', CFG, jnp.bfloat16, mesh).implementation == 'flash'
  assert choose_attention('auto', CFG, jnp.bfloat16, mesh).mesh == mesh
  assert choose_attention('splash', CFG, jnp.bfloat16, mesh).implementation == 'splash'
  assert choose_attention('einsum', CFG, jnp.bfloat16, mesh).implementation == 'einsum'


@pytest.mark.parametrize('platform', ['gpu', 'cuda'])
def test_gpus_have_cudnn_where_it_supports_the_model(platform, cudnn, caplog):
  caplog.set_level(logging.INFO)
  mesh = mesh_of(platform, 2, '9.0')
  assert choose_attention('auto', CFG, jnp.bfloat16, mesh).implementation == 'cudnn'
  assert not caplog.records


@pytest.mark.parametrize(
  ('capability', 'cfg', 'dtype', 'implementation', 'said'),
  [
    ('9.0', CFG, jnp.float32, 'einsum', ['cudnn cannot be used: Q must be bf16, got float32']),
    ('9.0', WIDE, jnp.bfloat16, 'einsum', ['head dim must be <= 128, but got 160']),
    ('7.5', CFG, jnp.bfloat16, 'einsum', ['compute capability 8.0 or later']),
    ('gfx90a', CFG, jnp.bfloat16, 'einsum', ['needs an NVIDIA GPU']),
    ('9.x', CFG, jnp.bfloat16, 'einsum', ['needs an NVIDIA GPU']),
  ],
)
def test_a_gpu_that_cannot_use_a_kernel_says_why_once(cudnn, caplog, capability, cfg, dtype, implementation, said):
  caplog.set_level(logging.INFO)
  mesh = mesh_of('gpu', 1, capability)
  for _ in range(2):
    assert choose_attention('auto', cfg, dtype, mesh).implementation == implementation
  (record,) = caplog.records
  message = record.getMessage()
  assert message.startswith(f'model.attention: {implementation} (cudnn cannot be used: ')
  assert all(text in message for text in said)


def test_without_cudnn_a_gpu_holds_the_scores(caplog):
  """JAX looks for cuDNN when attention is traced, and there is none on a CPU."""
  if jax.default_backend() != 'cpu':
    pytest.skip('there is an accelerator')
  caplog.set_level(logging.INFO)
  assert choose_attention('auto', CFG, jnp.bfloat16, mesh_of('cuda', 8, '9.0')).implementation == 'einsum'
  assert 'cudnn cannot be used: cuDNN is not detected)' in caplog.records[0].getMessage()


@pytest.mark.parametrize(
  ('name', 'mesh', 'message'),
  [
    ('splash', mesh_of('cpu'), "'splash': runs on TPUs, and the devices are CPUs; allowed here: auto, einsum, blocks"),
    ('cudnn', mesh_of('cpu'), "'cudnn': runs on GPUs, and the devices are CPUs; allowed here: auto, einsum, blocks"),
    (
      'cudnn',
      mesh_of('tpu'),
      'runs on GPUs, and the devices are TPUs; allowed here: auto, einsum, blocks, flash, splash',
    ),
    ('splash', mesh_of('gpu', 1, '9.0'), 'are GPUs; allowed here: auto, einsum, blocks, cudnn'),
    ('cudnn', mesh_of('gpu', 1, '7.5'), "'cudnn': needs an NVIDIA GPU of compute capability 8.0 or later; allowed"),
  ],
)
def test_what_the_devices_do_not_have_is_refused(cudnn, name, mesh, message):
  with pytest.raises(UserError) as e:
    choose_attention(name, CFG, jnp.bfloat16, mesh)
  assert f'model.attention={name!r}: ' in str(e.value) and message in str(e.value) and '\n' not in str(e.value)


def test_the_devices_of_this_machine():
  settings = choose_attention('auto', CFG, jnp.float32, make_mesh(-1, 1, 1))
  if jax.default_backend() == 'cpu' and jax.device_count() == 1:
    assert settings.implementation == 'blocks'


def test_rows_may_be_trees_as_far_as_a_kernel_for_trees_attends_to_them():
  """Wider rows go to 'splash', which would let a token see the other branches of its tree."""
  widest = {name: AttentionSettings(name, None).tree_columns for name in IMPLEMENTATIONS}
  assert [widest['flash'](head_dim) for head_dim in (64, 128, 160, 256, 384)] == [8192, 8192, 4096, 4096, 2730]
  assert widest['splash'](64) == 0 and min(widest[name](256) for name in ('einsum', 'blocks', 'cudnn')) > 2**20
