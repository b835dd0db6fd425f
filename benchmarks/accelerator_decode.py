"""Decoding for `accelerator.py`: combinations of XLA flags, kernels for the attention to the cache, `transformers`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.agent.language_model import param_state
from ragen_jax.models import attention
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling.draw import PLAIN, Sampling
from ragen_jax.sampling.sampler import Sampler

# Axis -> what is set on it -> its flag; the first is XLA's default.
AXES = {
  'command buffers': {
    'default': '',
    'none': '--xla_gpu_enable_command_buffer=',
    '+WHILE': '--xla_gpu_enable_command_buffer=+WHILE',
  },
  'latency-hiding scheduler': {'default': '', 'on': '--xla_gpu_enable_latency_hiding_scheduler=true'},
  'triton GEMM': {'default': '', 'off': '--xla_gpu_enable_triton_gemm=false'},
}
KERNELS = ('einsum', 'xla', 'cudnn', 'pallas')
ONLY_GPU = ('cudnn', 'pallas')
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class FlagSet:
  """One choice on each axis.

  Attributes:
    name: the choices that are not the default, 'default' if there is none.
    flags: for `XLA_FLAGS`.
  """

  name: str
  flags: tuple[str, ...]


def flag_sets() -> list[FlagSet]:
  """All combinations, those with the fewest changes first: a run that is cut has the effect of each by itself."""
  found = []
  for choice in itertools.product(*(axis.items() for axis in AXES.values())):
    changed = [f'{axis} {value}' for axis, (value, flag) in zip(AXES, choice, strict=True) if flag]
    found.append(FlagSet(', '.join(changed) or 'default', tuple(flag for _, flag in choice if flag)))
  return sorted(found, key=lambda x: len(x.flags))  # stable


def sampler_of(model: Qwen) -> tuple[Sampler, nnx.State]:
  """A sampler without stop tokens, and its weights."""
  policy = ActorCritic(model)
  return Sampler(policy, stop_ids=(model.cfg.vocab_size,)), param_state(policy)


def decode_once(sampler: Sampler, params: nnx.State, tokens: np.ndarray, new: int, sampling: Sampling):
  """Reads the prompts and draws `new` tokens for each; returns (seconds of decoding, reply)."""
  rows, width = tokens.shape
  state = sampler.init(rows, width + new)
  state = sampler.extend(params, state, tokens, np.full(rows, width, np.int32))
  jax.block_until_ready(state)
  keys, budget = jax.random.split(jax.random.key(0), rows), np.full(rows, new)
  start = time.perf_counter()
  _, reply, _ = sampler.decode(params, state, keys, budget, columns=new, sampling=sampling)
  jax.block_until_ready(reply)
  return time.perf_counter() - start, reply


def attend_with(kernel: str, *, interpret: bool = False) -> Callable[..., jax.Array]:
  """A function like `attention._attend` that reads the cache with a kernel of a library if there is one query a row.

  The kernel's result and that of the few new columns are joined by the logarithms of their softmax' denominators, so
  that the cache is not copied.

  Args:
    kernel: 'xla' or 'cudnn' (`jax.nn.dot_product_attention`), or 'pallas' (JAX's decode attention for GPUs).
    interpret: run 'pallas' as ordinary operations, on any device.
  """
  original = attention._attend
  read = functools.partial(_pallas, interpret=interpret)
  if kernel != 'pallas':
    read = functools.partial(_library, implementation=kernel)

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, kept: Any) -> jax.Array:
    if kept is None or q.shape[1] != 1:
      return original(q, k, v, mask, kept)
    kept_k, kept_v, kept_mask = kept
    b, _, n, h = q.shape
    kv = k.shape[2]
    grouped = q.reshape(b, kv, n // kv, h)  # [B, K, G, H]
    old, old_sum = read(grouped, kept_k, kept_v, jnp.sum(kept_mask[:, 0], axis=-1, dtype=jnp.int32))
    scores = jnp.einsum('BKGH,BSKH->BKGS', grouped, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(mask[:, None], scores, -1e30)
    new_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    new = jnp.einsum('BKGS,BSKH->BKGH', jnp.exp(scores - new_sum).astype(v.dtype), v,
                     preferred_element_type=jnp.float32)  # fmt: skip
    part = jax.nn.sigmoid(old_sum[..., None] - new_sum)
    return (old.astype(jnp.float32) * part + new * (1 - part)).reshape(b, 1, n, h).astype(q.dtype)

  return attend


# Each reads the columns before `length` i32[B] of k and v [B, S, K, H] with queries [B, K, G, H], and returns
# [B, K, G, H] and the logarithm of the softmax' denominator f32[B, K, G]. To a kernel for whole rows, the G queries
# that share a head of the cache are G columns of one head, so that it is read once.


def _library(
  q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, implementation: str
) -> tuple[jax.Array, jax.Array]:
  # The denominators have the type of the queries, so that bfloat16 rounds them.
  out, total = jax.nn.dot_product_attention(
    jnp.swapaxes(q, 1, 2), k, v, key_value_seq_lengths=length, implementation=implementation, return_residual=True
  )
  return jnp.swapaxes(out, 1, 2), jnp.swapaxes(total, 1, 2).astype(jnp.float32)


def _pallas(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, interpret: bool):
  from jax.experimental.pallas.ops.gpu import decode_attention

  b, kv, group, h = q.shape
  block = min(k.shape[1] & -k.shape[1], 256) // 4  # a power of two; Triton takes no other
  out, (total, most) = decode_attention.gqa(
    q.reshape(b, kv * group, h), k, v, kv_seq_len=length, k_splits=4, block_k=block, return_residuals=True,
    interpret=interpret,
  )  # fmt: skip
  return out.reshape(q.shape), (most + jnp.log(total)).reshape(b, kv, group)


@contextlib.contextmanager
def reading_with(kernel: str) -> Iterator[None]:
  """Context manager: the sampler's programs that are compiled inside read the cache with a kernel of `KERNELS`."""
  jax.clear_caches()  # samplers of equal models share programs
  if kernel == 'einsum':
    yield
    return
  with mock.patch.object(attention, '_attend', attend_with(kernel)):
    yield
  jax.clear_caches()


def time_kernels(
  model: Qwen,
  sizes: tuple[int, int, int],
  bandwidth: float | None,
  record: Callable[[dict[str, Any]], None],
  kernels: tuple[str, ...] = KERNELS,
) -> None:
  """Tokens a second at temperature 1 with each kernel, without the time for the prompts; records each when it is done.

  Args:
    sizes: rows, prompt tokens and new tokens.
    bandwidth: bytes a second of the device; None if unknown.
    record: takes {kernel: result}. The result of a kernel that fails is its error, in one line.
  """
  rows, width, new = sizes
  tokens = np.random.default_rng(0).integers(0, 1000, (rows, width)).astype(np.int32)
  cfg, weights = model.cfg, param_state(ActorCritic(model))
  read = sum(x.nbytes for x in jax.tree.leaves(weights))
  read += (
    2 * cfg.attention_layers * rows * (width + new / 2) * cfg.num_kv_heads * cfg.head_dim * model.dtype.dtype.itemsize
  )
  expected = None
  for kernel in kernels:
    if kernel in ONLY_GPU and jax.default_backend() != 'gpu':
      record({kernel: {'left_out': f'needs a GPU, and the device is a {jax.default_backend().upper()}'}})
      continue
    try:
      with reading_with(kernel):
        sampler, params = sampler_of(model)
        start = time.perf_counter()
        _, reply = decode_once(sampler, params, tokens, new, PLAIN)
        first = time.perf_counter() - start
        seconds = statistics.median(decode_once(sampler, params, tokens, new, PLAIN)[0] for _ in range(REPEATS))
    except Exception as e:  # noqa: BLE001  # libraries raise anything; a kernel that does not work is a result
      record({kernel: {'error': one_line_of(e)}})
      continue
    expected = expected or (np.asarray(reply.tokens), np.asarray(reply.logprobs))
    record({kernel: {
      'tokens_per_s': rows * new / seconds,
      'ms_per_step': 1e3 * seconds / new,
      'share_of_bandwidth': bandwidth and read * new / bandwidth / seconds,
      'first_call_s': first,
      'logprob_gap': logprob_gap(*expected, np.asarray(reply.tokens), np.asarray(reply.logprobs)),
    }})  # fmt: skip


def logprob_gap(tokens: np.ndarray, logprobs: np.ndarray, others: np.ndarray, other_logprobs: np.ndarray) -> float:
  """The largest difference of log-probs [B, C] up to and without the first token of a row that differs."""
  same = np.cumprod(tokens == others, axis=1).astype(bool)
  return float(np.abs(logprobs - other_logprobs)[same].max(initial=0.0))


def one_line_of(e: BaseException) -> str:
  """The class of an error and the first line of its message."""
  lines = [line.strip() for line in str(e).splitlines() if line.strip()]
  return f'{type(e).__name__}: {lines[0] if lines else ""}'[:400]


def time_transformers(checkpoint: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
  """Tokens a second of `transformers`' `generate` on the same kind of device, without the time for the prompts."""
  import torch
  from transformers import AutoModelForCausalLM

  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  if device == 'cpu' and jax.default_backend() != 'cpu':
    return {'left_out': 'this PyTorch does not use the device'}
  rows, width, new = sizes
  model = AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype=torch.bfloat16 if device == 'cuda' else torch.float32
  ).to(device)
  tokens = np.random.default_rng(0).integers(0, 1000, (rows, width))
  ids = torch.as_tensor(tokens, dtype=torch.long, device=device)

  def seconds(count: int) -> float:
    start = time.perf_counter()
    with torch.no_grad():
      model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=True,
        pad_token_id=0,
      )  # fmt: skip
    if device == 'cuda':
      torch.cuda.synchronize()
    return time.perf_counter() - start

  def median(count: int) -> float:
    seconds(count)
    return statistics.median(seconds(count) for _ in range(REPEATS))

  # The time for the prompts is subtracted.
  return {'device': device, 'tokens_per_s': rows * (new - 1) / max(median(new) - median(1), 1e-9)}
