"""Demonstrations: how well they are played, and where the loss and the rewards lie."""

from __future__ import annotations

import numpy as np

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.models import presets
from ragen_jax.sft.demonstrations import DemonstrationStyle, demonstrate
from tests.support import builders


def _demonstrations(style, tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), groups=64, seed=0):
  config = builders.small_config()
  specs = build.env_groups(config, tags, (groups,) * len(tags))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  envs = EnvStateManager(specs, 1)
  context = build.context_manager(config, tokenizer, specs)
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
