"""The examples of docs/mcp.md, as they stand there."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import pathlib
import re
import sys

import pytest

from ragen_jax.build_environments import env_specs
from ragen_jax.envs.dataset import mcp_tools
from ragen_jax.envs.dataset.mcp_tools import McpSettings
from ragen_jax.envs.dataset.tool_use import make_toolbox
from tests.support.paths import ROOT

PAGE = (ROOT / 'docs' / 'mcp.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
FILES = {block.split('\n')[0].removeprefix('# '): block for block in BLOCKS if block.startswith('# ')}


@pytest.fixture
def env(tmp_path, monkeypatch):
  """The environment of the page's config, with its files in the current folder."""
  for path, text in FILES.items():
    (tmp_path / path).write_text(text, encoding='utf-8')
  question = {'question': 'How many euros are 20 dollars?', 'answer': 18}
  (tmp_path / 'questions.jsonl').write_text(json.dumps(question), encoding='utf-8')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  config = importlib.import_module('my_mcp').get_config()
  config.envs.Dataset.split = 'all'
  (spec,) = env_specs(config, ('Dataset',), (1,))
  yield spec.env
  del sys.modules['my_mcp']
  mcp_tools.shared_server.cache_clear()


def table(first_header):
  """The rows of the page's table whose first header is this."""
  lines = PAGE[PAGE.index(f'| {first_header} |') :].split('\n\n')[0].strip().split('\n')[2:]
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]


def test_the_page_s_config_names_the_program(env):
  assert env.tools == ('mcp:python my_mcp_server.py',) and env.tool_options['search']['retriever'] == ''


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('mcp') is None, reason='mcp is not installed: requirements-data.txt')
def test_the_page_s_episode_is_played(env, monkeypatch):
  monkeypatch.setenv('PATH', str(pathlib.Path(sys.executable).parent), prepend=':')
  env.check()
  written = re.sub('^ {11}', '', PAGE, flags=re.MULTILINE)
  assert env.rules() in written
  session = env.open(1)
  session.reset([0], [0], [0])
  ((told, _, done, _),) = session.step([0], ['convert[{"amount": 20, "source": "USD"}]'])
  assert not done and f'\n{told}\n' in written
  ((_, reward, done, _),) = session.step([0], ['finish[18]'])
  assert (reward, done) == (1.0, True)
  for tool in env._toolbox.tools.values():
    tool.server.close()


def test_the_page_s_options_are_all_options_with_their_defaults():
  section = ast.literal_eval(next(block for block in BLOCKS if block.startswith('{')))
  assert make_toolbox(section['tools'], section['tool_options']) is not None
  rows = [(names.replace('`', ''), default.strip('`')) for names, default, _ in table('Option')]
  own = {n: d for names, default in rows if 'NAME' not in names for n, d in _pairs(names, default)}
  fields = {field.name: field.default for field in dataclasses.fields(McpSettings)}
  assert {name: ast.literal_eval(value) for name, value in own.items()} == fields


def _pairs(names, defaults):
  names = names.split(', ')
  return zip(names, defaults.split(', ') if len(names) > 1 else [defaults], strict=True)


def test_the_page_s_bad_input_is_refused_as_it_says(monkeypatch):
  monkeypatch.setattr(mcp_tools.importlib.util, 'find_spec', lambda name: name)
  for value, error in table('Value'):
    assignment = ast.parse(value.strip('`')).body[0]
    options = {assignment.targets[0].id: ast.literal_eval(assignment.value)}
    with pytest.raises(ValueError, match=f'^{re.escape(error.strip("`"))}$'):
      made = make_toolbox(options.get('tools', ()), options.get('tool_options', {}))
      made.check()
