"""Shipped configs are found by name, in a checkout and in an installed package."""

from __future__ import annotations

import pytest

from ragen_jax.config import shipped
from tests.support.paths import ROOT
from tests.support.processes import environment, run_python


def test_shipped_names_are_the_files_with_a_config():
  files = {path.stem for path in (ROOT / 'configs').glob('*.py') if 'def get_config' in path.read_text()}
  assert set(shipped.names()) == files


def test_a_file_comes_before_a_shipped_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert shipped.find_file('default') == str(ROOT / 'configs' / 'default.py')
  (tmp_path / 'default').write_text('')
  assert shipped.find_file('default') == 'default' and shipped.find_file('none') is None


_ELSEWHERE = """
import os, sys
sys.path[0] = ''
from ragen_jax.config import command_line
for folder, value in zip(sys.argv[1::2], sys.argv[2::2]):
  if not os.fork():  # a process for each, which has imported no configs
    os.chdir(folder)
    config = command_line.load_config(value)
    print(config.num_iterations, config.seed, 'configs' in sys.modules, flush=True)
    os._exit(0)
  os.wait()
"""


def _outside(tmp_path, *given):
  """Loads configs, (folder, name), as an installed package does, with the folder `configs` inside of the package."""
  package = tmp_path / 'site' / 'ragen_jax'
  package.mkdir(parents=True)
  for path in (*(ROOT / 'ragen_jax').iterdir(), ROOT / 'configs'):
    (package / path.name).symlink_to(path)
  arguments = [str(x) for case in given for x in case]
  result = run_python(_ELSEWHERE, *arguments, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path / 'site')))
  return result.stdout.splitlines() or result.stderr


@pytest.mark.slow
def test_config_files_import_shipped_configs_from_any_folder(tmp_path):
  own, other = tmp_path / 'own', tmp_path / 'other'
  # A folder of the user's with the same name is left to the user's files, and does not disturb the shipped ones.
  (other / 'configs').mkdir(parents=True)
  (other / 'configs' / '__init__.py').touch()
  (other / 'configs' / 'default.py').write_text('raise RuntimeError')
  (other / 'configs' / 'frozenlake_ppo.py').write_text(
    'import ragen_jax\n\n\ndef get_config(model=""):\n'
    '  return ragen_jax.load_config("sokoban_ppo", {"num_iterations": 1})\n'
  )
  own.mkdir()
  for folder in (own, other):
    (folder / 'own.py').write_text(
      'from configs import frozenlake_ppo\n\n\ndef get_config(model=""):\n'
      '  config = frozenlake_ppo.get_config(model)\n  config.seed = 7\n  return config\n'
    )
  given = (own, 'frozenlake_ppo'), (own, 'own.py:qwen3-4b'), (other, 'frozenlake_ppo'), (other, 'own.py')
  assert _outside(tmp_path, *given) == ['40 0 False', '200 7 False', '40 0 False', '1 7 True']
