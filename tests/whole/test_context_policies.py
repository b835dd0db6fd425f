"""What the policy sees under each context policy, and that the rows that come of it are whole."""

from __future__ import annotations

import re

import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.episode import Status
from ragen_jax.training.batches import TokenRows, mini_batches, sampled_columns
from ragen_jax.training.estimate import TargetEstimator
from ragen_jax.training.rollout_metrics import rollout_metrics
from tests.support import learning
from tests.support.configs import small_config
from tests.support.estimators import estimating

pytestmark = pytest.mark.slow

MODES = {
  'limited': {'agent__context': 'limited_multi_turn', 'agent__context_turns': 2},
  'single': {'agent__context': 'single_turn', 'agent__context_turns': 3},
  'drop_oldest': {'agent__overlong': 'drop_oldest', 'agent__max_context': 210},
}


@pytest.fixture(scope='module', params=['limited', 'drop_oldest', 'single'])
def played(request):
  config = small_config(train__groups=8, length_step=128, envs__FrozenLake__max_turns=5, **MODES[request.param])
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = learning.copied(trainer.init())
  return request.param, trainer, state, trainer.rollout(state)


def _rows(t):
  """Rows that hold something."""
  return np.flatnonzero(t.loss_mask.any(axis=1))


def test_every_turn_is_trained_once_and_in_order(played):
  mode, trainer, _, rollout = played
  t, stop = rollout.trajectory, trainer.model.tokenizer.stop_ids[0]
  seen = {i: [] for i in range(len(rollout.episodes))}
  for row in _rows(t):
    of_turns = t.turn[row][t.loss_mask[row]]
    if mode != 'drop_oldest':
      assert len(set(of_turns.tolist())) == 1  # the last reply of the row, and no other
    assert t.tokens[row, : t.length[row]].tolist().count(stop) >= 3
    for turn in dict.fromkeys(of_turns.tolist()):
      columns = np.flatnonzero(t.loss_mask[row] & (t.turn[row] == turn))
      assert (np.diff(columns) == 1).all()
      seen[int(t.episode[row])].append((turn, t.tokens[row, columns].tolist()))
  for episode, turns in zip(rollout.episodes, seen.values(), strict=True):
    assert [turn for turn, _ in turns] == list(range(len(episode.turns)))
    texts = trainer.player.proxy.context.reply_texts([ids for _, ids in turns])
    assert texts == [turn.reply for turn in episode.turns]


