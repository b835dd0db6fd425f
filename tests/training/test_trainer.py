"""What an iteration learns from: filters, refills, credit, KL, masks; each against what it should come to by hand."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import build, train
from ragen_jax.agent.episode import Status
from ragen_jax.config.checks import check_config
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.probes import thought_information
from ragen_jax.training.replay import ReplayBuffer
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import UserError
from tests.support import builders


def _config(**fields):
  return builders.small_config(train__groups=8, **fields)


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(_config())


def _trainer(policy, **fields):
  config = _config(**fields)
  check_config(config)
  trainer = Trainer(config, policy)
  params, opt_state, _ = trainer.init()
  # The update gives its weights away, and the policy is that of all tests.
  return trainer, jax.tree.map(jnp.copy, params), opt_state


@pytest.fixture(scope='module')
def played(policy):
  """A rollout that tests look at in many ways."""
  trainer, params, _ = _trainer(policy)
  rollout, _ = trainer.collect(params, 0)
  std = np.asarray([rollout.scores[rollout.trajectory.group == g].std(ddof=1) for g in range(8)])
  assert len(np.unique(std)) > 2  # or there is nothing to choose between
  return rollout, std


def _groups(rollout, selection):
  return sorted(np.unique(rollout.trajectory.group[selection.keep]).tolist())


def test_without_a_filter_all_rows_are_kept(policy, played):
  trainer, _, _ = _trainer(policy)
  selection = trainer.select(played[0])
  assert selection.keep.all() and selection.groups == 8 and (selection.scale == 1).all()


def test_starpo_s_keeps_the_groups_whose_rewards_vary_most(policy, played):
  rollout, std = played
  trainer, _, _ = _trainer(policy, filter__strategy='top_k', filter__value=0.25, filter__loss_scaling='sqrt')
  selection = trainer.select(rollout)
  assert _groups(rollout, selection) == sorted(np.argsort(-std, kind='stable')[:2].tolist())
  assert selection.keep.sum() == 2 * 4
  np.testing.assert_allclose(selection.scale, 0.25**0.5)


def test_soft_reweighting_drops_nothing_and_weighs_by_deviation(policy, played):
  rollout, std = played
  trainer, params, _ = _trainer(policy, filter__soft=True)
  selection = trainer.select(rollout)
  assert selection.keep.all()
  np.testing.assert_allclose(selection.scale, (std / std.max())[rollout.trajectory.group], rtol=1e-5)
  plain, _ = trainer.make_batch(params, dataclasses.replace(selection, scale=np.ones_like(selection.scale)))
  scaled, _ = trainer.make_batch(params, selection)
  np.testing.assert_allclose(scaled.advantages, plain.advantages * selection.scale[:, None], rtol=1e-5)


@pytest.mark.parametrize(('fixed', 'steps'), [(True, 4), (False, 1)])
def test_a_filter_need_not_mean_fewer_steps(policy, fixed, steps):
  trainer, params, opt_state = _trainer(policy, filter__strategy='top_k', filter__value=0.25, filter__fixed_steps=fixed)
  _, selection = trainer.collect(params, 0)
  batch, _ = trainer.make_batch(params, selection)
  before = jax.device_get(params)
  params, _, metrics = trainer.update(params, opt_state, batch, selection, 0)
  assert metrics['train/num_mini_batches'] == steps
  assert any(
    (a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(params)), strict=True)
  )


def test_where_nothing_is_kept_nothing_is_learnt(policy, played):
  trainer, params, opt_state = _trainer(policy)
  selection = trainer.select(played[0])
  nothing = dataclasses.replace(selection, keep=np.zeros_like(selection.keep), groups=0)
  before = jax.device_get(params)
  batch, _ = trainer.make_batch(params, nothing)
  assert not batch.mask.any()
  params, _, metrics = trainer.update(params, opt_state, batch, nothing, 0)
  assert metrics['train/num_mini_batches'] == 0
  assert not np.any(trainer.histograms(batch)['actor/ratio'].counts)
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))


def test_histograms_are_of_the_tokens_that_were_trained(policy, played):
  trainer, params, opt_state = _trainer(policy, filter__strategy='top_k', filter__value=0.5, algorithm__ppo_epochs=2)
  selection = trainer.select(played[0])
  batch, metrics = trainer.make_batch(params, selection)
  assert trainer.histograms(batch)['actor/ratio'].counts.sum() == 0  # before the first update
  _, _, updated = trainer.update(params, opt_state, batch, selection, 0)
  found = trainer.histograms(batch)
  tokens = played[0].trajectory.loss_mask[selection.keep].sum()
  advantages = found['critic/advantages']
  assert advantages.shape == (tokens,) and advantages.max() == pytest.approx(metrics['critic/advantages/max'])
  edges, counts = found['actor/ratio']
  assert counts.sum() == 2 * tokens and counts.max() < 2 * tokens
  # The share outside the clip's bounds is near what the losses say: the bins' edges are not the bounds.
  outside = counts[(edges[1:] < 0.8) | (edges[:-1] > 1.28)].sum() / counts.sum()
  assert 0 < outside < 3 * updated['actor/pg_clipfrac'] + 0.1
  assert 'ratio_counts' not in updated


def test_dropped_rows_do_not_touch_the_advantages_of_others(policy, played):
  """Whitening is over what is kept: the advantages are those of a rollout that never had the other rows."""
  rollout, _ = played
  trainer, params, _ = _trainer(policy)
  selection = trainer.select(rollout)
  keep = rollout.trajectory.group < 5
  batch, _ = trainer.make_batch(params, dataclasses.replace(selection, keep=keep))
  changed = rollout.trajectory.replace(rewards=np.where(keep[:, None], rollout.trajectory.rewards, 7.0))
  other = dataclasses.replace(rollout, trajectory=changed)
  again, _ = trainer.make_batch(params, dataclasses.replace(selection, rollout=other, keep=keep))
  np.testing.assert_array_equal(batch.advantages, again.advantages)
  assert not batch.mask[~keep].any() and abs(float(batch.advantages[batch.mask].mean())) < 1e-5


def test_fresh_groups_are_played_until_enough_are_kept(policy):
  """DAPO's dynamic sampling: only groups that vary, and as many as without a filter."""
  trainer, params, _ = _trainer(policy, filter__include_zero=False, filter__max_rollouts=6)
  rollout, selection = trainer.collect(params, 0)
  t = rollout.trajectory
  count = int(selection.metrics['rollout/rollouts'])
  assert 1 < count <= 6 and len(t.group) == count * 32
  assert selection.groups == 8 and selection.keep.sum() == 32
  for g in np.unique(t.group[selection.keep]):
    assert np.ptp(rollout.scores[t.group == g]) > 0
  # Fresh levels, and rows that still belong to their episodes.
  seeds = [e.level_seed for e in rollout.episodes]
  assert len(set(seeds)) == count * 8 and sorted(np.unique(t.group)) == list(range(count * 8))
  assert t.episode.tolist() == list(range(count * 32))
  np.testing.assert_allclose(np.where(t.loss_mask, t.rewards, 0).sum(axis=1), rollout.scores, atol=1e-5)
  assert all(e.group == g for e, g in zip(rollout.episodes, t.group, strict=True))


