"""Demonstrations, the warm start that learns from them, and the checkpoint that ships."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from ragen_jax import experiment, learner, sft
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.demonstrations import DemonstrationStyle, demonstrate
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.models import presets
from tests import helpers


def _demonstrations(style, tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), groups=64, seed=0):
  config = helpers.small_config()
  specs = experiment.env_groups(config, tags, (groups,) * len(tags))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  envs = EnvStateManager(specs, 1)
  context = experiment.context_manager(config, tokenizer, specs)
  trajectory, episodes = demonstrate(envs, context, 77, np.random.default_rng(seed), style, 512)
  envs.reset(77)
  return trajectory, episodes, envs.optimal(), tokenizer, context


def test_an_expert_without_noise_reaches_the_optimum_and_noise_costs():
  expert = DemonstrationStyle(discount=1.0, noise=0.0, hurry=0.0)
  _, episodes, optimal, _, _ = _demonstrations(expert, groups=256)
  tags = np.asarray([e.tag for e in episodes])
  success = np.asarray([e.success for e in episodes])
  for tag in ('FrozenLake', 'SimpleSokoban', 'Bandit'):
    best, reached = optimal[tags == tag].mean(), success[tags == tag].mean()
    assert abs(reached - best) < 4 * np.sqrt(best * (1 - best) / 256) + 1e-6, tag
  _, noisy, _, _, _ = _demonstrations(DemonstrationStyle(noise=0.8), groups=256)
  assert np.mean([e.success for e in noisy]) < success.mean() - 0.2


def test_the_loss_mask_of_demonstrations_is_on_replies_and_their_stop_tokens():
  trajectory, episodes, _, tokenizer, context = _demonstrations(DemonstrationStyle())
  for row, episode in enumerate(episodes):
    mask, tokens = trajectory.loss_mask[row], trajectory.tokens[row]
    starts = np.flatnonzero(mask & ~np.roll(mask, 1))
    ends = np.flatnonzero(mask & ~np.roll(mask, -1))
    assert len(starts) == len(episode.turns)
    for start, end, turn in zip(starts, ends, episode.turns, strict=True):
      assert tokens[end] == tokenizer.stop_ids[0]
      assert context.reply_prefix + tokenizer.decode(tokens[start:end]) == turn.reply
      parsed = context.parse(int(trajectory.env[row]), turn.reply)
      assert parsed.valid and list(parsed.names) == turn.actions[: len(parsed.names)]


def test_rewards_of_demonstrations_are_on_the_last_token_of_their_turns():
  trajectory, episodes, _, tokenizer, _ = _demonstrations(DemonstrationStyle(noise=0.2))
  ends = trajectory.loss_mask & (trajectory.tokens == tokenizer.stop_ids[0])
  assert (trajectory.rewards[~ends] == 0).all()
  for row, episode in enumerate(episodes):
    np.testing.assert_allclose(trajectory.rewards[row][ends[row]], [t.reward for t in episode.turns], atol=1e-6)
  assert {e.tag for e in episodes if e.env_return > 0} == {'FrozenLake', 'SimpleSokoban', 'Bandit'}


def test_a_warm_start_from_scratch_learns_the_format_and_can_be_loaded(tmp_path):
  config = helpers.small_config(
    sft__tags=('Bandit',), sft__levels=(512,), sft__steps=120, sft__batch_size=32, sft__learning_rate=5e-3,
    sft__from_scratch=True, sft__shape=(32, 2, 4, 2, 8, 64), sft__output=str(tmp_path / 'out'),
    eval__tags=('Bandit',), eval__groups=64, length_step=16,
  )  # fmt: skip
  sft.train_sft(config)
  config.model.path = str(tmp_path / 'out')
  policy = experiment.load_policy(config)
  from ragen_jax.evaluate import Evaluator

  metrics = Evaluator(config, policy)(experiment.param_state(policy.model)).metrics
  assert metrics['val-env/Bandit/action_is_valid'] > 0.95  # a random model writes no valid reply in a thousand
  assert metrics['val-greedy/Bandit/success'] > 0.95


def test_the_value_head_learns_what_the_best_play_would_bring(tmp_path):
  config = helpers.small_config(
    sft__tags=('FrozenLake',), sft__levels=(1024,), sft__steps=250, sft__batch_size=32, sft__learning_rate=5e-3,
    sft__from_scratch=True, sft__shape=(32, 2, 4, 2, 8, 64), sft__output=str(tmp_path / 'out'), sft__value_coef=5.0,
    envs__FrozenLake__size=2, envs__FrozenLake__max_turns=1, envs__FrozenLake__max_actions=1, eval__groups=8,
    length_step=64,
  )  # fmt: skip
  sft.train_sft(config)
  config.model.path = str(tmp_path / 'out')
  policy = experiment.load_policy(config)
  specs = experiment.env_groups(config, ('FrozenLake',), (256,))
  envs, context = EnvStateManager(specs, 1), experiment.context_manager(config, policy.tokenizer, specs)
  trajectory, _ = demonstrate(envs, context, 5000, np.random.default_rng(9), DemonstrationStyle(), 512)
  columns, mask = learner.sampled_columns(trajectory.loss_mask)
  best = learner.gather(trajectory.values, columns, mask)[mask]
  _, _, values = learner.score_tokens(policy.model, trajectory.tokens, columns, learner.LossConfig())
  assert best.std() > 0.1  # the goal is beside the player, where two of three slips may reach it, or out of reach
  assert np.corrcoef(np.asarray(values)[mask], best)[0, 1] > 0.7
  assert abs(np.asarray(values)[mask].mean() - best.mean()) < 0.1
  # A warm start that does not train the head hands it on.
  config.sft.update(from_scratch=False, value_coef=0.0, steps=1, output=str(tmp_path / 'again'))
  sft.train_sft(config)
  for name in ('out', 'again'):
    config.model.path = str(tmp_path / name)
    assert float(experiment.load_policy(config).model.value_head.bias[...]) == float(policy.model.value_head.bias[...])


def test_the_built_in_model_is_small_and_opens_in_transformers():
  directory = pathlib.Path(presets.resolve('tiny', ''))
  assert sum(f.stat().st_size for f in directory.iterdir()) < 3e6
  pytest.importorskip('torch', reason='transformers needs PyTorch to run a model')
  import jax
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(str(directory))
  ids = tokenizer('Actions: Left, Down <think>I am at (1, 2)')['input_ids']
  theirs = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
  policy = experiment.load_policy(helpers.small_config())
  assert tuple(ids) == policy.tokenizer.encode('Actions: Left, Down <think>I am at (1, 2)')
  with torch.no_grad():
    expected = theirs(torch.tensor([ids])).logits[0].numpy()
  qwen = policy.model.policy
  hidden, _ = qwen(qwen.embed(jax.numpy.asarray([ids])))
  np.testing.assert_allclose(np.asarray(qwen.logits(hidden))[0], expected, atol=1e-4)
