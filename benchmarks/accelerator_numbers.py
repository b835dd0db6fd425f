"""Equal numbers and attention kernels for `accelerator.py`: one function of the weights on devices and in libraries."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.accelerator_decode import decode_once, one_line_of, sampler_of
from benchmarks.accelerator_work import Work, compute_dtype, has_torch, measured
from ragen_jax.distributed.mesh import AXES
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.attention_settings import EINSUM, IMPLEMENTATIONS
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling.draw import GREEDY
from ragen_jax.training.batches import TokenRows
from ragen_jax.training.scoring import RematSettings, ScoringSettings, score_tokens
from ragen_jax.utils.errors import UserError

_GIB = 2**30
# Relative differences in float32 between a device and the CPU, or another library, that rounding explains.
LIMITS = {'logits': 1e-4, 'logprobs': 1e-4, 'gradient': 1e-3}


def mean_logprob(graph: Any, columns: np.ndarray, remat: str, seen_until: np.ndarray | None = None):
  """A function (weights, tokens) -> ((mean, log-probs), gradient) of the tokens in some columns."""
  settings = ScoringSettings(temperature=1.0, vocab_limit=0, banned=(), logits_chunk=2048,
                             remat=RematSettings.always(remat))  # fmt: skip

  def mean(params, tokens):
    rows = TokenRows(tokens, columns, np.ones(columns.shape, bool), seen_until=seen_until)
    logprobs = score_tokens(nnx.merge(graph, params), rows, settings)[0]
    return logprobs.mean(), logprobs

  return jax.value_and_grad(mean, has_aux=True)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
  """Relative: of logits and log-probs the largest difference over the largest number, of a gradient the norms."""

  def largest(name):
    return float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max())

  ours, theirs = found['gradient'], expected['gradient']
  squares = sum(float(np.sum(np.square(ours[x] - theirs[x], dtype=np.float64))) for x in theirs)
  whole = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in theirs.values())
  return {'logits': largest('logits'), 'logprobs': largest('logprobs'), 'gradient': (squares / whole) ** 0.5}


def over_limits(found: dict[str, float]) -> list[str]:
  """The names of differences that rounding does not explain; a number that is not finite is one."""
  return [name for name, limit in LIMITS.items() if not found[name] <= limit]


def parity(work: Work) -> None:
  """Logits, log-probs and gradients of one program on the device and on the CPU, and of `transformers`."""
  small = dataclasses.replace(work.shape, num_layers=2)
  tokens = work.tokens(*work.sizes.parity)
  columns = np.broadcast_to(np.arange(1, tokens.shape[1]), (len(tokens), tokens.shape[1] - 1))
  with tempfile.TemporaryDirectory() as folder:
    save_model(folder, Qwen(small, rngs=nnx.Rngs(work.seed + 1)), small, 'float32', tokenizer_dir=work.checkpoint)

    def of_jax(device: Any, dtype: Any, attention: Any) -> dict[str, Any]:
      model = load_model(folder, dtype=dtype, param_dtype=jnp.float32, attention=attention)
      graph, params = nnx.split(ActorCritic(model))
      params = jax.device_put(params, device)

      def run(params, tokens):
        policy = nnx.merge(graph, params).policy
        hidden, _ = policy(policy.embed(tokens))
        return policy.logits(hidden), mean_logprob(graph, columns, 'none')(params, tokens)

      with jax.default_matmul_precision('highest' if dtype == jnp.float32 else 'default'):
        logits, ((_, logprobs), gradient) = jax.jit(run)(params, jax.device_put(tokens, device))
      return {'logits': np.asarray(logits), 'logprobs': np.asarray(logprobs), 'gradient': by_name(gradient, small)}

    device, mesh = jax.devices()[0], Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    expected = of_jax(jax.devices('cpu')[0], jnp.float32, EINSUM)
    found = of_jax(device, jnp.float32, EINSUM)
    of_device = differences(found, expected)
    work.record({'device_and_cpu_float32': of_device, 'over_limits': over_limits(of_device)})
    attention = choose_attention('auto', small, jnp.bfloat16, mesh)
    rounded = of_jax(device, jnp.bfloat16, attention)
    work.record({'device_bfloat16_and_cpu_float32': {'attention': attention.implementation,
                                                     **differences(rounded, expected)}})  # fmt: skip
    if not has_torch():
      work.record({'transformers': {'left_out': 'PyTorch is not installed'}})
      return
    theirs, greedy = of_transformers(folder, tokens)
    of_library = differences(found, theirs)
    model = load_model(folder, dtype=jnp.float32, param_dtype=jnp.float32)
    with jax.default_matmul_precision('highest'):
      _, reply = decode_once(*sampler_of(model), tokens, greedy.shape[1], GREEDY)
  equal = float((np.asarray(reply.tokens) == greedy).mean())
  over = over_limits(of_device) + [f'transformers: {name}' for name in over_limits(of_library)]
  work.record({'transformers': of_library | {'equal_greedy_tokens': equal}, 'over_limits': over})


def by_name(gradient: nnx.State, shape: QwenConfig) -> dict[str, np.ndarray]:
  """The gradient of the policy's weights, by the names and in the layout of a checkpoint."""
  from safetensors.numpy import load_file

  with tempfile.TemporaryDirectory() as folder:
    save_model(folder, gradient['policy'], shape, 'float32')
    return {name: x for file in pathlib.Path(folder).glob('*.safetensors') for name, x in load_file(file).items()}


