"""Finds which numbers of an optimiser step are not finite: flags inside its programs, and text about them on the host.

The flags are one bool for each weight and for each micro-batch, so they are computed in every step. The host reads them
together with the metrics, and writes text only about skipped steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent import finite

# Entries of a step's metrics. Of the first three, a bool for each array of the tree; of the last, for each micro-batch.
GRADIENT, OPT_STATE, WEIGHTS = 'bad/gradient', 'bad/opt_state', 'bad/weights'
MICRO_BATCHES = 'bad/micro_batches'
ENTRIES = (GRADIENT, OPT_STATE, WEIGHTS, MICRO_BATCHES)
# Text for each tree, in the order in which numbers go bad in a step.
_TREES = {GRADIENT: 'gradient of', OPT_STATE: 'optimiser state', WEIGHTS: 'new weights'}
# Parts of a path that name a tensor of weights no better.
_MOMENTS = ('mu', 'nu')


def bad_arrays(tree: Any) -> jax.Array:
  """bool[number of arrays of floats]: whether the sum of squares of each is NaN or infinite; used inside programs.

  Numbers whose squares exceed float32 (beyond about 1e19) count as infinite.
  """
  return ~jnp.isfinite(sums_of_squares([x for _, x in _floats(tree)]))


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
  """f32[number of arrays], the sum of squares of each; used inside programs."""
  sums = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
  return jnp.stack(sums) if sums else jnp.zeros(0, jnp.float32)


def not_finite(stats: Any) -> jax.Array:
  """bool[]: whether a number of a tree is NaN or infinite; used inside programs."""
  return ~jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(stats)]).all()


def names(tree: Any) -> list[str]:
  """The names of the arrays of `bad_arrays`, such as 'policy/layers/0/mlp/up_proj/kernel' or 'nu/value_head/bias'."""
  return [name_of(path) for path, _ in _floats(tree)]


def _floats(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
  return [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def name_of(path: tuple[Any, ...]) -> str:
  """The keys of the path of a weight, or of an array of the optimiser's state; for moments from 'mu' or 'nu' on."""
  parts = [str(getattr(p, 'key', getattr(p, 'name', ''))) for p in path]
  start = next((i for i, part in enumerate(parts) if part in _MOMENTS), 0)
  return '/'.join(part for part in parts[start:] if part and part != 'value')


def split(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """A step's metrics without the entries of this module, and these entries."""
  own = {name: x for name, x in found.items() if name in ENTRIES}
  return {name: x for name, x in found.items() if name not in ENTRIES}, own


def names_of_not_finite(stats: Mapping[str, Any]) -> str:
  """The names of a step's metrics that are not finite; '' if all are finite."""
  return ', '.join(sorted(name for name, x in stats.items() if not np.all(np.isfinite(x))))


def describe(
  stats: Mapping[str, Any], bad: Mapping[str, Any], trained: Any, opt_state: Any, rows: Sequence[np.ndarray] = ()
) -> str:
  """Text about a skipped step.

  The cause goes before its consequences: the losses with the rows of their micro-batches, the gradients of the weights,
  the optimiser's state, and the new weights. Only the first of the last three is named.

  `stats` and `bad`, some of `ENTRIES`, are on the host. Of `trained` and `opt_state` only the structure is read.
  Without `rows`, which are those of each micro-batch, the micro-batches are counted instead.
  """
  parts = [names_of_not_finite(stats)]
  flags = np.asarray(bad.get(MICRO_BATCHES, ()), bool)
  if flags.any():
    number = np.flatnonzero(flags)
    if len(rows):
      parts.append(f'in a micro-batch of {finite.describe_rows(sorted({int(r) for i in number for r in rows[i]}))}')
    else:
      parts.append(f'in micro-batch {", ".join(str(i + 1) for i in number)} of {len(flags)}')
  trees = {GRADIENT: trained, OPT_STATE: opt_state, WEIGHTS: trained}
  for name, words in _TREES.items():
    affected = np.flatnonzero(bad.get(name, False))
    if len(affected):
      more = f' and {len(affected) - 1} more' if len(affected) > 1 else ''
      parts.append(f'{words} {names(trees[name])[affected[0]]}{more}')
      break
  return ', '.join(part for part in parts if part)
