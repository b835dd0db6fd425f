"""Objects are found by their import path; a wrong path gives one line. What is not needed is not imported."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from ragen_jax.models import presets
from ragen_jax.utils.imports import hidden, import_function, import_object
from tests.support.environments import raises_one_line


def test_objects_are_imported_by_their_path():
  assert import_object('type', 'json:JSONDecoder.decode') is __import__('json').JSONDecoder.decode
  assert import_function('reward', 'math:sqrt') is math.sqrt
  for path, message in (
    ('math.sqrt', "^reward='math.sqrt'; allowed: 'package.module:name' or 'file.py:name'$"),
    ('math:', "^reward='math:'; allowed: 'package"),
    (3, "^reward=3; allowed: 'package"),
    ('math:no', r"^reward='math:no' cannot be imported \(AttributeError: .*\); allowed: what Python can import$"),
    ('no_such_module:x', r"^reward='no_such_module:x' cannot be imported \(ModuleNotFoundError"),
    ('math:pi', "^reward='math:pi' is float; allowed: a function$"),
  ):
    with raises_one_line(message):
      import_function('reward', path)


def test_a_module_that_exits_when_it_is_imported_is_an_option_that_cannot_be_used(tmp_path, monkeypatch):
  (tmp_path / 'leaves_at_once.py').write_text('raise SystemExit(4)')
  monkeypatch.syspath_prepend(tmp_path)
  with raises_one_line(r"type='leaves_at_once:Game' cannot be imported \(SystemExit: 4\)"):
    import_object('type', 'leaves_at_once:Game')


def test_a_file_is_run_once_and_again_if_it_failed(tmp_path):
  path = tmp_path / 'my agent.py'
  path.write_text('raise RuntimeError("not yet")')
  with raises_one_line(r"^agent='.*/my agent.py:play' cannot be imported \(RuntimeError: not yet\)"):
    import_function('agent', f'{path}:play')
  path.write_text('class Agent:\n  def play(self): pass\n')
  assert import_object('agent', f'{path}:Agent.play') is import_object('agent', f'{path}:Agent').play
  with raises_one_line(r"^agent='.*/none.py:play' cannot be imported \(FileNotFoundError"):
    import_function('agent', f'{tmp_path}/none.py:play')


def test_hidden_modules_can_be_imported_again_afterwards(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'a_library_for_one_type.py').write_text('found = True')
  with hidden('a_library_for_one_type', 'json'):
    with pytest.raises(ImportError):
      import a_library_for_one_type
    assert __import__('json') is sys.modules['json']  # imported before
  import a_library_for_one_type

  assert a_library_for_one_type.found
  assert 'json' in sys.modules


@pytest.mark.slow
def test_training_does_not_import_what_it_uses_nothing_of(tmp_path):
  for name in ('torch', 'boto3'):
    (tmp_path / f'{name}.py').write_text('raise SystemExit("imported")')
  (tmp_path / 'google' / 'cloud').mkdir(parents=True)
  (tmp_path / 'google' / 'cloud' / 'storage.py').write_text('raise SystemExit("imported")')
  # transformers imports a module without metadata, only to learn its version
  (tmp_path / 'torch-2.13.0.dist-info').mkdir()
  (tmp_path / 'torch-2.13.0.dist-info' / 'METADATA').write_text('Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n')
  code = f"""
import ragen_jax.train, sys
assert 'transformers' not in sys.modules
from ragen_jax.agent.chat import ChatTokenizer
ChatTokenizer({str(presets.resolve('tiny', ''))!r})
"""
  environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
  subprocess.run([sys.executable, '-c', code], env=environment, check=True, timeout=200)
