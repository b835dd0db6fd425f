"""What the jobs of `accelerator.py` work on: the shape, the sizes, the device; and how they are timed."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.distributed.chips import Chip, chip_of
from ragen_jax.models.qwen_config import QwenConfig

SHAPE = QwenConfig(
  vocab_size=151_936,
  hidden_size=896,
  intermediate_size=4864,
  num_layers=24,
  num_heads=14,
  num_kv_heads=2,
  head_dim=64,
  rope_theta=1e6,
  tie_word_embeddings=True,
)
QUICK_SHAPE = dataclasses.replace(
  SHAPE, vocab_size=1024, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, head_dim=16
)
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of the parts.

  Attributes:
    parity: rows and columns.
    attention: rows and columns.
    decode: rows, prompt tokens and new tokens.
    iterations: of the main job.
  """

  parity: tuple[int, int]
  attention: tuple[int, int]
  decode: tuple[int, int, int]
  iterations: int


FULL = Sizes((4, 64), (4, 2048), (128, 512, 256), 40)
QUICK = Sizes((2, 16), (2, 64), (4, 32, 8), 2)


@dataclasses.dataclass(frozen=True)
class Work:
  """What a job gets.

  Attributes:
    quick: tiny sizes.
    checkpoint: a folder with the model; the job 'setup' makes it.
    seed: of weights, tokens and the run.
    device: `device_kind` of the device; '' for that of this process.
    flops, bandwidth: of the device a second; 0 for those of `chips.CHIPS`.
    record: writes results; they are kept if the job is cut.
  """

  quick: bool
  checkpoint: str
  seed: int
  device: str = ''
  flops: float = 0.0
  bandwidth: float = 0.0
  record: Callable[[dict[str, Any]], None] = lambda results: None

  @property
  def sizes(self) -> Sizes:
    return QUICK if self.quick else FULL

  @property
  def shape(self) -> QwenConfig:
    return QUICK_SHAPE if self.quick else SHAPE

  @property
  def chip(self) -> Chip | None:
    return chip_of(types.SimpleNamespace(device_kind=self.device or jax.devices()[0].device_kind))

  @property
  def peak_flops(self) -> float | None:
    """bf16 operations a second; None if unknown."""
    return self.flops or (self.chip.flops if self.chip else None)

  @property
  def peak_bandwidth(self) -> float | None:
    """Bytes a second; None if unknown."""
    return self.bandwidth or (self.chip.hbm_bandwidth if self.chip else None)

  def tokens(self, rows: int, columns: int) -> np.ndarray:
    """Random i32[rows, columns]."""
    return np.random.default_rng(self.seed).integers(0, self.shape.vocab_size, (rows, columns)).astype(np.int32)


def has_torch() -> bool:
  return importlib.util.find_spec('torch') is not None


def measured(run: Callable[[], Any]) -> float:
  """Median seconds of a function that waits for its result, without its first call, which compiles."""
  run()
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def compute_dtype() -> Any:
  return jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
