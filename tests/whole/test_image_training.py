"""Training with images: towers that are trained, separate critics, adapters, resumed runs and meshes."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.models import lora
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.train import train_and_evaluate
from ragen_jax.training import objective, packing
from ragen_jax.training.learner import Learner
from tests.support import learning, mesh_worker
from tests.support.seeing import act_at_random, checkpoint, seeing_config, seeing_policy
from tests.whole.test_mesh import _assert_same, _run

pytestmark = pytest.mark.slow
# All that reads images: both critics, the reference, recomputed log-probs.
_FIELDS = {
  'model__separate_critic': True, 'algorithm__kl_loss_coef': 0.1, 'algorithm__old_logprobs': 'trainer',
  'algorithm__tis_cap': 2.0, 'train__groups': 2, 'train__group_size': 4,
}  # fmt: skip


def _played(config, directory, family, monkeypatch):
  policy = seeing_policy(config, directory, family)
  trainer = build.make_trainer(config, policy)
  act_at_random(trainer.player.proxy.context, monkeypatch)
  state = learning.copied(trainer.init())
  _, selected = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selected)
  return trainer, state, selected, batch, metrics


@pytest.mark.parametrize(('family', 'packing'), [(QWEN2_5_VL, True), (QWEN3_VL, False), (QWEN3_5, True)])
@pytest.mark.exhaustive_cases('qwen3_vl-False', 'qwen2_5_vl-True')
def test_the_gradient_of_a_trained_tower_is_that_of_finite_differences(tmp_path, monkeypatch, family, packing):
  config = seeing_config(model__vision='trained', optimizer__packing=packing, **_FIELDS)
  trainer, state, selected, batch, metrics = _played(config, tmp_path, family, monkeypatch)
  assert metrics['rollout/logprob_gap_max'] < 1e-4
  rows = np.flatnonzero(selected.keep)
  parts = list(trainer.micro_batches(batch, selected, rows))
  # A loss that is smooth: no clipping.
  smooth = objective.LossSettings(
    **{**vars(trainer.settings.loss), 'clip_ratio_low': 1e9, 'clip_ratio_high': 1e9, 'value_clip': None}
  )

  def loss(module, part):
    found, stats = objective.policy_and_value_loss(module, part, smooth)
    return found, (stats[0] | {'loss': found}, stats[1])

  learner = Learner(nnx.split(trainer.model.model)[0], trainer.learner.optimizer, loss, trainer.model.mesh)
  gradients, _ = learner.gradients(state, parts)
  for trunk in ('policy', 'critic'):
    own = dict(nnx.to_flat_state(gradients))
    tower = {path: np.asarray(x[...]) for path, x in own.items() if path[:2] == (trunk, 'visual')}
    norm = float(np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tower.values())))
    assert norm > 1e-3
    values = []
    step = 5e-4 / norm  # the value loss is curved: with ten times the step, the difference is 20 % off
    for sign in (1, -1):
      moved = [
        (path, x.replace(x[...] + sign * step / norm * tower[path]) if path in tower else x)
        for path, x in nnx.to_flat_state(state.trained)
      ]
      found = learner.evaluate(state.replace(trained=nnx.from_flat_state(moved)), parts)
      values.append(float(found['loss']))
    np.testing.assert_allclose((values[0] - values[1]) / (2 * step), norm, rtol=1e-2)


@pytest.mark.exhaustive
def test_adapters_are_trained_beside_a_tower(tmp_path, monkeypatch):
  for vision in ('frozen', 'trained'):
    config = seeing_config(model__vision=vision, lora__rank=2, train__groups=2)
    trainer, state, selected, batch, _ = _played(config, tmp_path / vision, QWEN3_VL, monkeypatch)
    before = jax.device_get(nnx.to_pure_dict(state.params['policy']))
    assert ('visual' in lora.partition(state.params)[0]['policy']) == (vision == 'trained')
    after, metrics = trainer.update(learning.copied(state), batch, selected)
    assert metrics['actor/grad_norm'] > 1e-4
    after = jax.device_get(nnx.to_pure_dict(after.params['policy']))
    changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, after)
    assert any(jax.tree.leaves(changed['visual'])) == (vision == 'trained') and any(jax.tree.leaves(changed['layers']))


@pytest.mark.parametrize('vision', ['frozen', 'trained'])
@pytest.mark.exhaustive
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, vision):
  fields = _FIELDS | {'replay__groups': 1, 'replay__max_age': 2, 'eval__groups': 8, 'eval__every': 1}
  config = seeing_config(model__vision=vision, num_iterations=2, **fields)
  config.model.path = checkpoint(config, tmp_path, QWEN3_VL)
  train_and_evaluate(config, str(tmp_path / 'whole'))
  config.num_iterations = 1
  train_and_evaluate(config, str(tmp_path / 'parts'))
  config.num_iterations = 2
  train_and_evaluate(config, str(tmp_path / 'parts'))
  found = []
  for name in ('whole', 'parts'):
    lines = read_metrics(tmp_path / name)
    found.append([{k: x for k, x in line.items() if not k.startswith(('timing_s/', 'perf/'))} for line in lines])
  assert found[0] == found[1]  # floats, to the last bit
  assert [line['step'] for line in found[0]] == [0, 1, 2] and found[0][2]['rollout/replayed_groups'] > 0


# Each of two processes plays half of the rows, with all weights or with half of them, or both play the same rows.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('vision', 'processes', 'shapes'),
  [('frozen', 1, ['2x2x2']), ('frozen', 2, ['2x1x1', '1x1x2']), ('trained', 2, ['1x2x1'])],
)
@pytest.mark.exhaustive_cases('frozen-2-shapes1', 'frozen-1-shapes0', 'trained-2-shapes2')
def test_meshes_and_processes_give_the_same_answer(tmp_path, vision, processes, shapes, monkeypatch):
  fields = {
    'envs__FrozenLake__observation': 'image', 'agent__max_response_tokens': 6, 'agent__max_context': 256,
    'model__vision': vision, 'length_step': 64,
  }  # fmt: skip
  model = checkpoint(seeing_config(), tmp_path, QWEN3_VL)
  monkeypatch.setenv('CONFIG_FIELDS', json.dumps(fields))
  one = mesh_worker.play_and_update(model, '1x1x1', str(tmp_path / 'one'))
  many = _run(model, tmp_path / 'many', shapes, processes, **fields)
  for found in (one, *many.values()):
    _assert_same(found, one)
    assert found['planned'].tolist() == [True] * 2, 'the plan compiles other programs than those that read images'


@pytest.mark.parametrize('vision', ['frozen', 'trained'])
@pytest.mark.exhaustive_cases('frozen', 'trained')
def test_rows_that_share_images_give_the_gradient_of_rows_by_themselves(tmp_path, monkeypatch, vision):
  config = seeing_config(model__vision=vision, optimizer__packing=True, **_FIELDS)
  trainer, state, selected, batch, _ = _played(config, tmp_path, QWEN2_5_VL, monkeypatch)
  rows = np.flatnonzero(selected.keep)
  found = []
  for share in (packing.tokens_to_share, lambda trajectory: None):
    monkeypatch.setattr(packing, 'tokens_to_share', share)
    (plans,) = packing.plan_rows([rows], selected.rollout.trajectory, trainer.settings.estimate.batching)
    parts = list(trainer.micro_batches(batch, selected, rows, plans))
    found.append((packing.shared_tokens(plans), *trainer.learner.gradients(state, parts)))
  (shared, gradients, sums), (alone, expected, expected_sums) = found
  assert shared > 0.2 and alone == 0
  scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
  for own, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * scale)
  for name, x in expected_sums.items():
    np.testing.assert_allclose(sums[name], x, rtol=1e-4, atol=1e-4, err_msg=name)
