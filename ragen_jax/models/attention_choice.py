"""Which implementation of attention a model uses on its devices: `config.model.attention`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ragen_jax.models.attention_settings import IMPLEMENTATIONS, AttentionSettings
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError, one_line

AUTO = 'auto'

# Platform -> its implementations, the fastest first; 'auto' takes the first that can be used.
_BY_PLATFORM = {
  'tpu': ('flash', 'splash', 'einsum'),
  'gpu': ('cudnn', 'einsum'),
  'cpu': ('einsum',),
}
_PLATFORM_OF_KERNEL = {'flash': 'tpu', 'splash': 'tpu', 'cudnn': 'gpu'}
# The names that JAX gives to GPUs.
_GPUS = ('gpu', 'cuda', 'rocm')
# The first NVIDIA GPUs on which cuDNN has flash attention.
_LEAST_CAPABILITY = (8, 0)

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=64)
def choose_attention(name: str, cfg: QwenConfig, dtype: Any, mesh: Mesh) -> AttentionSettings:
  """How a model attends on the devices of a mesh, which need not be those of this machine. Nothing is compiled.

  `name` is 'auto' or one of `attention_settings.IMPLEMENTATIONS`. 'auto' takes 'flash' on TPUs, cuDNN on GPUs (else
  'einsum', with a reason in the log), 'blocks' on one CPU device and 'einsum' on several.

  Raises:
    UserError: the named implementation cannot be used there.
  """
  device = mesh.devices.flat[0]
  platform = 'gpu' if device.platform in _GPUS else device.platform
  if name != AUTO:
    problem = _problem(name, platform, device, cfg, dtype)
    if problem:
      usable = [x for x in IMPLEMENTATIONS if not _problem(x, platform, device, cfg, dtype)]
      raise UserError(f'model.attention={name!r}: {problem}; allowed here: {", ".join((AUTO, *usable))}')
    chosen = name
  elif platform == 'cpu' and mesh.size == 1:
    chosen = 'blocks'
  else:
    chosen = _first_usable(platform, device, cfg, dtype)
  return AttentionSettings(chosen, mesh if mesh.size > 1 else None)


def _first_usable(platform: str, device: Any, cfg: QwenConfig, dtype: Any) -> str:
  problems = {}
  for name in _BY_PLATFORM.get(platform, ('einsum',)):
    problems[name] = _problem(name, platform, device, cfg, dtype)
    if not problems[name]:
      break
  refused = '; '.join(f'{x} cannot be used: {problem}' for x, problem in problems.items() if problem)
  if refused:
    _log.info('model.attention: %s (%s)', name, refused)
  return name


def _problem(name: str, platform: str, device: Any, cfg: QwenConfig, dtype: Any) -> str:
  """Why an implementation cannot be used; '' if it can."""
  needed = _PLATFORM_OF_KERNEL.get(name, platform)
  if needed != platform:
    return f'runs on {needed.upper()}s, and the devices are {platform.upper()}s'
  if needed != 'gpu':
    return ''
  capability = _capability(device)
  if capability < _LEAST_CAPABILITY:
    return f'needs an NVIDIA GPU of compute capability {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or later'
  return _cudnn_problem(cfg, dtype) if name == 'cudnn' else ''


def _capability(device: Any) -> tuple[int, ...]:
  """The compute capability of an NVIDIA GPU; (0,) for any other."""
  numbers = str(getattr(device, 'compute_capability', '0')).split('.')
  return tuple(map(int, numbers)) if all(x.isdigit() for x in numbers) else (0,)


def _cudnn_problem(cfg: QwenConfig, dtype: Any) -> str:
  """What JAX says of cuDNN's attention and its gradient for the model's heads, with packed rows; '' if it works."""
  from ragen_jax.models import attention_kernels

  def total(q, k, v):
    return jnp.sum(attention_kernels.cudnn(q, k, v, jnp.zeros(q.shape[:2], jnp.int32)).astype(jnp.float32))

  def heads(count):
    return jax.ShapeDtypeStruct((1, 128, count, cfg.head_dim), dtype)

  try:
    jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), heads(cfg.num_heads), *[heads(cfg.num_kv_heads)] * 2)
  except (RuntimeError, NotImplementedError, ValueError) as e:
    return one_line(e, str).rstrip('.')
  return ''
