"""The steps of an iteration together: updates, their metrics, and options that do not go together."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import jax
import numpy as np
import pytest

from ragen_jax import build, train
from ragen_jax.agent.finite import NotFinite
from ragen_jax.distributed import processes
from ragen_jax.runs.metrics import Counts, read_metrics
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.utils import heartbeat
from tests.support import learning
from tests.support.configs import small_config


@pytest.mark.parametrize('packing', [False, True])
def test_where_nothing_is_kept_nothing_is_learnt(policy, played, packing):
  trainer, state = learning.make_trainer(policy, optimizer__packing=packing)
  selection = trainer.select(played[0])
  nothing = dataclasses.replace(selection, keep=np.zeros_like(selection.keep), groups=0)
  before = jax.device_get(state.params)
  batch, _ = trainer.estimate(state, nothing)
  assert not batch.mask.any()
  state, metrics = trainer.update(state, batch, nothing)
  assert metrics['train/num_mini_batches'] == 0 and state.iteration == 1
  assert not np.any(metrics['actor/ratio'].counts)
  assert trainer.try_weights(state, batch, nothing) == {}
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


@pytest.mark.slow
def test_a_process_passes_a_point_before_it_waits_for_each_step_and_for_the_end(policy, played, monkeypatch):
  # Otherwise the watchdog would not notice another process that hangs before its part of a step.
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  events, step, get = [], trainer.learner.step, jax.device_get
  monkeypatch.setattr(processes, 'mark_progress', lambda phase='': events.append('point'))
  monkeypatch.setattr(trainer.learner, 'step', lambda *a, **k: (events.append('step'), step(*a, **k))[1])
  monkeypatch.setattr(jax, 'device_get', lambda x: (events.append('wait'), get(x))[1])
  state, metrics = trainer.update(state, batch, selection)
  taken = metrics['train/num_mini_batches']
  assert taken > 1 and events == [*['point', 'step'] * taken, 'point', 'wait']
  events.clear()
  assert trainer.try_weights(state, batch, selection) == {} and events[:2] == ['point', 'wait']


@pytest.mark.slow
def test_a_slow_update_tells_how_far_it_is(policy, played, monkeypatch, caplog):
  monkeypatch.setattr(heartbeat, 'SECONDS', 0.0)
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  with caplog.at_level(logging.INFO):
    trainer.update(state, batch, selection)
  told = [r.getMessage().partition(' micro')[0] for r in caplog.records if r.name == heartbeat.__name__]
  every = sum(len(plans) for _, plans in trainer._plans(selection, 0))
  assert every > 4 and told == [f'update: {i} of {every}' for i in range(1, every + 1)]


def _with_a_number(rollout, name, x):
  """The rollout with another number at the first sampled token of row 3."""
  array = getattr(rollout.trajectory, name).copy()
  array[3, np.flatnonzero(rollout.trajectory.loss_mask[3])[0]] = x
  return dataclasses.replace(rollout, trajectory=rollout.trajectory.replace(**{name: array}))


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('logprobs', 'sampled log-probs'), ('entropies', 'sampled entropies'), ('values', 'sampled values'),
    ('rewards', 'rewards'), ('reply_rewards', 'rewards of replies'),
  ],
)  # fmt: skip
def test_a_rollout_with_a_number_that_is_not_finite_is_named_and_not_learnt_from(
  policy, played, monkeypatch, name, words
):
  trainer, state = learning.make_trainer(policy, filter__max_rollouts=3, filter__include_zero=False)
  plays = []

  def rollout(*_, **__):
    plays.append(1)
    return _with_a_number(played[0], name, np.nan)

  monkeypatch.setattr(trainer, 'rollout', rollout)
  found, selection = trainer.collect(state)
  assert len(plays) == 1 and not selection.keep.any() and selection.groups == 0
  before = jax.device_get(state.saved())
  batch, metrics = trainer.estimate(state, selection)
  state, updated = trainer.update(state, batch, selection)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.saved()), before)
  finding = metrics[f'not_finite/{"" if "rewards" in name else "sampled_"}{name}']
  tokens = found.trajectory.loss_mask.sum()
  assert (finding.count, finding.text) == (1, f'1 of {tokens} {words} (row 3)')
  assert updated[SKIPPED] == 0 and updated['train/num_mini_batches'] == 0


def test_a_bad_rollout_does_not_enter_the_replay_buffer(policy, played, monkeypatch):
  fields = {'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0, 'replay__groups': 2}
  trainer, state = learning.make_trainer(policy, **fields)
  monkeypatch.setattr(trainer, 'rollout', lambda *_, **__: _with_a_number(played[0], 'logprobs', np.inf))
  _, selection = trainer.collect(state)
  assert not selection.keep.any() and trainer.replay.state()[1] == []
  monkeypatch.setattr(trainer, 'rollout', lambda *_, **__: played[0])
  trainer.collect(state)
  assert len(trainer.replay.state()[1]) == 1
  # Nor is anything drawn from the buffer then.
  monkeypatch.setattr(trainer, 'rollout', lambda *_, **__: _with_a_number(played[0], 'logprobs', np.inf))
  assert not trainer.collect(state)[1].keep.any()


@pytest.mark.parametrize('name', ['advantages', 'returns', 'old_logprobs', 'old_values'])
def test_a_batch_with_a_number_that_is_not_finite_is_not_learnt_from(policy, played, name):
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  array = np.array(getattr(batch, name))
  row, column = np.argwhere(batch.mask)[0]
  array[row, column] = np.nan
  before = jax.device_get(state.saved())
  state, metrics = trainer.update(state, batch.replace(**{name: array}), selection)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.saved()), before)
  assert metrics[f'not_finite/{name}'].count == 1 and f'(row {row})' in metrics[f'not_finite/{name}'].text
  assert metrics['train/num_mini_batches'] == 0


def _poisoned(tree, part):
  """The tree with a NaN in each array whose path contains a text."""

  def poison(path, x):
    return x.at[(0,) * x.ndim].set(np.nan) if part in jax.tree_util.keystr(path) else x

  return jax.tree_util.tree_map_with_path(poison, tree)


def test_each_epoch_iteration_and_seed_has_its_own_order_of_mini_batches(policy, played):
  orders = set()
  for seed in (0, 1):
    trainer, _ = learning.make_trainer(policy, seed=seed, algorithm__ppo_epochs=2, optimizer__mini_batch_size=16)
    selection = trainer.select(played[0])
    for iteration in (0, 1):
      steps = [rows.tolist() for rows, _ in trainer._plans(selection, iteration)]
      half = len(steps) // 2
      rows = [sorted(itertools.chain(*part)) for part in (steps[:half], steps[half:])]
      assert half > 1 and rows[0] == rows[1]
      orders |= {str(steps[:half]), str(steps[half:])}
      again = [rows.tolist() for rows, _ in trainer._plans(selection, iteration)]
      assert again == steps  # a resumed run takes the same steps
  assert len(orders) == 8


@pytest.mark.parametrize(('fixed', 'steps'), [(True, 4), (False, 1)])
def test_fewer_groups_are_as_many_steps_if_their_number_is_fixed(policy, played, fixed, steps):
  trainer, _ = learning.make_trainer(
    policy, filter__strategy='top_k', filter__value=0.25, filter__fixed_steps=fixed
  )  # fmt: skip
  selection = trainer.select(played[0])
  taken = [rows for rows, _ in trainer._plans(selection, 0)]
  assert len(taken) == steps
  np.testing.assert_array_equal(np.sort(np.concatenate(taken)), np.flatnonzero(selection.keep))


def test_a_new_shape_of_bins_is_told_once(policy, played, caplog):
  trainer, _ = learning.make_trainer(policy, optimizer__packing=True)
  selection = trainer.select(played[0])
  with caplog.at_level(logging.INFO):
    for iteration in (0, 1):
      plan = trainer._plans(selection, iteration)[0][1][0]
  shape = f'{len(plan.bins)} bins of {plan.width} columns with up to {plan.replies} scored tokens'
  assert [text for text in caplog.messages if text.startswith('update: shape')] == [
    f'update: shape 1, compiled once: {shape}'
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('fields', 'place', 'part', 'names'),
  [
    ({'algorithm__kl_loss_coef': 0.1}, 'reference', 'norm', ['ref_logprobs']),
    ({'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0}, 'trained', 'value_head', ['old_values']),
    ({'model__separate_critic': True}, 'trained', 'critic', ['old_values']),
    ({'lora__rank': 4}, 'trained', 'lora_b', ['sampled_logprobs', 'sampled_entropies', 'sampled_values']),
    ({'lora__rank': 4}, 'frozen', 'norm', ['sampled_logprobs', 'sampled_entropies', 'sampled_values']),
  ],
)
@pytest.mark.exhaustive_cases('fields1-trained-value_head-names1', 'fields2-trained-critic-names2')
def test_bad_weights_are_caught_in_the_iteration_that_reads_them(fields, place, part, names):
  trainer, state = learning.make_trainer(build.load_policy(small_config(**fields)), **fields)
  state = state.replace(**{place: _poisoned(getattr(state, place), part)})
  before = jax.device_get(state.saved())
  _, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  state, updated = trainer.update(state, batch, selection)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.saved()), before)
  found = {name for name, x in (metrics | updated).items() if isinstance(x, NotFinite)}
  assert {f'not_finite/{name}' for name in names} <= found and updated['train/num_mini_batches'] == 0


@pytest.mark.slow
def test_of_several_steps_only_the_bad_one_is_skipped_and_the_metrics_are_those_of_the_others(
  policy, played, monkeypatch
):
  trainer, state = learning.make_trainer(policy, optimizer__mini_batch_size=16)
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  original, calls = trainer.micro_batches, []

  def micro_batches(*arguments):
    calls.append(1)
    for x in original(*arguments):
      yield x.replace(weights=x.weights * np.nan) if len(calls) == 2 else x

  monkeypatch.setattr(trainer, 'micro_batches', micro_batches)
  before = jax.device_get(state.trained)
  state, metrics = trainer.update(state, batch, selection)
  assert metrics['train/num_mini_batches'] == 2 and np.isfinite(metrics['actor/pg_loss'])
  assert metrics[SKIPPED].count == 1
  text = metrics[SKIPPED].text
  assert 'actor/grad_norm' in text and 'gradient of policy/embed_tokens and ' in text
  assert text.endswith(' in optimiser step 2 of 2') and ', in a micro-batch of rows ' in text
  assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.trained), strict=True))


def test_weights_that_are_finite_and_of_no_use_are_found(policy, played):
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  state, _ = trainer.update(state, batch, selection)
  traces = trainer.learner.traces
  assert trainer.try_weights(state, batch, selection) == {}
  huge = state.replace(trained=jax.tree.map(lambda x: x * 1e20, state.trained))
  (finding,) = trainer.try_weights(huge, batch, selection).values()
  assert 'actor/pg_loss' in finding.text and finding.text.endswith('under the new weights')
  assert trainer.learner.traces == traces  # it compiles nothing


def test_ratios_are_of_the_tokens_that_were_trained(policy, played):
  trainer, state = learning.make_trainer(policy, filter__strategy='top_k', filter__value=0.5, algorithm__ppo_epochs=2)
  selection = trainer.select(played[0])
  batch, metrics = trainer.estimate(state, selection)
  _, updated = trainer.update(state, batch, selection)
  tokens = played[0].trajectory.loss_mask[selection.keep].sum()
  advantages = batch.advantages[batch.trained]
  assert advantages.shape == (tokens,) and advantages.max() == pytest.approx(metrics['critic/advantages/max'])
  edges, counts = updated['actor/ratio']
  assert counts.sum() == 2 * tokens and counts.max() < 2 * tokens
  # The share outside the clip's bounds is near what the losses say: the bins' edges are not the bounds.
  outside = counts[(edges[1:] < 0.8) | (edges[:-1] > 1.28)].sum() / counts.sum()
  assert 0 < outside < 3 * updated['actor/pg_clipfrac'] + 0.1
  assert [name for name, x in updated.items() if isinstance(x, Counts)] == ['actor/ratio']


@pytest.mark.slow
def test_an_iteration_is_its_steps(policy):
  trainer, state = learning.make_trainer(policy, optimizer__mini_batch_size=16)
  other = learning.copied(state)
  rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  state, updated = trainer.update(state, batch, selection)
  whole, found = trainer.iterate(other)
  assert state.iteration == whole.iteration == 1 and rollout.trajectory.policy_version.max() == 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.trained), jax.device_get(whole.trained))
  for name, x in (metrics | updated).items():
    assert isinstance(x, Counts) or found[name] == x, name
  assert 'train/FrozenLake/success' in found and 'actor/ratio' not in found
  # The next iteration plays other levels.
  again, _ = trainer.collect(state)
  assert not {e.level_seed for e in again.episodes} & {e.level_seed for e in rollout.episodes}


@pytest.mark.slow
def test_online_k_learns_from_one_rollout_k_times_and_resumes(tmp_path):
  fields = {
    'train__online_k': 2, 'checkpoint__every': 2, 'eval__every': 0, 'eval__greedy_too': False,
    'algorithm__ratio_level': 'turn',
  }  # fmt: skip
  config = small_config(num_iterations=4, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  lines = read_metrics(tmp_path / 'whole')[1:]
  assert lines[0]['critic/score/mean'] == lines[1]['critic/score/mean'] != lines[2]['critic/score/mean']
  assert lines[0]['actor/pg_loss'] != lines[1]['actor/pg_loss']  # but from new weights
  assert 'timing_s/gen' in lines[0] and 'timing_s/gen' not in lines[1]
  assert [line['rollout/policy_lag_mean'] for line in lines] == [0, 1, 0, 1]
  train.train_and_evaluate(small_config(num_iterations=2, **fields), str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  again = read_metrics(tmp_path / 'parts')[1:]
  for ours, theirs in zip(again[2:], lines[2:], strict=True):
    assert {n: x for n, x in ours.items() if not n.startswith(('timing_s/', 'perf/'))} == {
      n: x for n, x in theirs.items() if not n.startswith(('timing_s/', 'perf/'))
    }
