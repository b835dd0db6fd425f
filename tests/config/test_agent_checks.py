"""Checks of the sections `serve` and `prompt`."""

from __future__ import annotations

import pytest

from configs import default
from ragen_jax.build_agents import initial_prompt
from ragen_jax.config.agent_checks import check_prompt, check_prompt_search, check_serve
from ragen_jax.config.checks import check_config
from ragen_jax.runs.config_fields import flatten, read_by_prompt_search
from ragen_jax.utils.errors import UserError
from tests.support.configs import assert_refused, small_config

_AGENT = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}
_AHEAD = {**_AGENT, 'serve.max_staleness': 2, 'algorithm.old_logprobs': 'trainer', 'algorithm.tis_cap': 2.0}
_RUNNER = {**_AGENT, 'envs.Agent.runner': 'env:FrozenLake'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'serve.host': ''}, r"^serve\.host='': must be an address such as '127\.0\.0\.1'$"),
    ({'serve.host': ' a'}, r"^serve\.host=' a': "),
    ({'serve.port': -1}, r'^serve\.port=-1: must be from 0, any free port, to 65535$'),
    ({'serve.port': 65536}, r'^serve\.port=65536: '),
    ({'serve.model': ''}, r"^serve\.model='': must be letters, digits"),
    ({'serve.model': 'a:b'}, r"^serve\.model='a:b': "),
    ({'serve.model': 'gpt-4'}, r"^serve\.model='gpt-4': .* must not begin like a name of OpenAI's models$"),
    ({'serve.model': 'o3-mini'}, r"^serve\.model='o3-mini': "),
    ({'serve.slots': 0}, r'^serve\.slots=0: must be at least 1$'),
    *(
      ({f'serve.{name}': 0}, rf'^serve\.{name}=0: must be at least 1$')
      for name in ('max_attempts', 'max_queue', 'max_connections', 'max_body', 'max_concurrency', 'image_tokens')
    ),
    ({'serve.heartbeat': -1.0}, r'^serve\.heartbeat=-1\.0: must be at least 0$'),
    ({'serve.keep': 0.0}, r'^serve\.keep=0\.0: must be above 0$'),
    ({'serve.max_images': -1}, r'^serve\.max_images=-1: must be at least 0$'),
    ({'serve.grace': -1.0}, r'^serve\.grace=-1\.0: must be at least 0$'),
    ({'serve.timeout': 0.0}, r'^serve\.timeout=0\.0: '),
    ({'serve.trained': '('}, r"^serve\.trained='\(': must be a regular expression \(.*\)$"),
    ({'serve.frozen': ('a',)}, r"^serve\.frozen=\('a',\): entries must be 'AGENTS=MODEL', such as 'critic=base'$"),
    ({'serve.frozen': ('a=no/run@3',)}, r"^serve\.frozen: 'no/run@3': workdir no/run holds no run"),
    (
      {'serve.frozen': ('a|b=base',)},
      r"^serve\.trained='\.\*': must not match the frozen agent 'a' \(serve\.frozen=\('a\|b=base',\)\)$",
    ),
    ({'serve.frozen': ('w.*=base',), 'serve.trained': 'a|walker'}, r"must not match the frozen agent 'walker'"),
    ({'serve.frozen': ('=base',), 'serve.trained': 'a|'}, r"must not match the frozen agent ''"),
    ({'serve.incomplete': 'guess'}, r"^serve\.incomplete='guess': .*drop"),
    ({'serve.bad_calls': 'guess'}, r"^serve\.bad_calls='guess': .*content"),
    ({**_AGENT, 'eval.tags': ('Agent', 'FrozenLake')}, r"Agent of the type 'agent' cannot be mixed with FrozenLake$"),
    ({**_AGENT, 'eval.greedy_too': True, 'eval.temperature': 0.0}, r'^eval\.greedy_too=True: '),
    ({**_AGENT, 'filter.max_rollouts': 2}, r'^filter\.max_rollouts=2: must be 1 if agent programs play$'),
    (
      {**_AGENT, 'algorithm.replay_experts': True},
      r'^algorithm\.replay_experts=True: must be False if agent programs play: calls do not record experts$',
    ),
    ({'serve.max_staleness': -1}, r'^serve\.max_staleness=-1: must be at least 0$'),
    (
      {'serve.max_staleness': 1},
      r'^serve\.max_staleness=1: must be 0 unless agent programs play \(envs\.TAG\.type=',
    ),
    ({**_AHEAD, 'algorithm.tis_cap': 0.0}, r'^serve\.max_staleness=2: above 0 needs algorithm\.tis_cap above 0, with'),
    ({**_AHEAD, 'train.online_k': 3}, r'^serve\.max_staleness=2: must be 0 with train\.online_k=3$'),
    ({**_AHEAD, 'replay.groups': 4}, r'^serve\.max_staleness=2: must be 0 with replay\.groups=4$'),
    (
      {**_AHEAD, 'monitor.echo_trap': 'rollback'},
      r"^serve\.max_staleness=2: must be 0 with monitor\.echo_trap='ro",
    ),
    (
      {**_RUNNER, 'envs.Agent.runner': 'env:Agent'},
      r"^envs\.Agent\.runner='env:Agent': env:TAG names an environment",
    ),
    ({**_RUNNER, 'envs.Agent.runner': 'env:None'}, r"^envs\.Agent\.runner='env:None': env:TAG names an environment"),
    ({**_RUNNER, 'envs.FrozenLake.max_turns': 0}, r'^envs\.FrozenLake\.max_turns=0: must be a whole number'),
    (
      {**_RUNNER, 'envs.Agent.tasks': 'x.jsonl'},
      r"^envs\.Agent\.tasks='x\.jsonl': must be '' with envs\.Agent\.runner=",
    ),
    (
      {**_RUNNER, 'serve.trained': 'walker'},
      r"^serve\.trained='walker': must match '', the name of the agent of envs\.Agent\.runner='env:FrozenLake'$",
    ),
    (
      {**_RUNNER, 'envs.Agent.max_turns': 2},
      r'^envs\.Agent\.max_turns=2: must be at least envs\.FrozenLake\.max_turns=3$',
    ),
  ],
)
def test_what_is_refused(fields, message):
  assert_refused(check_serve, small_config(fields), message)


