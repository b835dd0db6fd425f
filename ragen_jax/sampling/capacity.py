"""How many rows of a rollout fit into the memory of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils import host_memory

# Share of the free memory that the rows may take; the rest is for temporary arrays and fragmentation.
_USABLE = 0.8
# The most columns of a call that feeds prompts, see `shapes.Shapes.widths`.
_PROMPT = 512


def free_bytes(devices: Iterable[jax.Device]) -> int | None:
  """The smallest free memory of some devices of this process, in bytes; None if a device does not report its memory.

  CPUs share what the host has left.
  """
  found, devices = [], list(devices)
  for device in devices:
    if device.platform == 'cpu':
      found.append(host_memory.available() // len(devices))
      continue
    stats = device.memory_stats() or {}
    if 'bytes_limit' not in stats or 'bytes_in_use' not in stats:
      return None
    found.append(stats['bytes_limit'] - stats['bytes_in_use'])
  return min(found, default=None)


def bytes_per_device(tree: Any) -> int:
  """Bytes of a tree of arrays, concrete or abstract, on one device."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def bytes_per_row(
  cfg: QwenConfig, columns: int, dtype: Any, tensor: int = 1, *, image_tokens: int = 0, shards: int = 1
) -> int:
  """Memory of one row on one device while it is sampled.

  The cache has 2 L S K H numbers, of L layers with full attention; one layer of it is held twice while it is resized. A
  layer with linear attention has a state of one size, whose memory is in float32. Sampling holds the logits of the row
  three times in float32, as they are and to draw, up to three quarters of the cache twice, and the states twice: where
  some of the rows have no episode, the program copies the others. A call that feeds prompts, assumed to have up to 512
  columns (as all without images do), holds the MLP's three arrays of F numbers a column, as many of the chosen experts,
  or the chunks of linear attention. Each device holds the features of the images that are fed to the rows of all
  shards, and again those of its own rows, as they came from the host.

  `columns` is S, and `image_tokens` the most tokens of the images that are fed to a row at once. Heads and vocabulary
  are divided into `tensor` parts, rows into `shards`.
  """
  size = np.dtype(dtype).itemsize
  images = 0
  if image_tokens:
    levels = 1 + len(cfg.vision.deepstack_blocks)
    images = (shards + (shards > 1)) * image_tokens * levels * cfg.vision.out_hidden_size * size
  layer = 2 * columns * (cfg.num_kv_heads // tensor) * cfg.head_dim * size
  full = cfg.attention_layers
  states = (cfg.num_layers - full) * state_bytes(cfg, size) // tensor
  prompt_column = 3 * max(cfg.mlp_numbers(experts, tensor) for experts in set(cfg.with_experts)) * size
  if cfg.linear is not None:
    prompt_column = max(prompt_column, 4 * cfg.linear.chunk_values // tensor)
  prompt = min(columns, _PROMPT) * prompt_column
  sampling = full * layer * 3 // 4 + states + 3 * 4 * -(-cfg.vocab_size // tensor)
  return (full + 1) * layer + states + max(sampling, prompt) + images


def state_bytes(cfg: QwenConfig, size: int) -> int:
  """Bytes of a row's state in a layer with linear attention; `size` is that of a number in computations."""
  c = cfg.linear
  return 0 if c is None else 4 * c.memory_values + size * (c.taps - 1) * c.key_heads * c.channels


def rows_that_fit(rows: int, row_bytes: int, free: int | None) -> int:
  """The rows of a shard that are in flight together: all, or halves of them until they fit, at least 1.

  Halves, so that the number, and with it the compiled programs, does not change with every byte of free memory. `free`
  None is no limit.
  """
  while free is not None and rows > 1 and rows * row_bytes > _USABLE * free:
    rows = -(-rows // 2)
  return rows
