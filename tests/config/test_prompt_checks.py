"""Prompts, and searches for prompts, that cannot be used are refused in one line."""

from __future__ import annotations

import pytest

from configs import default
from ragen_jax.build_agents import initial_prompt
from ragen_jax.config.checks import check_config
from ragen_jax.config.prompt_checks import check_prompt, check_prompt_search
from ragen_jax.runs.config_fields import flatten, read_by_prompt_search
from tests.support.configs import assert_refused, small_config

_AGENT = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}
_SEARCH = {**_AGENT, 'prompt.text': 'Go {where}'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'prompt.text': 'Go'}, r"^prompt\.text='Go': is for agent programs; must be empty unless train\.tags are"),
    (
      {**_AGENT, 'prompt.text': 'Go', 'envs.Agent.runner': 'env:FrozenLake'},
      r"^prompt\.text='Go': is not read by envs\.Agent\.runner='env:FrozenLake', whose prompts are those of",
    ),
    ({**_AGENT, 'prompt.text': 'Go', 'prompt.file': 'x'}, r"^prompt\.file='x': must be empty with prompt\.text$"),
    ({**_AGENT, 'prompt.text': 'a\udcff'}, r"^prompt\.text='a\\udcff': is not Unicode text$"),
    ({**_AGENT, 'prompt.file': 'no/such'}, r"^prompt\.file='no/such': cannot be read \(No such file or directory\)$"),
  ],
)
def test_prompts_that_are_refused(fields, message):
  assert_refused(check_prompt, small_config(fields), message)
  assert_refused(check_config, small_config(fields), message)


def test_a_prompt_of_a_file(tmp_path):
  path = tmp_path / 'prompt.txt'
  path.write_text('\n Gö on.\nWin.\n\n', encoding='utf-8')
  config = small_config({**_AGENT, 'prompt.file': str(path)})
  check_prompt(config)
  assert initial_prompt(config) == 'Gö on.\nWin.'
  path.write_bytes(b'\xff\xfe')
  assert_refused(check_prompt, config, r'^prompt\.file=.*: is not UTF-8$')
  assert_refused(check_prompt, small_config({'prompt.file': str(path)}), r'^prompt\.file=')


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'train.tags': ('FrozenLake',), 'eval.tags': ('FrozenLake',)}, r"^train\.tags=.*: must be of the type 'agent'"),
    ({'eval.step': 'none'}, r"^eval\.step='none': must name a model"),
    ({'prompt.text': ' \n'}, r"^prompt\.text=' \\n': must be the first prompt, unless prompt\.file has it$"),
    ({'prompt.max_chars': 9}, r'^prompt\.max_chars=9: the first prompt has 10 characters already$'),
    ({'prompt.shown_chars': 999}, r'^prompt\.shown_chars=999: must be at least 1000$'),
    ({'prompt.critic_temperature': -0.1}, r'^prompt\.critic_temperature=-0\.1: '),
    ({'prompt.critic_max_tokens': -1}, r'^prompt\.critic_max_tokens=-1: '),
    ({'prompt.critic_timeout': 0.0}, r'^prompt\.critic_timeout=0\.0: must be above 0, in seconds$'),
    ({'prompt.critic': 'localhost'}, r"^prompt\.critic='localhost': must be an address"),
    ({'prompt.critic': 'http://u:p@host/v1'}, r'^prompt\.critic=.*: must be an address'),
    ({'prompt.critic': 'http://host/v1'}, r"^prompt\.critic_model='': must name a model of prompt\.critic='http"),
    ({'prompt.critic_model': 'm'}, r"^prompt\.critic_model='m': .* must be empty without an address$"),
    ({'prompt.critic_key': 'sk-123'}, r"^prompt\.critic_key='sk-123': must be the name of an environment variable$"),
    ({'prompt.held_out': 20_000}, r'^prompt\.held_out=20000: held-out task \d+ of Agent is the same as training task'),
    *[
      ({f'prompt.{name}': 0}, rf'^prompt\.{name}=0: must be at least 1$')
      for name in ('rounds', 'beam', 'branches', 'tasks', 'attempts', 'held_out', 'final', 'critic_workers')
    ],
    ({'prompt.critic_tries': 0}, r'^prompt\.critic_tries=0: '),
    ({'prompt.max_chars': 0}, r'^prompt\.max_chars=0: must be at least 1$'),
  ],
)
def test_searches_that_are_refused(fields, message):
  assert_refused(check_prompt_search, small_config({**_SEARCH, **fields}), message)


def test_what_is_allowed():
  check_prompt(default.get_config())
  check_prompt_search(small_config(_SEARCH))
  critic = {'prompt.critic': 'https://host:80/v1', 'prompt.critic_model': 'm', 'prompt.max_chars': 10}
  check_prompt_search(small_config({**_SEARCH, **critic}))


def test_every_field_of_a_search_is_compared_or_free():
  """A field of `prompt` that may change when a search goes on is named here."""
  config = default.get_config().to_dict()
  read = read_by_prompt_search(config)
  free = {name for name in flatten(config) if name.startswith('prompt.') and name not in read}
  assert free == {f'prompt.{name}' for name in (
    'text', 'file', 'critic', 'critic_key', 'critic_timeout', 'critic_workers', 'critic_tries'
  )}  # fmt: skip
  assert read.keys() >= {
    'seed', 'eval.tags', 'eval.first_level', 'eval.top_p', 'train.tags', 'train.first_level', 'model.path',
    'envs.FrozenLake.p', 'serve.success_score', 'agent.max_response_tokens',
  }  # fmt: skip
  others = {'optimizer.actor_lr', 'eval.groups', 'eval.every', 'serve.slots', 'serve.port', 'train.groups'}
  assert not others & read.keys()
  assert not any(name.startswith('envs.') and not name.startswith('envs.FrozenLake.') for name in read)