def test_reward_normalisation_reaches_the_estimator_and_leaves_raw_scores(policy, played):
  rollout, _ = played
  trainer, params, _ = _trainer(
    policy, algorithm__adv_estimator='arpo', reward__credit='trajectory', reward__method='mean_std',
    algorithm__whiten_advantages=False,
  )  # fmt: skip
  raw = rollout.scores.copy()
  batch, _ = trainer.make_batch(params, trainer.select(rollout))
  expected = np.zeros_like(raw)
  for g in range(8):
    own = rollout.trajectory.group == g
    std = raw[own].std(ddof=1)
    expected[own] = (raw[own] - raw[own].mean()) / (std + 1e-6) if std > 1e-6 else 0
  first = [batch.advantages[b][batch.mask[b]][0] for b in range(len(raw))]
  np.testing.assert_allclose(first, expected, atol=1e-4)
  np.testing.assert_array_equal(rollout.scores, raw)


def _nudge(params, by=0.02):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + by * rng.normal(size=x.shape).astype(np.float32), params)


def test_kl_to_the_first_weights_enters_loss_and_reward(policy):
  trainer, params, opt_state = _trainer(
    policy, algorithm__kl_loss_coef=0.5, algorithm__kl_reward_coef=0.1, algorithm__kl_kind='k1'
  )
  rollout, selection = trainer.collect(params, 0)
  batch, metrics = trainer.make_batch(params, selection)
  # The policy is the reference still.
  np.testing.assert_allclose(batch.ref_logprobs[batch.mask], batch.old_logprobs[batch.mask], atol=1e-4)
  assert abs(metrics['actor/reward_kl_penalty']) < 1e-5

  moved = _nudge(params)
  rollout, selection = trainer.collect(moved, 0)
  batch, metrics = trainer.make_batch(moved, selection)
  kl = batch.old_logprobs - batch.ref_logprobs
  assert metrics['actor/reward_kl_penalty'] == pytest.approx(kl[batch.mask].mean(), rel=1e-4)
  np.testing.assert_allclose(
    metrics['critic/rewards/mean'], np.mean(rollout.scores - 0.1 * np.where(batch.mask, kl, 0).sum(axis=1)), atol=1e-4
  )
  _, _, metrics = trainer.update(moved, opt_state, batch, selection, 0)
  assert metrics['actor/kl_loss'] != 0