def of_transformers(folder: str, tokens: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
  """What `parity` compares, and 16 greedy tokens after each row, by `transformers` in float32 on the CPU."""
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  ids = torch.as_tensor(tokens, dtype=torch.long)
  logits = model(ids).logits
  logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
  logprobs.mean().backward()
  greedy = model.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
  )
  return {
    'logits': logits.detach().numpy(), 'logprobs': logprobs.detach().numpy(),
    'gradient': {name: x.grad.numpy() for name, x in model.named_parameters()},
  }, greedy[:, tokens.shape[1]:].numpy()  # fmt: skip


def attention(work: Work) -> None:
  """Seconds and temporary memory of a gradient with each `model.attention`, for whole rows and for four packed
  sequences a row."""
  rows, width = work.sizes.attention
  tokens = jnp.asarray(work.tokens(rows, width))
  columns = np.broadcast_to(np.arange(1, width), (rows, width - 1))
  ends = np.broadcast_to((np.arange(width, dtype=np.int32) // (width // 4) + 1) * (width // 4), (rows, width))
  mesh, dtype = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES), compute_dtype()
  weights, expected = None, {}
  for name in sorted(IMPLEMENTATIONS, key=lambda x: (x != 'einsum', x == 'blocks')):  # the slowest last
    try:
      settings = choose_attention(name, work.shape, dtype, mesh)
    except UserError as e:
      work.record({name: {'left_out': one_line_of(e)}})
      continue
    model = load_model(work.checkpoint, dtype=dtype, param_dtype=jnp.float32, attention=settings)
    graph, params = nnx.split(ActorCritic(model))
    weights = params if weights is None else weights
    found: dict[str, Any] = {}
    for packing, seen_until in (('whole', None), ('packed', ends)):
      try:
        found[packing], gradient = time_gradient(mean_logprob(graph, columns, 'layers', seen_until), weights, tokens)
      except Exception as e:  # noqa: BLE001  # a kernel that does not work is a result
        found[packing] = {'error': one_line_of(e)}
        continue
      expected.setdefault(packing, gradient)
      found[packing]['gradient_difference'] = float(relative_difference(gradient, expected[packing]))
      del gradient
    work.record({name: found})
    del model, params


def time_gradient(function: Callable, params: Any, tokens: jax.Array) -> tuple[dict[str, float], Any]:
  """Seconds of a compiled gradient, its temporary memory, and the gradient."""
  start = time.perf_counter()
  compiled = jax.jit(function).lower(params, tokens).compile()
  seconds = time.perf_counter() - start
  needed = compiled.memory_analysis().temp_size_in_bytes / _GIB
  run = measured(lambda: jax.block_until_ready(compiled(params, tokens)))
  return {'compile_s': seconds, 'seconds': run, 'temporary_gib': needed}, compiled(params, tokens)[1]


@jax.jit
def relative_difference(x: Any, y: Any) -> jax.Array:
  """Norm of the difference of two trees over the norm of the second."""

  def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

  return norm(jax.tree.map(jnp.subtract, x, y)) / norm(y)
