"""The examples of docs/add_environment.md, as they stand there, play and train; and a server that dies mid-run."""

from __future__ import annotations

import ast
import http.server
import importlib
import json
import logging
import re
import sys
import threading
from typing import ClassVar

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build, train
from ragen_jax.agent.episode import Status, TextReply
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.config.checks import check_config
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.training.rollout_metrics import rollout_metrics
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.paths import ROOT

BLOCKS = re.findall(
  r'```python\n(.*?)```', (ROOT / 'docs' / 'add_environment.md').read_text(encoding='utf-8'), re.DOTALL
)
FILES = {block.split('\n')[0].removeprefix('# '): block for block in BLOCKS if block.startswith('# my_games/')}
TAGS = ('Corridor', 'Guess', 'Taxi', 'Elevator')


@pytest.fixture(scope='module')
def games(tmp_path_factory):
  """The page's files, where Python finds them."""
  directory = tmp_path_factory.mktemp('project')
  for path, text in FILES.items():
    (directory / path).parent.mkdir(exist_ok=True)
    (directory / path).write_text(text, encoding='utf-8')
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(directory)
    yield
  for name in [name for name in sys.modules if name.split('.')[0] == 'my_games']:
    del sys.modules[name]


@pytest.fixture
def server(games):
  """The page's server, on a free port."""
  handler = importlib.import_module('my_games.server').Handler
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def page_config(server, **fields):
  """The page's config, with as little of everything else as the other tests have."""
  config = importlib.import_module('my_games.config').get_config()
  small = small_config(agent__max_context=2048, agent__max_response_tokens=16, eval__greedy_too=False)
  with small.unlocked():
    for tag in TAGS:
      small.envs[tag] = config.envs[tag]
  small.envs.Elevator.url = f'http://127.0.0.1:{server.server_address[1]}'
  small.train.tags = small.eval.tags = TAGS
  small.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return small


class OneWord:
  """Says the same word of each game in every turn."""

  writes_tokens = False
  words: ClassVar = dict(zip(TAGS, ('Right', '3', 'Down', 'Up'), strict=True))

  def reply(self, log):
    tags = {row: log.envs.specs[log.envs.row_env[row]].tag for row in log.live}
    return {row: TextReply(f'<think></think><answer>{self.words[tag]}</answer>') for row, tag in tags.items()} or None


def test_the_page_has_the_files_and_the_entries_that_its_config_has(games):
  assert list(FILES) == [f'my_games/{name}.py' for name in ('corridor', 'guess', 'taxi', 'server', 'config')]
  assert max(len(text.splitlines()) for text in FILES.values()) < 100
  config = importlib.import_module('my_games.config')
  sections = config.get_config()
  assert sections.train.tags == sections.eval.tags == TAGS
  entries = [ast.literal_eval(block.replace('\n  ', '\n').strip()) for block in BLOCKS if block.startswith('{')]
  assert entries == [
    {key: value for key, value in sections.envs[tag].to_dict().items() if key not in config.BUDGET} for tag in TAGS
  ]
  check_config(sections, played=())  # the server does not run


@pytest.mark.slow
def test_each_of_the_page_s_environments_plays_whole_episodes(server):
  config = page_config(server)
  policy = build.load_policy(config)
  specs = build.env_specs(config, TAGS, (1, 1, 1, 1))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 4)
  speaker = SamplerSpeaker(policy.sampler, nnx.split(policy.model)[1], jax.random.key(0), PLAIN)
  rollout = proxy.rollout(speaker, 10_000)
  assert [e.tag for e in rollout.episodes] == [tag for tag in TAGS for _ in range(4)]
  t = rollout.trajectory
  for row, episode in enumerate(rollout.episodes):
    assert Status.RUNNING < episode.status < Status.ENV_ERROR and episode.turns
    assert episode.outside == (episode.tag != 'Corridor')
    text = policy.tokenizer.decode(t.tokens[row, : t.length[row]])
    assert specs[TAGS.index(episode.tag)].env.rules() in text
    at = 0
    for turn in episode.turns:
      at = text.index(turn.observation, at) + 1  # all of them, in their order
    assert t.rewards[row].sum() == pytest.approx(episode.score, abs=1e-5)
  # The built-in model hardly knows the words of these games.
  episodes = proxy.rollout(OneWord(), 10_000).episodes
  for tag in TAGS:
    assert sum(turn.effective for e in episodes if e.tag == tag for turn in e.turns) > 0, tag
  handler = sys.modules['my_games.server'].Handler
  assert not handler.games  # all were closed


def test_the_three_shortest_routes_have_fewer_than_40_lines():
  routes = ('# my_games/corridor.py', '# my_games/guess.py', '# my_lookup.py')
  lengths = {block.split('\n')[0]: len(block.splitlines()) for block in BLOCKS}
  assert all(lengths[route] < 40 for route in routes), lengths


def test_the_jax_example_walks_to_its_door(games):
  env = importlib.import_module('my_games.corridor').Corridor(length=5, slip=0.0)
  state = env.reset(jax.random.key(3))
  batch = jax.tree.map(lambda x: np.asarray(x)[None], state)
  assert env.render(batch) == [f'You: square {state.player}. Door: square {state.door}.']
  towards = int(state.door > state.player)
  for left in range(abs(int(state.door - state.player)), 0, -1):
    assert not state.done
    state, out = env.step(state, jax.numpy.int32(towards), jax.random.key(left))
  assert state.done and state.success and out.reward == 1.0 and out.effective