def test_importance_weights_are_one_where_both_programs_agree_and_capped_where_not(policy):
  trainer, params, _ = _trainer(policy, algorithm__old_logprobs='trainer', algorithm__tis_cap=1.5)
  rollout, selection = trainer.collect(params, 0)
  batch, metrics = trainer.make_batch(params, selection)
  np.testing.assert_allclose(batch.importance[batch.mask], 1, atol=1e-3)
  assert metrics['rollout/importance_mean'] == pytest.approx(1, abs=1e-4)
  # As if the sampler had thought each token half as likely as the trainer does.
  halved = rollout.trajectory.replace(logprobs=rollout.trajectory.logprobs - np.log(2).astype(np.float32))
  other = dataclasses.replace(rollout, trajectory=halved)
  batch, _ = trainer.make_batch(params, dataclasses.replace(selection, rollout=other))
  np.testing.assert_allclose(batch.importance[batch.mask], 1.5, atol=1e-3)


def test_masks_that_are_off_train_every_token(policy, played):
  rollout, _ = played
  t = rollout.trajectory
  trainer, params, opt_state = _trainer(policy, algorithm__mask_loss=False, algorithm__old_logprobs='trainer')
  selection = trainer.select(rollout)
  batch, _ = trainer.make_batch(params, selection)
  assert (batch.mask.sum(axis=1) == t.length - 1).all() and (batch.weights == batch.mask).all()
  # Advantages still run through sampled tokens only.
  for row in range(4):
    columns = batch.columns[row][batch.mask[row]]
    assert not batch.advantages[row][batch.mask[row]][~t.loss_mask[row, columns]].any()
  _, _, metrics = trainer.update(params, opt_state, batch, selection, 0)
  assert metrics['train/num_mini_batches'] == 4


def test_only_episodes_that_a_budget_cut_off_are_bootstrapped(policy, played):
  rollout, _ = played
  t = rollout.trajectory
  trainer, params, _ = _trainer(policy, algorithm__bootstrap_truncated=True)
  bootstrap = trainer._bootstrap(params, rollout)
  cut = t.status >= Status.OUT_OF_TURNS
  assert 0 < cut.sum() < len(cut)
  assert not bootstrap[~cut].any() and bootstrap[cut].all()
  # It is the value that the sampler would record for a token right behind: that of a longer episode's own forward pass.
  row = int(np.flatnonzero(cut)[0])
  end = int(np.flatnonzero(t.loss_mask[row])[-1]) + 1
  hidden, _ = policy.model.policy(policy.model.policy.embed(t.tokens[row : row + 1, :end]))
  np.testing.assert_allclose(bootstrap[row], policy.model.value_head(hidden)[0, -1], atol=1e-4)


def test_the_gradient_of_the_only_bucket_is_that_of_the_update(policy, played):
  rollout, _ = played
  trainer, params, opt_state = _trainer(
    policy, monitor__gradient_buckets=1, algorithm__entropy_coef=0.0, algorithm__value_coef=0.0,
    optimizer__mini_batch_size=32,
  )  # fmt: skip
  selection = trainer.select(rollout)
  batch, _ = trainer.make_batch(params, selection)
  found = trainer.gradient_metrics(params, batch, selection)
  _, _, metrics = trainer.update(params, opt_state, batch, selection, 0)
  assert metrics['train/num_mini_batches'] == 1
  assert found['grad_norm/bucket_0/task'] == pytest.approx(metrics['actor/grad_norm'], rel=1e-3)
  assert 'grad_norm/bucket_0/entropy' not in found  # it is off


