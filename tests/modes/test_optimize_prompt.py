"""`--mode=optimize_prompt`: programs play with each prompt, a critic writes others, and nothing stored is repeated."""

from __future__ import annotations

import json
import shutil
import subprocess
import types

import pytest

from ragen_jax.modes.optimize_prompt import _critic as _make_critic
from ragen_jax.modes.optimize_prompt import optimize_prompt
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.serving.engine import keys
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.utils.errors import UserError
from tests.support.chat_server import good, server
from tests.support.configs import small_config
from tests.support.paths import ROOT
from tests.support.processes import start_main
from tests.support.prompt_search import quoted_prompt, tagged
from tests.support.serving import PATIENCE, until

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
pytest.importorskip('openai')

_SMALL = {
  'model.preset': 'tiny', 'train.tags': ('Agent',), 'eval.tags': ('Agent',), 'eval.step': 'base', 'serve.port': 0,
  'serve.slots': 2, 'serve.max_concurrency': 2, 'serve.max_attempts': 1, 'agent.max_context': 128,
  'agent.max_response_tokens': 8, 'envs.Agent.runner': f'{ROOT}/tests/support/agents.py:starred',
  'prompt.text': 'Go *\n', 'prompt.rounds': 2, 'prompt.beam': 1, 'prompt.branches': 2, 'prompt.tasks': 1,
  'prompt.attempts': 2, 'prompt.held_out': 2, 'prompt.final': 2, 'prompt.critic_tries': 1, 'prompt.critic_workers': 1,
  'prompt.critic_timeout': 60.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  monkeypatch.setenv('NO_PROXY', '*')
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-not-this-one')
  monkeypatch.setenv('CRITIC_KEY', 'sk-of-the-critic')


def _critic(body):
  """Adds a star to prompts of less than four, and a full stop if the critique saw an odd task."""
  text = body['messages'][-1]['content']
  if '<prompt>' not in text:
    return good(f'Odd: {int(text[text.index("seed") + 7 : text.index(",", text.index("seed"))]) % 2}')
  prompt = quoted_prompt(text)
  return good(tagged(prompt + ('.' if 'Odd: 1' in text else '*')))


def _config(url, **fields):
  return small_config(
    {**_SMALL, 'prompt.critic': url, 'prompt.critic_model': 'script', 'prompt.critic_key': 'CRITIC_KEY', **fields}
  )


def _played(workdir):
  with Store(workdir / 'prompt_search' / 'agents.sqlite') as store:
    return [(r.rollout_id, r.attempts) for r in store.ask(Tables.recent, 2**60, 1000)]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """The folder of a finished search, its results, and what the critic was asked."""
  workdir = tmp_path_factory.mktemp('run')
  with pytest.MonkeyPatch.context() as patch, server([_critic] * 100) as (url, asked):
    patch.setenv('NO_PROXY', '*')
    patch.setenv('CRITIC_KEY', 'sk-of-the-critic')
    result = optimize_prompt(_config(url), str(workdir), given=False)
  return workdir, result, asked


@pytest.mark.slow
def test_a_better_prompt_is_found(found):
  workdir, (now, final), asked = found
  folder = workdir / 'prompt_search'
  assert now.best.text == 'Go ***' and now.best.round == 2 and now.prompts[now.best.parent].text == 'Go **'
  assert [p.text for p in now.prompts[1:]] == ['Go **', 'Go *.', 'Go ***', 'Go **.']
  assert final.differences == pytest.approx([0.2, 0.2])
  assert (folder / 'best_prompt.txt').read_text() == 'Go ***\n'
  written = json.loads((folder / 'prompts.json').read_text())
  assert [p['attempts'] for p in written['prompts']] == [4] * 5
  assert written['best'] == now.best.number and written['final']['difference'] == pytest.approx(0.2)
  assert [row['prompt/best_score'] for row in read_metrics(folder)] == pytest.approx([0.1, 0.2, 0.3])
  assert list(folder.glob('tb/*tfevents*'))
  assert {headers['Authorization'] for _, headers, _ in asked} == {'Bearer sk-of-the-critic'} and len(asked) == 8
  assert asked[0][2]['temperature'] == 1.0 and 'seed' not in asked[0][2]


@pytest.mark.slow
def test_a_finished_search_is_only_read_again(found, tmp_path):
  workdir, result, _ = found
  before = _played(workdir)
  written = {f: (workdir / 'prompt_search' / f).read_bytes() for f in ('prompts.json', 'prompts.md', 'metrics.jsonl')}
  # Another address of the same model is allowed.
  assert optimize_prompt(_config('http://127.0.0.1:9/v1'), str(workdir), given=False) == result
  assert _played(workdir) == before
  assert written == {f: (workdir / 'prompt_search' / f).read_bytes() for f in written}


@pytest.mark.slow
def test_a_search_goes_on_behind_the_last_result(found, tmp_path):
  workdir, result, asked = found
  shutil.copytree(workdir / 'prompt_search', tmp_path / 'prompt_search')
  journal = tmp_path / 'prompt_search' / 'journal.jsonl'
  lines = journal.read_text().splitlines(keepends=True)
  (last_edit,) = [i for i, line in enumerate(lines) if line.startswith('["edit/2/1"')]
  journal.write_text(''.join(lines[:last_edit]))
  with server([_critic] * 9) as (url, again):
    assert optimize_prompt(_config(url), str(tmp_path), given=False) == result
  assert [body for _, _, body in again] == [asked[-1][2]]
  assert _played(tmp_path) == _played(workdir), 'the store holds the attempts whose scores were lost'


@pytest.mark.slow
@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'seed': 1}, r'belongs to another search: seed was 0 and is 1; choose another --workdir'),
    ({'prompt.text': 'Stay'}, r'first prompt was "Go \*" and is "Stay"'),
    ({'prompt.beam': 2}, r'prompt\.beam was 1 and is 2'),
    ({'eval.temperature': 0.25}, r'eval\.temperature was 0\.5 and is 0\.25'),
    ({'eval.first_level': 130}, r'eval\.first_level was 123 and is 130'),
    ({'prompt.critic_model': 'other'}, r'prompt\.critic_model was "script" and is "other"'),
    ({'serve.timeout': 9.0}, r'serve\.timeout was 600\.0 and is 9\.0'),
    ({'model.dtype': 'bfloat16'}, r'model\.dtype was'),
  ],
)
def test_another_search_is_refused_before_anything_is_loaded(found, fields, message):
  workdir, _, _ = found
  with pytest.raises(UserError, match=message):
    optimize_prompt(_config('http://127.0.0.1:9/v1', **fields), str(workdir), given=False)


