"""What cannot be served is refused in one line."""

from __future__ import annotations

import pytest

from configs import default
from ragen_jax.config.serve_checks import check_serve
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
      for name in ('max_attempts', 'max_queue', 'max_connections', 'max_body', 'max_concurrency')
    ),
    ({'serve.heartbeat': -1.0}, r'^serve\.heartbeat=-1\.0: must be at least 0$'),
    ({'serve.keep': 0.0}, r'^serve\.keep=0\.0: must be above 0$'),
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