def test_rows_belong_to_their_episodes(played):
  _, trainer, _, rollout = played
  t, rows = rollout.trajectory, _rows(rollout.trajectory)
  assert len(rows) > len(rollout.episodes) == trainer.rows
  assert len(t.length) % (trainer.rows // 4) == 0 and not t.length[np.setdiff1d(np.arange(len(t.length)), rows)].any()
  for row in rows:
    episode = rollout.episodes[t.episode[row]]
    assert t.group[row] == episode.group and t.status[row] == episode.status
  rewards = np.bincount(t.episode[rows], t.rewards[rows].sum(axis=1))
  np.testing.assert_allclose(rewards, [e.score for e in rollout.episodes], atol=1e-5)


def test_logprobs_are_those_of_a_forward_pass_over_the_row_alone(played):
  """So the cache of what is no longer seen is really gone."""
  _, trainer, state, rollout = played
  t = rollout.trajectory
  columns, mask = sampled_columns(t.loss_mask)
  model = nnx.merge(nnx.split(trainer.model.model)[0], state.params)
  settings = learning.scoring(vocab_limit=trainer.model.tokenizer.size)
  logprobs, _, values = learning.score(model, TokenRows(t.tokens, columns, mask), settings)
  for recorded, recomputed in ((t.logprobs, logprobs), (t.values, values)):
    at = np.take_along_axis(recorded, columns, axis=1)
    np.testing.assert_allclose(at[mask], np.asarray(recomputed)[mask], atol=1e-4)


def test_the_prompt_shows_what_the_policy_says_it_shows(played):
  mode, trainer, _, rollout = played
  t, tokenizer = rollout.trajectory, trainer.model.tokenizer
  window = {'limited': 2, 'single': 1, 'drop_oldest': 5}[mode]
  for row in _rows(t):
    episode = rollout.episodes[t.episode[row]]
    columns = np.flatnonzero(t.loss_mask[row])
    turn = int(t.turn[row, columns[-1]])
    text = tokenizer.decode(t.tokens[row, : t.length[row]])
    assert text.count('<|im_start|>system') == 1 and text.count('You are on a frozen lake') == 1
    shown = [int(n) - 1 for n in re.findall(r'Turn (\d+):\nState:', text)]
    assert shown[-1] == turn and shown == list(range(shown[0], turn + 1)) and len(shown) <= window
    assert mode == 'drop_oldest' or len(shown) == min(window, turn + 1)
    for i in shown:
      assert episode.turns[i].observation in text
      if mode != 'single':
        assert episode.turns[i].reply in text
    if mode == 'single':
      memory = re.findall(r'Turn (\d+): (.*) in\n', text)
      assert [int(n) - 1 for n, _ in memory] == list(range(max(turn - 2, 0), turn))
      for n, actions in memory:
        assert actions == (' || '.join(episode.turns[int(n) - 1].actions) or 'nothing')


def test_overlong_contexts_drop_turns_and_never_outgrow_their_columns(played):
  mode, trainer, _, rollout = played
  t = rollout.trajectory
  assert t.length.max() <= trainer.player.proxy.limits.max_context
  assert (t.status != Status.OUT_OF_CONTEXT).all()
  if mode == 'drop_oldest':
    assert t.length.max() > 150  # it really was at the limit


def test_a_context_too_short_for_its_window_ends_or_drops(tmp_path):
  for overlong, ended in (('end', True), ('drop_oldest', False)):
    config = small_config(
      agent__context='limited_multi_turn', agent__context_turns=5, agent__max_context=170, agent__overlong=overlong
    )
    policy = build.load_policy(config)
    trainer = build.make_trainer(config, policy)
    rollout = trainer.rollout(trainer.init())
    assert (rollout.trajectory.status == Status.OUT_OF_CONTEXT).any() == ended


def test_an_episode_has_one_advantage_whatever_its_number_of_rows(played):
  _, trainer, state, rollout = played
  settings = estimating(trainer.settings.estimate, adv_estimator='grpo')
  batch, _ = TargetEstimator(settings, trainer.scorer)(state, trainer.select(rollout))
  t = rollout.trajectory
  scores, group = np.asarray([e.score for e in rollout.episodes]), np.asarray([e.group for e in rollout.episodes])
  for row in _rows(t):
    own = scores[group == t.group[row]]
    expected = (scores[t.episode[row]] - own.mean()) / (own.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(batch.advantages[row][batch.mask[row]], expected, atol=1e-4)


def test_gae_runs_through_the_rows_of_an_episode(played):
  """With lambda = gamma = 1 an advantage is all that the episode still brings, in later rows too, less the value."""
  _, trainer, state, rollout = played
  settings = estimating(trainer.settings.estimate, whiten_advantages=False)
  batch, _ = TargetEstimator(settings, trainer.scorer)(state, trainer.select(rollout))
  t = rollout.trajectory
  for row in _rows(t):
    episode = rollout.episodes[t.episode[row]]
    present = batch.mask[row]
    left = np.asarray([sum(x.reward + x.penalty for x in episode.turns[k:]) for k in batch.turn[row][present]])
    np.testing.assert_allclose(batch.advantages[row][present], left - batch.old_values[row][present], atol=1e-4)


def test_an_update_takes_whole_episodes(played):
  _, trainer, state, rollout = played
  selection = trainer.select(rollout)
  kept = np.flatnonzero(selection.keep)
  parts = mini_batches(kept, rollout.trajectory.episode, np.random.default_rng(0), size=8, parts=4)
  assert len(parts) == 4 and sorted(np.concatenate(parts).tolist()) == kept.tolist()
  assert sum(len(np.unique(rollout.trajectory.episode[p])) for p in parts) == trainer.rows
  batch, _ = trainer.estimate(state, selection)
  _, metrics = trainer.update(learning.copied(state), batch, selection)
  assert metrics['train/num_mini_batches'] == 4 and np.isfinite(metrics['actor/pg_loss'])
  assert metrics['rollout/logprob_gap_max'] < 1e-3
  assert rollout_metrics(rollout, 4)['train/batch_size'] == trainer.rows
