"""Small models with random adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models import lora
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig

SMALL = QwenConfig(
  vocab_size=70, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)


SMALL3 = QwenConfig(**(vars(SMALL) | {'architecture': 'qwen3', 'tie_word_embeddings': False}))


CONFIG = lora.LoraConfig(4, 6, lora.TARGETS)


TOKENS = np.random.default_rng(3).integers(0, 70, size=(3, 11)).astype(np.int32)


def adapted(
  cfg: QwenConfig = SMALL, config: lora.LoraConfig | None = CONFIG, *, param_dtype='float32', seed: int = 0
) -> Qwen:
  """A random model whose adapters are not zero, made without compiling anything."""

  def make():
    model = Qwen(cfg, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    if config is not None:
      lora.attach(model, config, nnx.Rngs(0))
    return model

  graphdef, params = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(seed)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), params))


@nnx.jit
def logits(model: Qwen, tokens) -> jax.Array:
  return model.logits(model(model.embed(tokens))[0])


def save_base(directory, model: Qwen) -> str:
  """The model without its adapters, as a checkpoint."""
  base = {path: x for path, x in nnx.to_flat_state(nnx.state(model)) if 'adapter' not in path}
  save_model(str(directory), nnx.from_flat_state(base), model.cfg, 'float32')
  return str(directory)
