"""Plays and updates once on each mesh that is asked for and writes down what came of it; run by test_mesh.py.

python -m tests.support.mesh_worker MODEL DIRECTORY CHECKPOINT SHAPE,SHAPE,... [COORDINATOR PROCESSES PROCESS]
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.distributed import processes
from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.planning import abstract
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.training import optimizer_step
from ragen_jax.training.optimizer_step import SKIPPED
from tests.support.configs import small_config


def _config(model: str, shape: str) -> ConfigDict:
  config = small_config(
    model__path=model, train__groups=8, train__group_size=2, optimizer__mini_batch_size=8,
    optimizer__micro_batch_size=8, envs__FrozenLake__max_turns=2, **json.loads(os.environ.get('CONFIG_FIELDS', '{}')),
  )  # fmt: skip
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = map(int, shape.split('x'))
  return config


def play_and_update(model: str, shape: str, workdir: str, restored: str = '') -> dict[str, np.ndarray]:
  """One iteration with a mesh such as '2x2x2': the tokens played, the update's numbers and the new weights.

  Args:
    model: directory of the model.
    shape: data x fsdp x tensor.
    workdir: where the state after the iteration is saved.
    restored: a workdir with a state of another mesh, which is read first; '' for none.
  """
  config = _config(model, shape)
  policy = build.load_policy(config)
  embedding = policy.model.policy.embed_tokens[...]
  shards = len({str(index) for index in embedding.sharding.devices_indices_map(embedding.shape).values()})
  trainer = build.make_trainer(config, policy)
  state, found = trainer.init(), {}
  if restored:
    with Checkpointer(restored, keep=1) as other:
      arrays = jax.tree.leaves(other.restore(state.saved())[0])
    found = {f'restored{i}': x for i, x in enumerate(processes.all_rows(arrays))}
  before = [x.sharding for x in jax.tree.leaves((state.params, state.opt_state))]
  with _read_by(policy.sampler.programs, 'extend') as read:
    rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  state, more = trainer.update(state, batch, selection)
  after = jax.tree.leaves((state.params, state.opt_state))
  more = {name: x for name, x in more.items() if name != 'actor/ratio'}  # a histogram
  moved = sum(not x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(after, before, strict=True))
  with Checkpointer(workdir, keep=1) as checkpointer:
    checkpointer.save(1, state.saved())
  weights = processes.all_rows(jax.tree.leaves(state.params))
  saved = processes.all_rows(jax.tree.leaves(state.saved()))
  one, *_ = [x for x in jax.tree.leaves(state.opt_state) if x.shape == embedding.shape]
  # A step with a NaN keeps all, in the same program.
  bad = batch.replace(advantages=np.where(batch.mask, np.nan, 0).astype(np.float32))
  rows, programs = np.flatnonzero(selection.keep)[:8], trainer.learner.steps['gradient'].compiled
  state, sums = trainer.learner.step(state, trainer.micro_batches(bad, selection, rows))
  kept = processes.all_rows(jax.tree.leaves(state.params))
  same = all(np.array_equal(x, y) for x, y in zip(weights, kept, strict=True))
  skipped = int(jax.device_get(sums[SKIPPED])) == 1
  return {
    'bad_step': np.asarray([skipped, same, trainer.learner.steps['gradient'].compiled == programs]),
    'tokens': rollout.trajectory.tokens,
    'logprobs': rollout.trajectory.logprobs,
    'advantages': batch.advantages,
    'metrics': np.asarray(json.dumps(metrics | more)),
    'shards': np.asarray(shards),
    'moment_shards': np.asarray(one.size // math.prod(one.sharding.shard_shape(one.shape))),
    **{f'saved{i}': x for i, x in enumerate(saved)},
    **found,
    'moved': np.asarray(moved),
    'planned': np.asarray([_as_planned(config, policy, x) for x in read[:2] if x is not None]),
    **{f'w{i}': x for i, x in enumerate(weights)},
  }


@contextlib.contextmanager
def _read_by(programs: dict[str, Callable[..., Any]], name: str) -> Iterator[list[Any]]:
  """The images that the calls of a program read; none for text."""
  read, program = [], programs[name]

  def run(**given):
    read.append(given['images'])
    return program(**given)

  programs[name] = run
  try:
    yield read
  finally:
    programs[name] = program


def _as_planned(config: ConfigDict, policy: LanguageModel, read: ImageColumns) -> bool:
  """Whether `--mode=plan` compiles the program for images of such shapes, types and layouts."""
  planned = jax.tree.leaves(abstract.sampler_images(config, policy, *read.index.shape))
  return all(
    (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, x.ndim)
    for x, y in zip(jax.tree.leaves(read), planned, strict=True)
  )


def saved_like(model: str) -> dict[str, Any]:
  """The arrays of a checkpoint, on one device."""
  config = _config(model, '1x1x1')
  return build.make_trainer(config, build.load_policy(config)).init().saved()


def main() -> None:
  model, directory, checkpoint, shapes = sys.argv[1:5]
  optimizer_step._FROM_LAYERS = 2  # in parts, unlike the process that this one is compared with
  if len(sys.argv) > 5:
    processes.connect(sys.argv[5], int(sys.argv[6]), int(sys.argv[7]), patience=600.0)
  for shape in shapes.split(','):
    result = play_and_update(model, shape, os.path.join(directory, f'state-{shape}'), checkpoint)
    if processes.is_first():
      np.savez(os.path.join(directory, f'{shape}.npz'), **result)


if __name__ == '__main__':
  main()