def test_what_is_allowed():
  check_serve(default.get_config())
  check_serve(small_config(_AGENT))
  check_serve(small_config(_AHEAD))
  check_serve(small_config(_RUNNER))
  check_serve(small_config({**_RUNNER, 'serve.trained': 'walker|'}))
  check_serve(small_config({**_AHEAD, 'serve.max_staleness': 0, 'algorithm.tis_cap': 0.0, 'train.online_k': 3}))
  check_serve(small_config({'serve.frozen': ('b|c=base', 'd.*=tiny'), 'serve.trained': 'a|'}))
  check_serve(small_config({'serve.model': 'Qwen/Qwen2.5-0.5B_x', 'serve.port': 0, 'serve.trained': 'a|b|'}))


def test_programs_play_in_one_process(monkeypatch):
  config = small_config(_AGENT)
  check_serve(config)
  monkeypatch.setattr('jax.process_count', lambda: 2)
  message = r"^train\.tags=\('Agent',\): agent programs play in runs of one process, and there are 2$"
  with pytest.raises(UserError, match=message):
    check_serve(config)
  check_serve(small_config())


_PLAYED = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}
_SEARCH = {**_PLAYED, 'prompt.text': 'Go {where}'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'prompt.text': 'Go'}, r"^prompt\.text='Go': is for agent programs; must be empty unless train\.tags are"),
    (
      {**_PLAYED, 'prompt.text': 'Go', 'envs.Agent.runner': 'env:FrozenLake'},
      r"^prompt\.text='Go': is not read by envs\.Agent\.runner='env:FrozenLake', whose prompts are those of",
    ),
    ({**_PLAYED, 'prompt.text': 'Go', 'prompt.file': 'x'}, r"^prompt\.file='x': must be empty with prompt\.text$"),
    ({**_PLAYED, 'prompt.text': 'a\udcff'}, r"^prompt\.text='a\\udcff': is not Unicode text$"),
    ({**_PLAYED, 'prompt.file': 'no/such'}, r"^prompt\.file='no/such': cannot be read \(No such file or directory\)$"),
  ],
)
def test_prompts_that_are_refused(fields, message):
  assert_refused(check_prompt, small_config(fields), message)
  assert_refused(check_config, small_config(fields), message)


def test_a_prompt_of_a_file(tmp_path):
  path = tmp_path / 'prompt.txt'
  path.write_text('\n Gö on.\nWin.\n\n', encoding='utf-8')
  config = small_config({**_PLAYED, 'prompt.file': str(path)})
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


def test_searches_that_are_allowed():
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
