"""Two runs of one seed have the same bits: rollouts, batches, weights and evaluations; test_sft.py has a warm start."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.runs.checkpoints import Checkpointer
from tests.support import learning
from tests.support.configs import small_config
from tests.support.metrics import comparable_metrics
from tests.support.paths import ROOT


def _same_bits(a, b):
  """Asserts that two trees of arrays are equal to the last bit, NaN and signs of zeros included."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


def _iteration(seed):
  """What an iteration of a fresh trainer with a fresh model gives, and the weights before it."""
  policy = build.load_policy(small_config())
  trainer, state = learning.make_trainer(policy, seed=seed, train__groups=4)
  before = jax.device_get(state.trained)
  rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  state, updated = trainer.update(state, batch, selection)
  numbers = {name: x for name, x in (metrics | updated).items() if isinstance(x, int | float)}
  found = rollout.trajectory, rollout.scores, batch, selection.keep, state.saved(), numbers
  return jax.device_get(found), before


@pytest.mark.slow
def test_two_fresh_trainers_of_one_seed_have_the_same_bits():
  (first, before), (second, _) = _iteration(5), _iteration(5)
  _same_bits(first, second)
  # And not because nothing is learnt.
  after = jax.tree.leaves(first[4]['params'])
  assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(before), after, strict=True))


@pytest.mark.slow
def test_another_seed_gives_another_rollout():
  (one, _), (other, _) = _iteration(5), _iteration(6)
  assert not np.array_equal(one[0].tokens, other[0].tokens)


def _run(workdir: pathlib.Path) -> tuple[list, dict]:
  """The metrics without times, and the arrays of the last checkpoint, of a run in a process of its own."""
  fields = [
    'num_iterations=2', 'train.groups=4', 'train.group_size=4', 'eval.groups=8', 'eval.group_size=1', 'eval.every=1',
    'optimizer.mini_batch_size=8', 'optimizer.micro_batch_size=8', 'length_step=256', 'compilation_cache=',
    'envs.FrozenLake.max_turns=3',
  ]  # fmt: skip
  command = [
    sys.executable, 'main.py', f'--workdir={workdir}', '--config=configs/frozenlake_ppo.py',
    *(f'--config.{field}' for field in fields),
  ]  # fmt: skip
  subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
  lines = comparable_metrics(workdir)
  with Checkpointer(str(workdir), keep=1) as checkpointer:
    path = pathlib.Path(workdir) / 'checkpoints' / str(checkpointer.latest_step())
  state = learning.make_trainer(build.load_policy(small_config()))[1]
  with Checkpointer(str(workdir), keep=1) as checkpointer:
    arrays, _ = checkpointer.restore(state.saved(), partial=True)
  assert path.is_dir()
  return json.loads(json.dumps(lines)), jax.device_get(arrays)


@pytest.mark.slow
def test_two_processes_of_one_seed_write_the_same_run(tmp_path):
  (lines, arrays), (again, others) = (_run(tmp_path / name) for name in ('a', 'b'))
  assert lines == again and [line['step'] for line in lines] == [0, 1, 2]
  _same_bits(arrays, others)
