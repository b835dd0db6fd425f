"""Tags with limits and a request of their own, beside others in one batch."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax import api, build
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.endpoint_client import EndpointClient, EndpointSettings
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.config.checks import check_config
from ragen_jax.envs.spec import OPTIONAL
from ragen_jax.planning.abstract import prompt_room
from ragen_jax.planning.program_list import of_sampler
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.sft.data import DemonstrationSettings, Lesson, collect_demonstrations
from ragen_jax.sft.demonstrations import DemonstrationStyle
from ragen_jax.utils.errors import UserError
from tests.support.chat_server import server
from tests.support.configs import small_config
from tests.support.experts import expert_spec
from tests.support.speakers import context_settings, limits

TAGS = ('FrozenLake', 'CoordFrozenLake')


def _config(**fields):
  budget = {f'envs__{tag}__{name}': 2 for tag in TAGS for name in ('max_turns', 'max_actions', 'max_actions_per_turn')}
  sizes = {'agent__max_response_tokens': 24, 'agent__max_context': 512, 'length_step': 128, 'train__groups': 4}
  return small_config(**budget | sizes | {'train__tags': TAGS, 'eval__tags': TAGS} | fields)


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(_config())


def _play(policy, **fields):
  config = _config(**fields)
  check_config(config, weights=False)
  specs = build.env_specs(config, TAGS, (2, 2))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 2)
  # Flat enough that most replies run into their limit.
  speaker = SamplerSpeaker(policy.sampler, param_state(policy.model), jax.random.key(0), Sampling(3.0, 1.0, 0))
  return proxy.rollout(speaker, 10_000)


@pytest.mark.parametrize('schedule', [pytest.param('lockstep', marks=pytest.mark.slow), 'continuous'])
@pytest.mark.slow_cases('continuous')
@pytest.mark.exhaustive_cases('lockstep')
def test_replies_end_at_the_limit_of_their_own_tag(policy, schedule):
  chunk = 8 if schedule == 'continuous' else 32
  fields = {'agent__schedule': schedule, 'agent__decode_chunk': chunk, 'length_step': 512}  # one size of the cache
  whole = _play(policy, **fields)
  own = _play(policy, **fields, envs__CoordFrozenLake__max_response_tokens=5)
  for tag, most in zip(TAGS, (24, 5), strict=True):
    lengths = [turn.tokens for e in own.episodes if e.tag == tag for turn in e.turns]
    assert max(lengths) == most  # some run into it
  long = [turn.tokens for e in whole.episodes if e.tag == TAGS[1] for turn in e.turns]
  assert max(long) == 24
  # The other tag's first replies are not changed, and the shortened ones begin as the whole ones.
  for a, b in zip(whole.episodes, own.episodes, strict=True):
    assert a.turns[0].ids[: len(b.turns[0].ids)] == b.turns[0].ids
    assert a.tag == TAGS[1] or a.turns[0].ids == b.turns[0].ids
  cut = [turn for e in own.episodes if e.tag == TAGS[1] for turn in e.turns if not turn.closed]
  assert cut and all(len(turn.ids) == 5 for turn in cut)


def test_prompts_have_the_room_that_the_own_limit_leaves(tiny):
  specs = build.env_specs(_config(envs__CoordFrozenLake__max_response_tokens=5), TAGS, (1, 1))
  context = ContextManager(tiny, specs, context_settings())
  count = len(context.first_prompt(1, 'board', 2).ids)
  for room in (5, 4):
    bounds = limits(max_response_tokens=24, max_context=count + room)
    assert bounds.of(specs[1]).room == count + room - 5 and bounds.of(specs[0]) == bounds
    if room == 5:
      context.check_first_prompt(1, 'board', 2, bounds)
      continue
    with pytest.raises(UserError, match=rf'a first prompt of CoordFrozenLake and its reply need {count} \+ 5 tokens$'):
      context.check_first_prompt(1, 'board', 2, bounds)


def test_the_plan_has_the_programs_of_the_longest_prompts():
  usual, own = _config(), _config(envs__CoordFrozenLake__max_response_tokens=4)
  assert (prompt_room(usual), prompt_room(own)) == (512 - 24, 512 - 4)
  found = [{*of_sampler(c, 1, {'rollout': 8, 'evaluation': 8})} for c in (usual, own)]
  assert found[0] <= found[1]
  widths = [max(shape[3] for name, shape in part if name == 'extend') for part in found]
  assert widths[1] >= 508 > 0 and widths[0] >= 488


def test_a_request_of_a_tag_replaces_that_of_the_run(tiny):
  specs = build.env_specs(_config(envs__CoordFrozenLake__request='Up to {max_words}: {form}'), TAGS, (1, 1))
  context = ContextManager(tiny, specs, context_settings())
  usual, own = (context.messages(env, [], 'P', 2)[-1]['content'] for env in (0, 1))
  assert 'Answer as <think>' in usual and own.endswith(
    f'Up to {specs[1].max_words}: <think>your thoughts</think><answer>your actions</answer>'
  )


@pytest.mark.parametrize(
  ('field', 'value', 'told'),
  [
    ('max_response_tokens', 25, 'must be 0 or a whole number of at most agent.max_response_tokens=24'),
    ('max_response_tokens', -1, 'must be 0 or a whole number of at most agent.max_response_tokens=24'),
    ('max_response_tokens', 2.0, 'must be 0 or a whole number of at most agent.max_response_tokens=24'),
    ('max_response_tokens', True, 'must be 0 or a whole number of at most agent.max_response_tokens=24'),
    ('max_observation_tokens', 31, 'must be 0 for no cut, or a whole number of at least 32'),
    ('max_observation_tokens', -32, 'must be 0 for no cut, or a whole number of at least 32'),
    ('request', 7, 'must be text'),
    ('request', 'Say {words}', 'allowed: text, with {form}, {example}, {actions}, {max_words} where'),
    ('request', 'Say {', "Single '{' encountered in format string; allowed: text"),
  ],
)
def test_wrong_values_are_refused_in_one_line(field, value, told):
  config = _config()
  with config.envs.CoordFrozenLake.ignore_type():
    config.envs.CoordFrozenLake[field] = value
  with pytest.raises(UserError) as error:
    build.env_specs(config, TAGS, (1, 1))
  assert str(error.value).startswith(f'envs.CoordFrozenLake.{field}={value!r}: {told}') and '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('field', 'value'), [('max_response_tokens', 5), ('max_observation_tokens', 40), ('request', 'x')]
)
def test_tasks_of_programs_have_no_limits_of_their_own(field, value):
  config = _config()
  config.envs.Agent[field] = value
  with pytest.raises(UserError, match=rf'^envs\.Agent\.{field}={value!r}: must be {OPTIONAL[field]!r}, since programs'):
    build.env_specs(config, ('Agent',), (1,))


def test_an_environment_without_the_fields_has_those_of_the_run():
  config = _config()
  for name in OPTIONAL:
    del config.envs.FrozenLake[name]
  (spec,) = build.env_specs(config, ('FrozenLake',), (1,))
  assert {name: getattr(spec, name) for name in OPTIONAL} == OPTIONAL
  api.train_on(config, {'Mine': api.make_env('bandit')})
  assert {name: config.envs.Mine[name] for name in OPTIONAL} == OPTIONAL


def test_demonstrations_that_could_not_be_sampled_are_left_out(tiny):
  style = DemonstrationStyle(discount=1.0, noise=0.0, hurry=0.0, beginner=0.0, timid=0.0, actions_per_turn=0)
  settings = DemonstrationSettings(1, 0)

  def rows(most: int) -> np.ndarray:
    spec = dataclasses.replace(expert_spec(5), max_response_tokens=most)
    lesson = Lesson(spec, ContextManager(tiny, [spec], context_settings()), limits(max_turns=3), 0)
    t = collect_demonstrations([lesson], style, settings, frozenset(), None)[0].trajectory
    return t.loss_mask.sum(axis=1)

  whole = rows(0)
  most = int(np.sort(whole)[1])
  assert len(whole) == 5 and 0 < len(rows(most)) < 5 and rows(most).max() <= 2 * most


def test_a_server_is_asked_for_the_lower_limit():

  with server([]) as (url, asked):
    for own, most in ((64, 0), (64, 5), (4, 5), (0, 5), (0, 0)):
      fields = EndpointSettings(
        endpoint=url, endpoint_model='m', endpoint_max_tokens=own, endpoint_timeout=60.0, endpoint_workers=1,
        endpoint_tries=1,
      )  # fmt: skip
      EndpointClient(fields, Sampling(1.0, 1.0, 0), 'k', None, 'f').request([{'role': 'user', 'content': 'x'}], most)
  assert [body.get('max_tokens') for _, _, body in asked] == [64, 5, 4, 5, None]
