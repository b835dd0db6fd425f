"""The examples of docs/openenv.md, as they stand there; the server is played in envs/outside/test_openenv.py."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ragen_jax.build_environments import env_specs
from ragen_jax.envs.outside.openenv import OpenEnvEnvironment
from tests.support.paths import ROOT

PAGE = (ROOT / 'docs' / 'openenv.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
FILES = {block.split('\n')[0].removeprefix('# '): block for block in BLOCKS}


def server_file() -> str:
  """The page's server."""
  return FILES['guess_server.py']


def test_the_page_s_config_makes_its_environment():
  pytest.importorskip('websockets', reason='pip install -r requirements-openenv.txt')
  names = {}
  exec(FILES['guess_config.py'], names)
  config = names['get_config']()
  (spec,) = env_specs(config, config.train.tags, (config.train.groups,))
  assert isinstance(spec.env, OpenEnvEnvironment) and spec.actions_a_turn == 1


def test_the_page_has_every_option_and_its_default():
  rows = re.findall(r'^\| (`[a-z_`, ]+`) \| ([^|]*) \|', PAGE, re.MULTILINE)
  told = {}
  for names, defaults in rows:
    for name, default in zip(re.findall(r'`(\w+)`', names), defaults.split(', '), strict=True):
      told[name] = default.strip('`')
  others = {'system', 'state_label', 'counts_turns', 'url'}
  fields = dataclasses.fields(OpenEnvEnvironment)
  defaults = {field.name: field.default_factory() if field.name == 'options' else field.default for field in fields}
  assert told == {name: repr(value) for name, value in defaults.items() if name not in others}
