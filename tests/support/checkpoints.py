"""Small random checkpoints, and comparisons of what was stored and what was loaded."""

from __future__ import annotations

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import FULL, LINEAR, WINDOWED, QwenConfig
from ragen_jax.models.rotary import LinearScaling, Llama3Scaling

SMALL = QwenConfig(
  vocab_size=70,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  rope_theta=5e4,
  rms_norm_eps=1e-5,
)


SMALL3 = QwenConfig(**(vars(SMALL) | {'architecture': 'qwen3', 'tie_word_embeddings': False}))

# More value heads than key heads, of other widths; a third of each head rotates.
HYBRID = QwenConfig(
  **vars(SMALL)
  | {
    'architecture': 'qwen3_5',
    'rope_width': 2,
    'rope_sections': (1, 0, 0),
    'rope_interleaved': True,
    'layer_kinds': (LINEAR, FULL),
    'linear': LinearConfig(key_heads=2, value_heads=6, key_dim=4, value_dim=5, taps=4),
  }
)

# A mixture of experts, of a width that 4 divides as PyTorch wants it, whose weights do not add up to 1; and an MLP.
EXPERTS = QwenConfig(**vars(SMALL3) | {'experts': ExpertsConfig(6, 3, 12, normalised=False), 'mlp_layers': (1,)})

# Mixtures with a shared expert behind both kinds of attention. Of narrower values, the norm would show the rounding.
HYBRID_EXPERTS = QwenConfig(
  **vars(HYBRID)
  | {
    'intermediate_size': 12,
    'linear': LinearConfig(key_heads=2, value_heads=6, key_dim=4, value_dim=16, taps=4),
    'experts': ExpertsConfig(5, 2, 12, normalised=True, shared_width=7),
  }
)

LLAMA = QwenConfig(**vars(SMALL) | {'architecture': 'llama', 'rope_scaling': Llama3Scaling(8.0, 1.0, 4.0, 64)})

GEMMA = QwenConfig(
  **vars(SMALL)
  | {
    'architecture': 'gemma3',
    'rope_scaling': LinearScaling(4.0),
    'layer_kinds': (WINDOWED, FULL),
    'window': 4,
    'window_rope_theta': 300.0,
    'query_scalar': 10,
  }
)


def random_params(cfg: QwenConfig, param_dtype='float32', seed: int = 0) -> nnx.State:
  abstract = nnx.state(nnx.eval_shape(lambda: Qwen(cfg, param_dtype=param_dtype, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(seed)
  # Weights that are float32 in any case may be stored in the other type.
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), param_dtype).astype(x.dtype), abstract)


def flat(params: nnx.State) -> dict:
  return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def assert_identical(a: nnx.State, b: nnx.State):
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for path in a:
    assert a[path].dtype == b[path].dtype, path
    np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


def contents(directory) -> dict[str, bytes]:
  return {name: (pathlib.Path(directory) / name).read_bytes() for name in os.listdir(directory)}


def edit_config(directory, remove=(), **changes):
  path = pathlib.Path(directory) / 'config.json'
  raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
  path.write_text(json.dumps(raw | changes))
