"""How many neighbouring devices divide the MLP and the vocabulary among them while tokens are sampled.

A device reads all of its weights for every token of its rows. With a part of the weights it reads less, and exchanges
rows with its neighbours twice a layer (`sharding.sampling_spec`). This pays for large models, of which the MLP is most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import Mesh

from ragen_jax.distributed import processes
from ragen_jax.distributed.chips import Chip, chip_of
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError

# Seconds of a layer's small operations: the compiler of v5e has 26 us for those of Qwen2.5-0.5B. While a device reads
# the weights of a whole MLP they cost nothing, and then the device would wait for them.
_SMALL_OPERATIONS = 25e-6
# A division has to save so much of a step.
_LEAST_GAIN = 0.1


def choose(asked: int, cfg: QwenConfig, dtype: Any, mesh: Mesh) -> int:
  """The number of devices.

  `asked` is `config.agent.decode_shards`; 0 takes the fastest by an estimate, 1 on chips without known numbers.

  Raises:
    UserError: `asked` does not divide the rows' shards, the MLP or the vocabulary.
  """
  allowed = [n for n in range(1, row_shards(mesh) + 1) if _divides(n, cfg, mesh)]
  if asked:
    if asked not in allowed:
      mlp = f'MLP of {cfg.intermediate_size}' if cfg.experts is None else f'{cfg.experts.count} experts'
      raise UserError(
        f'agent.decode_shards={asked}: must divide the {row_shards(mesh)} row shards, and the {mlp} and the vocabulary '
        f'of {cfg.vocab_size} into mesh.tensor * agent.decode_shards parts; '
        f'allowed are 0, {", ".join(map(str, allowed))}'
      )
    return asked
  chip = chip_of(mesh.devices.flat[0])
  if chip is None:
    return 1
  own = processes.row_share(mesh).own  # links between hosts are slower
  seconds = {n: step_seconds(n, cfg, dtype, mesh.shape['tensor'], chip) for n in allowed if own % n == 0}
  best = min(seconds, key=seconds.__getitem__)
  return best if seconds[best] < (1 - _LEAST_GAIN) * seconds[1] else 1


def _divides(n: int, cfg: QwenConfig, mesh: Mesh) -> bool:
  parts = n * mesh.shape['tensor']
  return row_shards(mesh) % n == 0 and all(size % parts == 0 for size in (*cfg.mlp_parts(), cfg.vocab_size))


def step_seconds(n: int, cfg: QwenConfig, dtype: Any, tensor: int, chip: Chip) -> float:
  """Estimated seconds of a decoded token, without those that do not depend on `n`."""
  seconds = weights_read(n, cfg, tensor) * np.dtype(dtype).itemsize / chip.hbm_bandwidth
  return seconds if n == 1 else seconds + cfg.num_layers * (_SMALL_OPERATIONS + 2 * chip.exchange_seconds(n))


def weights_read(n: int, cfg: QwenConfig, tensor: int) -> float:
  """Numbers of the weights that a device reads for a token of its rows: of the layers' matrices and of the head.

  The rows together use all experts.
  """
  head = cfg.vocab_size * cfg.hidden_size
  return (cfg.mixer_matrices + (cfg.mlp_matrices() + head) / n) / tensor
