"""Complete replies with true descriptions fit into the limits of shipped configs; a run warns where they do not."""

from __future__ import annotations

import dataclasses
import logging
import re
import types

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.reply_lengths import complete_replies, warn_if_too_long
from ragen_jax.agent.world_model.formats import FORMATS, described_sections, opening_tags, read_sections
from ragen_jax.agent.world_model.state_reward import score_description
from ragen_jax.config.command_line import load_config
from ragen_jax.envs import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets

_SPEC = EnvSpec('Lake', FrozenLake(), Budget(5, 10, 5), 20, 1)
_SCENES = [
  Scene((1, 1), {'goal': ((0, 0),), 'hole': holes}) for holes in ((), ((1, 2),), ((2, 2), (1, 0)))
]  # fmt: skip
_DESCRIBING = [form for form in FORMATS if described_sections(form)]


@pytest.mark.parametrize('form', _DESCRIBING)
def test_complete_replies_have_their_form_and_describe_everything(form):
  for reply, scene in zip(complete_replies(_SPEC, form, _SCENES), _SCENES, strict=True):
    sections = read_sections(reply, form)
    assert sections.correct and sections.texts['answer'] == _SPEC.env.action_names[0]
    assert [score_description(sections.texts[name], scene) for name in described_sections(form)] in ([1.0], [1.0, 1.0])


def test_the_action_of_a_complete_reply_is_an_example_of_the_game():
  env = types.SimpleNamespace(action_names=(), example_actions=lambda observation: ('push 2', 'pick 3'))
  (reply,) = complete_replies(dataclasses.replace(_SPEC, env=env), _DESCRIBING[0], _SCENES[:1])
  assert read_sections(reply, _DESCRIBING[0]).texts['answer'] == 'push 2'


def _told(caplog, replies, count, limit):
  caplog.clear()
  with caplog.at_level(logging.WARNING):
    warn_if_too_long(_SPEC, replies, count, form='world_modeling', max_response_tokens=limit)
  return [record.getMessage() for record in caplog.records]


def test_each_limit_that_is_too_small_is_named_in_one_line(caplog):
  replies = complete_replies(_SPEC, 'world_modeling', _SCENES)

  def count(reply):
    return len(reply.split()) + 10

  tokens = [count(reply) for reply in replies]
  words = [len(re.sub('<[^>]*>', ' ', reply).split()) for reply in replies]
  assert words[0] < words[1] < words[2] and words[0] <= 20 < words[1]
  over = (
    "envs.Lake.max_words=20: on 2 of 3 levels of Lake, a complete reply of agent.format='world_modeling' has more, up "
    f'to {words[2]} words without reasoning'
  )
  assert _told(caplog, replies, count, tokens[2]) == [over]
  assert _told(caplog, replies, count, tokens[2] - 1) == [
    f'agent.max_response_tokens={tokens[2] - 1}: on 1 of 3 levels of Lake, a complete reply of '
    f"agent.format='world_modeling' has more, up to {tokens[2]} tokens without reasoning",
    over,
  ]
  assert _told(caplog, replies[:1], count, 100) == []
  # A tokenizer with tokens for sentences counts its tokens only.
  assert _told(caplog, replies, lambda reply: 12, 12) == []
  sentences = {replies[0]: words[0], replies[1]: words[1], replies[2]: 5}  # some replies have none of its sentences
  assert _told(caplog, replies, sentences.get, words[1]) == []


def test_a_run_that_checks_its_first_prompts_checks_its_replies(caplog):
  config = load_config('frozenlake_vision_ppo', flag='')
  config.agent.format, config.agent.max_response_tokens = 'world_modeling', 12
  config.train.groups = 8
  policy = build.load_policy(config)
  with caplog.at_level(logging.WARNING):
    build.make_trainer(config, policy).player.check(0)
  (told,) = [r.getMessage() for r in caplog.records if 'complete reply' in r.getMessage()]
  assert re.match(
    r'agent\.max_response_tokens=12: on \d of 8 levels of FrozenLake, a complete reply of .* tokens', told
  )


def _scenes(spec, count):
  states = jax.device_get(jax.jit(jax.vmap(spec.env.reset))(jax.vmap(jax.random.key)(np.arange(count))))
  return spec.env.scenes(states)


def _pieces(text):
  """About as many tokens as those of the pretrained models: words and signs."""
  return len(re.findall(r'\w+|[^\w\s]', text)) + 1


@pytest.mark.parametrize(
  'name',
  [
    'frozenlake_vision_ppo', 'sokoban_vision_ppo', 'vagen_frozenlake', 'vagen_sokoban', 'vagen_navigation',
    'vagen_manipulation',
  ],
)  # fmt: skip
@pytest.mark.slow_cases('sokoban_vision_ppo', 'vagen_manipulation', 'vagen_sokoban', 'vagen_navigation')
def test_shipped_configs_have_room_for_complete_replies_in_every_form(name, caplog):
  config = load_config(name, flag='')
  specs = build.env_specs(config, tuple(config.train.tags), (1,) * len(config.train.tags))
  scenes = [_scenes(spec, 200 if spec.tag == 'FrozenLake' else 4) for spec in specs]
  built_in = config.model.preset in presets.BUILT_IN
  tokenizer = ChatTokenizer(presets.resolve(config.model.preset, ''), images=True) if built_in else None
  for form in _DESCRIBING:

    def count(reply, form=form):
      reply = reply.removeprefix(opening_tags(form))
      return len(tokenizer.encode_once(reply)) + 1 if built_in else _pieces(reply)

    # Some tokens are for the reasoning and for further actions.
    for spec, own in zip(specs, scenes, strict=True):
      with caplog.at_level(logging.WARNING):
        warn_if_too_long(
          spec, complete_replies(spec, form, own), count, form=form,
          max_response_tokens=config.agent.max_response_tokens - 8,
        )  # fmt: skip
  assert not caplog.records