@pytest.mark.slow
def test_the_same_command_goes_on_after_kill(found, tmp_path):
  workdir, _, asked = found
  journal = tmp_path / 'prompt_search' / 'journal.jsonl'
  flags = {name: value for name, value in _SMALL.items() if not name.endswith('.tags')}
  flags |= {'prompt.critic_model': 'script', 'prompt.critic_key': 'CRITIC_KEY', 'compilation_cache': ''}
  flags |= {'eval.group_size': 1, 'length_step': 256, 'envs.FrozenLake.max_turns': 3}
  with server([_critic] * 100) as (url, requests):
    given = ['--config=configs/agents_ppo.py', '--mode=optimize_prompt', f'--workdir={tmp_path}']
    given += [f'--config.{name}={value}' for name, value in {**flags, 'prompt.critic': url}.items()]
    for results in (2, 6):
      program = start_main(*given, stderr=subprocess.DEVNULL)
      try:
        until(lambda wanted=results: journal.exists() and journal.read_bytes().count(b'\n') > wanted)
      finally:
        program.kill()
        program.wait(PATIENCE)
    program = start_main(*given, stderr=subprocess.PIPE, text=True)
    _, said = program.communicate(timeout=2 * PATIENCE)
  assert program.returncode == 0, said
  written = [json.loads((folder / 'prompt_search' / 'prompts.json').read_text()) for folder in (workdir, tmp_path)]
  assert written[0] == written[1]
  # A request that was in flight when the process ended may be repeated, and no other.
  assert len(asked) <= len(requests) <= len(asked) + 2


@pytest.mark.slow
def test_the_policy_is_its_own_critic(tmp_path):
  """The built-in model writes no prompts, so the first one stays; what it writes follows from the seed."""
  small = {'prompt.rounds': 1, 'prompt.branches': 1, 'prompt.held_out': 1, 'prompt.final': 1}
  small |= {'agent.max_context': 4096, 'prompt.shown_chars': 1000, 'eval.top_k': 0}
  now, final = optimize_prompt(small_config({**_SMALL, **small}), str(tmp_path), given=False)
  lines = (tmp_path / 'prompt_search' / 'journal.jsonl').read_text().splitlines()
  replies = [value['reply'] for key, value in map(json.loads, lines[1:]) if key.startswith(('critique', 'edit'))]
  assert replies and all(isinstance(reply, str) for reply in replies)
  assert len(now.prompts) == 1 and sum(now.rejected.values()) == 1 and final.best == final.first
  assert (tmp_path / 'prompt_search' / 'best_prompt.txt').read_text() == 'Go *\n'


@pytest.mark.parametrize(('host', 'key'), [('127.0.0.1', None), ('0.0.0.0', 'Bearer key-of-the-admin')])
def test_the_policy_as_critic_is_asked_by_its_name_with_the_seed_and_never_with_another_key(host, key):
  config = small_config({**_SMALL, 'serve.host': host, 'seed': 5, 'serve.model': 'ours'})
  with server([]) as (url, asked):
    own = types.SimpleNamespace(url=url.removesuffix('/v1'), admin_key='key-of-the-admin')
    assert _make_critic(config, own).replies([[{'role': 'user', 'content': 'a'}]]) == ['Up']
  _, headers, body = asked[0]
  assert headers.get('Authorization') == key
  longest = config.agent.max_response_tokens
  assert (body['model'], body['temperature'], body['max_tokens']) == ('ours', 1.0, longest)
  assert body['seed'] == keys.critic_seed(5)


def test_what_cannot_be_run(tmp_path):
  with pytest.raises(UserError, match=r'^eval\.step='):
    optimize_prompt(_config('', **{'eval.step': 'none', 'prompt.critic_model': ''}), str(tmp_path), given=False)
  with pytest.raises(UserError, match=r'there is no checkpoint in it'):
    config = _config('', **{'eval.step': 'best', 'prompt.critic_model': ''})
    optimize_prompt(config, str(tmp_path), given=False)
