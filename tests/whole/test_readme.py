"""README's commands are those that CI runs, and what they install is what README promises."""

import re

import pytest

from tests.support.paths import ROOT

TRAIN = 'pip install -r requirements.txt && python main.py --config=configs/frozenlake_ppo.py'
TEST = 'pip install -r requirements.txt -r requirements-dev.txt && python -m pytest'


def lines(path: str) -> list[str]:
  """The file's lines, without the blanks around them."""
  return [line.strip() for line in (ROOT / path).read_text(encoding='utf-8').splitlines()]


def requirements(path: str) -> list[str]:
  """The requirements in a file, without its comments."""
  return [line for line in lines(path) if line and not line.startswith('#')]


@pytest.mark.parametrize('command', [TRAIN, TEST])
def test_readme_has_the_command_on_a_line_of_its_own(command):
  assert command in lines('README.md')


def test_ci_trains_as_readme_does():
  install, train = TRAIN.split(' && ')
  ci = lines('.ci/run')
  runs = [i for i, line in enumerate(ci) if line == 'smoke']
  # CI makes the run short and puts it into a directory of its own; the rest of the command is README's.
  assert any(line.startswith(f'{train} --config.num_iterations=') for line in ci)
  assert len(runs) == 2, 'the second run resumes the first'
  assert ci.index(install) < runs[0] < runs[1]


def test_ci_tests_as_readme_does():
  install, test = TEST.split(' && ')
  ci = lines('.ci/run')
  assert ci.index(install) < ci.index(test)


def test_ci_trains_before_it_installs_what_only_tests_need():
  ci = lines('.ci/run')
  installs = [i for i, line in enumerate(ci) if line.startswith('pip install')]
  assert ci[installs[0]] == TRAIN.split(' && ')[0]
  assert ci.index('smoke') < installs[1]


@pytest.mark.parametrize('path', ['requirements.txt', 'requirements-dev.txt'])
def test_requirements_have_a_lower_bound_and_only_orbax_an_upper_one(path):
  # An upper bound, or an extra of JAX, would take away the JAX that a user installed for an accelerator.
  for line in requirements(path):
    name = re.fullmatch(r'([A-Za-z0-9_-]+(\[s3\])?)>=[0-9.]+(,<1)?', line)
    assert name, line
    assert path == 'requirements-dev.txt' or not name[2], line
    assert bool(name[3]) == (name[1] == 'orbax-checkpoint'), line


def test_torch_is_not_required():
  names = {
    re.split('[>=]', line)[0].lower() for p in ('requirements.txt', 'requirements-dev.txt') for line in requirements(p)
  }
  assert 'torch' not in names