def test_buckets_divide_the_groups_by_deviation(policy, played):
  rollout, _ = played
  trainer, params, _ = _trainer(policy, monitor__gradient_buckets=2, algorithm__entropy_coef=0.01)
  selection = trainer.select(rollout)
  batch, _ = trainer.make_batch(params, selection)
  metrics = trainer.gradient_metrics(params, batch, selection)
  assert metrics['grad_norm/bucket_0/rows'] + metrics['grad_norm/bucket_1/rows'] == 32
  assert metrics['grad_norm/bucket_0/reward_std'] < metrics['grad_norm/bucket_1/reward_std']
  assert metrics['grad_norm/bucket_1/task'] > 0 and metrics['grad_norm/bucket_1/entropy'] > 0
  assert 'grad_norm/bucket_1/kl' not in metrics  # it is off


def test_thoughts_depend_on_their_prompts(policy):
  """The built-in model names the squares that it sees: its thoughts are likelier under their own prompts."""
  trainer, params, _ = _trainer(policy, monitor__information_samples=8, optimizer__micro_batch_size=8)
  rollout, _ = trainer.collect(params, 0)
  scored = []
  score = trainer.learner.score
  trainer.learner.score = lambda *args: scored.append(score(*args)[0]) or (scored[-1], None)
  for first_only in (True, False):
    found = thought_information(trainer, params, rollout, np.random.default_rng(0), first_only=first_only)
    assert found['valid_thinking_rate'] > 0.5
    assert 0 < found['mi'] <= np.log(8) and found['retrieval_top1'] > found['retrieval_top1_chance']
  # Among the scores of a thought under all prompts are the log-probs that the sampler recorded under its own.
  t, recorded = rollout.trajectory, scored[-1]
  own = [t.logprobs[row][t.loss_mask[row]] for row in range(len(t.length))]
  hits = sum(
    any(np.abs(x[:6] - o[s : s + 6]).max() < 1e-3 for o in own for s in range(0, max(len(o) - 6, 1)) if len(o) >= s + 6)
    for x in recorded
  )
  assert hits >= 6


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'algorithm__ratio_level': 'word'}, r"algorithm\.ratio_level='word'.*sequence"),
    ({'algorithm__kl_kind': 'k4'}, r"algorithm\.kl_kind='k4'"),
    ({'reward__method': 'mean'}, r"reward\.method='mean'.*reward\.credit"),
    ({'filter__strategy': 'best'}, r"filter\.strategy='best'.*top_k"),
    ({'filter__metric': 'luck'}, r"filter\.metric='luck'"),
    ({'algorithm__tis_cap': 2.0}, r"algorithm\.tis_cap=2\.0.*old_logprobs='trainer'"),
    ({'algorithm__mask_loss': False}, r"algorithm\.mask_loss=False.*old_logprobs='trainer'"),
    ({'train__online_k': 2}, r'num_iterations=3: must be a multiple of train\.online_k = 2'),
    ({'algorithm__adv_estimator': 'grpo', 'algorithm__bootstrap_truncated': True}, r'bootstrap_truncated.*no critic'),
    (
      {'algorithm__ratio_level': 'sequence', 'agent__context': 'single_turn'},
      r"ratio_level='sequence'.*agent\.context",
    ),
    ({'algorithm__adv_estimator': 'turn_wise_gae', 'algorithm__kl_reward_coef': 0.1}, r'kl_reward_coef=0\.1.*ends of'),
    ({'filter__strategy': 'top_k', 'filter__value': 0.1}, r'filter\.value=0\.1: of train\.groups=8 no group'),
    ({'replay__groups': 2}, r'replay\.groups=2: needs algorithm\.tis_cap'),
    ({'monitor__echo_trap': 'panic'}, r"monitor\.echo_trap='panic'.*rollback"),
    ({'filter__value': 0.5, 'train__group_size': 1}, r'train\.group_size must be at least 2'),
  ],
)
def test_options_that_do_not_go_together_are_refused(fields, message):
  with pytest.raises(UserError, match=message) as e:
    check_config(_config(**fields))
  assert '\n' not in str(e.value)


