"""The parts of a run with agent programs are made as its config says."""

from __future__ import annotations

import builtins
import itertools
import sys
import types

import pytest

from ragen_jax import build_agents
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config

_AGENT = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}


@pytest.fixture
def model():
  """What the settings ask of a model."""
  return types.SimpleNamespace(processor=None, tokenizer=types.SimpleNamespace(stop_ids=(5,), pad_id=6, size=300))


@pytest.mark.parametrize('step', [1, 16, 64, 256])
@pytest.mark.parametrize('context', [2, 100, 512, 32768])
def test_prompts_are_fed_in_a_few_widths(step, context):
  config = small_config({'length_step': step, 'agent.max_context': context})
  widths = build_agents._prompt_widths(config)
  assert 1 <= len(widths) <= 4 and list(widths) == sorted(set(widths)) and widths[0] >= 1
  assert all(b <= 4 * a for a, b in itertools.pairwise(widths))


@pytest.mark.parametrize('fields', [{}, {'agent.max_context': 100, 'length_step': 256}, {'agent.max_context': 6000}])
def test_the_engine_takes_the_widths(model, fields):
  settings = build_agents.server_settings(small_config(fields), model, trains=True)
  assert isinstance(settings.engine, EngineSettings) and settings.engine.max_context == settings.limits.context


def test_a_trainer_limits_calls_and_creates_the_rollouts(model):
  config = small_config({**_AGENT, 'envs.Agent.max_turns': 7, 'envs.FrozenLake.max_turns': 3, 'serve.timeout': 9.0})
  train, serve = (build_agents.server_settings(config, model, trains=trains) for trains in (True, False))
  assert (train.max_calls, serve.max_calls) == (7, 10_000)
  assert (train.creates, serve.creates) == (False, True)
  config.prompt.text = ' Be brief. '
  served = [build_agents.server_settings(config, model, trains=trains).prompt for trains in (True, False)]
  assert served == ['', 'Be brief.'], 'the trainer puts it into the rollouts that it creates'
  assert train.rollout_limits.timeout_s == serve.rollout_limits.timeout_s == 9.0


def test_training_and_evaluation_are_collected_in_their_own_ways(model):
  config = small_config({**_AGENT, 'serve.incomplete': 'drop', 'train.group_size': 3, 'eval.temperature': 0.25})
  train, evaluation = (build_agents.agent_settings(config, model, s) for s in ('train', 'eval'))
  assert (train.mode, evaluation.mode) == ('train', 'val')
  assert (train.episodes.group_size, evaluation.episodes.group_size) == (3, 1)
  assert (train.episodes.incomplete, evaluation.episodes.incomplete) == ('drop', 'keep')
  assert evaluation.episodes.temperature == 0.25 and train.episodes.stop_id == 5 and train.episodes.pad_id == 6


def test_access_without_a_key_is_for_this_machine(model):
  for host, allowed in (
    ('127.0.0.1', True),
    ('localhost', True),
    ('::1', True),
    ('0.0.0.0', False),
    ('10.0.0.1', False),
  ):
    assert build_agents.server_settings(small_config({'serve.host': host}), model, trains=False).open_access is allowed


def test_images_are_for_models_that_read_them(model):
  def images(**fields):
    return build_agents.server_settings(small_config(**fields), model, trains=False).limits.images

  seeing = {'model__preset': 'qwen3-vl-2b'}
  assert images() is None and images(serve__max_images=0, **seeing) is None
  found = images(serve__max_images=5, serve__image_tokens=90, **seeing)
  assert (found.count, found.tokens, found.processor.factor) == (5, 90, 32)
  # 65,536 pixels at least.
  with pytest.raises(UserError, match=r'^serve\.image_tokens=63: must be at least 64, which the model'):
    images(serve__image_tokens=63, **seeing)


def test_a_missing_package_is_one_line(monkeypatch):
  wanted = builtins.__import__

  def without(name, *arguments, **options):
    if name.partition('.')[0] == 'uvicorn':
      raise ModuleNotFoundError("No module named 'uvicorn'", name='uvicorn')
    return wanted(name, *arguments, **options)

  for name in ('ragen_jax.serving.open_server', 'ragen_jax.serving.http.server'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.setattr(builtins, '__import__', without)
  with pytest.raises(UserError, match=r"needs the package uvicorn; install it with 'pip install -r requirements-serve"):
    build_agents.import_open_server()


@pytest.mark.parametrize(('train', 'evaluation', 'told'), [('a', 'a', True), ('a', 'b', False), ('', '', False)])
def test_tasks_that_are_trained_and_evaluated_are_told(tmp_path, monkeypatch, caplog, train, evaluation, told):
  config = small_config({**_AGENT, 'eval.tags': ('Other',)})
  config.envs.Other = config.envs.Agent.copy_and_resolve_references()
  config.envs.Agent.tasks, config.envs.Other.tasks = train, evaluation
  monkeypatch.setattr(build_agents, 'task_runner', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError), build_agents.open_players(config, None, str(tmp_path)):
    pass
  assert [r.getMessage().partition(':')[0] for r in caplog.records] == [
    'the tasks of a are trained and evaluated'
  ] * told


def test_other_runs_open_no_server(tmp_path):
  with build_agents.open_players(small_config(), None, str(tmp_path)) as players:
    assert players == {'train': None, 'eval': None} and not list(tmp_path.iterdir())