def test_the_tool_example_plays_a_question_with_calls(tmp_path, monkeypatch):
  (block,) = (block for block in BLOCKS if block.startswith('# my_lookup.py'))
  (tmp_path / 'my_lookup.py').write_text(block, encoding='utf-8')
  rows = [{'question': f'What do {n} apples cost?', 'answer': 3 * n} for n in range(2, 60)]
  (tmp_path / 'prices.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
  monkeypatch.chdir(tmp_path)
  names = {}
  exec(block, names)
  config = names['get_config']()
  check_config(config)
  (spec,) = build.env_specs(config, config.train.tags, (1,))
  assert 'price[fruit]' in spec.env.rules() and 'Tells the price of a fruit in euros.' in spec.env.rules()
  session = spec.env.open(1)
  (question,) = session.reset([0], [7], [0])
  count = int(question.split()[-3])
  texts = [session.step([0], [action])[0] for action in ('price[apple]', 'price[brick]', f'finish[{3 * count}]')]
  assert '3 euros' in texts[0][0] and 'brick is not sold' in texts[1][0]
  assert [text[2] for text in texts] == [False, False, True] and texts[2][1] == 1.0


def test_the_python_example_counts_its_guesses(games):
  game = importlib.import_module('my_games.guess').Guess(5)
  won = []
  for seed in range(20):
    game.reset(seed)
    for guess in '12345':
      observation, reward, done, success = game.step(guess)
      if done:
        assert success and reward == pytest.approx(1 / int(guess)) and 'right' in observation
        won.append(guess)
        break
      assert observation == f'{guess} is too low.'
  assert set(won) == set('12345')


@pytest.mark.exhaustive
def test_training_goes_on_when_the_server_dies_in_the_middle(server, tmp_path, monkeypatch, caplog):
  handler = sys.modules['my_games.server'].Handler
  original, resets, dead = handler.do_POST, [], threading.Event()

  def do_post(self):
    resets.extend([self] if self.path == '/reset' else [])
    # It dies at the first action of the second training rollout; the evaluation before the first resets twice.
    if len(resets) == 4 and self.path == '/step':
      dead.set()
    if not dead.is_set():
      original(self)

  monkeypatch.setattr(handler, 'do_POST', do_post)
  config = page_config(
    server,
    num_iterations=3,
    train__tags=('Elevator', 'FrozenLake'),
    eval__tags=('Elevator',),
    eval__groups=2,
    eval__every=0,
    checkpoint__every=0,
    envs__Elevator__retries=1,
    # Few rows, few programs: everything is as wide as the longest.
    train__groups=2,
    length_step=1024,
    agent__drop_finished=False,
    optimizer__micro_batch_size=8,
  )
  with config.unlocked():
    config.envs.Elevator.backoff_s = 0.01
  with caplog.at_level(logging.WARNING):
    last = train.train_and_evaluate(config, str(tmp_path))
  lines = read_metrics(tmp_path)
  errors = [line['train/Elevator/env_errors'] for line in lines if 'train/Elevator/env_errors' in line]
  assert dead.is_set() and len(errors) == 3 and errors[0] == 0.0 < errors[1] and errors[2] == 1.0
  assert last['val-env/Elevator/env_errors'] == 1.0 and lines[0]['val-env/Elevator/env_errors'] == 0.0
  assert last['val-env/Elevator/success'] == 0.0
  # The other environment's episodes are learnt from, in every iteration.
  assert all(line['actor/grad_norm'] > 0 and np.isfinite(line['actor/pg_loss']) for line in lines[1:])
  assert not any('env_errors' in name for line in lines for name in line if 'FrozenLake' in name)
  warnings = [r.message for r in caplog.records if r.name == 'ragen_jax.agent.outside_pool']
  assert warnings and len(set(warnings)) == len(warnings) <= 4
  assert all(m.startswith('envs.Elevator, level ') and 'got no answer' in m and '\n' not in m for m in warnings)


def test_an_iteration_of_which_nothing_could_be_reset_changes_nothing(server):
  config = page_config(
    server,
    train__tags=('Elevator',),
    train__groups=2,
    train__group_size=2,
    optimizer__mini_batch_size=4,
    envs__Elevator__url='http://127.0.0.1:9/closed',
    envs__Elevator__retries=0,
  )
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  before = jax.tree.map(np.array, state.params)
  rollout, selection = trainer.collect(state)
  assert rollout.trajectory.status.tolist() == [Status.ENV_ERROR] * 4
  assert rollout.trajectory.tokens.shape == (4, 2) and not rollout.trajectory.loss_mask.any()
  assert [len(e.turns) for e in rollout.episodes] == [0] * 4
  assert all('got no answer' in e.error for e in rollout.episodes)
  assert not selection.keep.any()
  batch, _ = trainer.estimate(state, selection)
  state, metrics = trainer.update(state, batch, selection)
  assert metrics['train/num_mini_batches'] == 0
  assert jax.tree.all(jax.tree.map(np.array_equal, before, state.params))
  assert rollout_metrics(rollout, 2)['train/Elevator/env_errors'] == 1.0
  trainer.collect(state)
  with pytest.raises(UserError, match=r'all 4 episodes of 3 consecutive rollouts.*Elevator: .*got no answer') as raised:
    trainer.collect(state)
  assert raised.value.everywhere
