"""Programs of a sampler, a learner and a scorer for given shapes, to be compiled without being run.

Arguments may be abstract. A call with arguments of these shapes, types and layouts then runs what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.sampling import kv_cache
from ragen_jax.sampling.draw import Sampling
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.learner import Learner, gradient_of
from ragen_jax.training.optimizer_step import StepProgram
from ragen_jax.training.scoring import Scorer, token_rows
from ragen_jax.training.state import TrainState


def abstract_rows(sampler: Sampler, rows: int, size: int) -> SamplerState:
  """Shapes, types and layout of the state that `Sampler.init` returns, for `rows` rows of all processes together."""
  state = jax.eval_shape(lambda: kv_cache.init_state(sampler.policy, rows, size))
  if sampler.mesh is None:
    return state
  return jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(sampler.mesh, spec)),
    state,
    sampler.state_specs,
  )


def lower_sampler(
  sampler: Sampler,
  params: Any,
  state: SamplerState,
  *,
  width: int,
  columns: int,
  sampling: Sampling,
  rows: int | None = None,
  names: tuple[str, ...] = ('extend', 'decode'),
  images: Callable[[int], ImageColumns | None] = lambda rows: None,
) -> dict[str, jax.stages.Lowered]:
  """`extend` and `decode` of a sampler, or those of them that `names` has, by name.

  Args:
    state: see `abstract_rows`.
    width: columns of the observation.
    columns, sampling: see `Sampler.decode`.
    rows: rows of all processes that take part; default all, which is another program than a selection.
    images: what so many fed rows read of images.
  """
  every, by_rows = len(state.count), state.count.sharding
  part = rows or every
  key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), part)))

  def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

  selected = None if part == every else abstract((part,), jnp.int32)
  given = {
    'extend': lambda: dict(
      tokens=abstract((part, width), jnp.int32), count=abstract((part,), jnp.int32), begins=abstract((part,), bool),
      images=images(part),
    ),
    'decode': lambda: dict(
      key_data=abstract(key_data.shape, key_data.dtype), budget=abstract((part,), jnp.int32),
      temperature=np.float32(1), enough=np.int32(1), columns=columns, sampling=sampling.compiled, alternatives=0,
    ),
  }  # fmt: skip
  return {
    name: sampler.programs[name].lower(params=params, state=state, rows=selected, **given[name]()) for name in names
  }


def lower_resize(sampler: Sampler, state: SamplerState, size: int) -> jax.stages.Lowered:
  """The program of `Sampler.resize`, which runs once for each layer with keys and values."""
  return sampler.programs['resize'].lower(kv_cache.with_columns(state.cache)[0], size=size)


def lower_weights(sampler: Sampler, params: Any, gathered: bool) -> jax.stages.Lowered | None:
  """The program of `Sampler.decode_weights`; None if there is nothing to change."""
  cast, changed = sampler.weights_cast(params, gathered)
  return cast.lower(changed) if changed else None


def lower_score(scorer: Scorer, params: Any, rows: Any, name: str = 'score') -> jax.stages.Lowered:
  """A program of a scorer."""
  return scorer.programs[name].lower(params, token_rows(rows))


def lower_gradient(learner: Learner, state: TrainState, batch: Any, *, critic_only: bool = False) -> jax.stages.Lowered:
  """The program of gradients of a micro-batch."""
  return _gradient(learner, state, batch, critic_only).lower()


def step_programs(learner: Learner, state: TrainState, batch: Any, *, critic_only: bool = False) -> list[StepProgram]:
  """The programs of the optimiser step after gradients of such micro-batches."""
  sums, maxima = _gradient(learner, state, batch, critic_only).out_info[1]
  layout = None if learner.mesh is None else NamedSharding(learner.mesh, PartitionSpec())
  found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), sums | maxima)
  apply, scale = learner.steps[gradient_of(critic_only)], None if state.lr_scale is None else np.float32(1)
  return apply.programs(state.trained, state.opt_state, learner.abstract(state.trained), found, scale)


def _gradient(learner: Learner, state: TrainState, batch: Any, critic_only: bool) -> Any:
  program = learner.programs[gradient_of(critic_only)]
  return program.trace(state.trained, state.frozen, learner.abstract(state.trained), batch)