def test_the_buffer_gives_back_whole_groups_that_are_not_too_old(policy, played):
  rollout, _ = played
  buffer = ReplayBuffer(max_age=2)
  rng = np.random.default_rng(0)
  assert buffer.draw(4, rng, 0) == []
  rows, scale = np.arange(4, 32), np.linspace(0, 1, 32, dtype=np.float32)  # the first group was not learnt from
  for iteration in range(4):
    marked = dataclasses.replace(
      rollout, trajectory=rollout.trajectory.replace(policy_version=np.full(32, iteration, np.int32))
    )
    buffer.add(marked, rows, scale, iteration)
  drawn = buffer.draw(100, rng, 4)
  assert [int(d.trajectory.policy_version[0]) for d, _ in drawn] == [2, 3]
  assert [len(d.trajectory.length) for d, _ in drawn] == [28, 28]
  some = buffer.draw(5, rng, 4)
  assert sum(len(np.unique(d.trajectory.group)) for d, _ in some) == 5
  for d, factors in drawn + some:
    t = d.trajectory
    for g in np.unique(t.group):
      own = np.flatnonzero(t.group == g)
      assert len(own) == 4
      original = next(r for r in range(0, 32, 4) if (rollout.trajectory.tokens[r : r + 4] == t.tokens[own]).all())
      np.testing.assert_array_equal(factors[own], scale[original : original + 4])
      np.testing.assert_array_equal(d.scores[own], rollout.scores[original : original + 4])
      np.testing.assert_array_equal(t.logprobs[own], rollout.trajectory.logprobs[original : original + 4])
  # And through a checkpoint.
  arrays, described = buffer.state()
  again = ReplayBuffer(max_age=2)
  again.load_state(arrays, json.loads(json.dumps(described)))
  jax.tree.map(np.testing.assert_array_equal, again.state()[0], arrays)
  assert again.state()[1] == described
  assert buffer.draw(100, rng, 6) == []


@pytest.mark.slow
def test_replayed_groups_are_learnt_from_with_importance_weights_and_a_run_resumes_with_them(tmp_path):
  fields = {
    'replay__groups': 2, 'replay__max_age': 1, 'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0,
    'eval__every': 0, 'eval__greedy_too': False, 'optimizer__actor_lr': 3e-3, 'checkpoint__every': 2,
  }  # fmt: skip
  config = builders.small_config(num_iterations=3, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  lines = read_metrics(tmp_path / 'whole')[1:]
  assert [line['rollout/replayed_groups'] for line in lines] == [0, 2, 2]
  assert all(line['rollout/logprob_gap_max'] < 1e-3 for line in lines)  # of fresh rows
  assert {line['train/num_mini_batches'] for line in lines} == {2}
  train.train_and_evaluate(builders.small_config(num_iterations=2, **fields), str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  last = [{n: x for n, x in part[-1].items() if not n.startswith(('timing_s/', 'perf/'))}
          for part in (lines, read_metrics(tmp_path / 'parts'))]  # fmt: skip
  assert last[0] == last[1]


@pytest.mark.slow
def test_online_k_learns_from_one_rollout_k_times_and_resumes(tmp_path):
  fields = {
    'train__online_k': 2, 'checkpoint__every': 2, 'eval__every': 0, 'eval__greedy_too': False,
    'algorithm__ratio_level': 'turn',
  }  # fmt: skip
  config = builders.small_config(num_iterations=4, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  lines = read_metrics(tmp_path / 'whole')[1:]
  assert lines[0]['critic/score/mean'] == lines[1]['critic/score/mean'] != lines[2]['critic/score/mean']
  assert lines[0]['actor/pg_loss'] != lines[1]['actor/pg_loss']  # but from new weights
  assert 'timing_s/gen' in lines[0] and 'timing_s/gen' not in lines[1]
  train.train_and_evaluate(builders.small_config(num_iterations=2, **fields), str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  again = read_metrics(tmp_path / 'parts')[1:]
  for ours, theirs in zip(again[2:], lines[2:], strict=True):
    assert {n: x for n, x in ours.items() if not n.startswith(('timing_s/', 'perf/'))} == {
      n: x for n, x in theirs.items() if not n.startswith(('timing_s/', 'perf/'))
    }
