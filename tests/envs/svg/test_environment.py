"""SVG as an environment: its options, its episodes, what is shown and paid, and runs with it."""

from __future__ import annotations

import io
import pathlib
import re
import types

import numpy as np
import pytest
from PIL import Image

from configs import svg_vision_ppo, vagen_svg
from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status
from ragen_jax.agent.outside_pool import OutsidePool
from ragen_jax.config.checks import check_config
from ragen_jax.config.image_checks import check_images
from ragen_jax.envs.outside.base import read_observation, read_step
from ragen_jax.envs.outside.images import ImageForm
from ragen_jax.envs.svg.program import read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.evaluation.baselines import evaluation_levels, play_baseline
from ragen_jax.evaluation.evaluator import EvaluationSettings
from ragen_jax.models import presets
from ragen_jax.modes.play import play
from ragen_jax.utils.errors import UserError
from tests.envs.svg.test_program import svg
from tests.support.configs import assert_refused
from tests.support.environments import raises_one_line
from tests.support.speakers import ScriptedText, context_settings, limits

SMALL = {'image_size': (32, 32), 'max_shapes': 2, 'kinds': ('rect',)}


def make(**options):
  return registry.make('svg', {**SMALL, **options})


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'path': 3}, 'svg: path=3; allowed: text'),
    ({'field': ' '}, "svg: field=' '; allowed: text that is not blank"),
    ({'bad_drawings': 'skip'}, "svg: bad_drawings='skip'; allowed: drop, refuse"),
    ({'max_shapes': 13}, 'svg: max_shapes=13; allowed: integers from 1 to 12'),
    ({'min_shapes': 3}, 'svg: min_shapes=3; allowed: integers from 1 to 2'),
    ({'kinds': ('rect', 'star')}, r"svg: kinds=\('rect', 'star'\); allowed: one or more of rect, circle"),
    ({'kinds': ()}, r'svg: kinds=\(\); allowed: one or more'),
    ({'colours': ('red', 'red')}, r'svg: colours=.*each once'),
    ({'colours': 'red'}, "svg: colours='red'; allowed: one or more of names of colours"),
    ({'colours': ('ivory',)}, r"svg: colours=\('ivory',\); allowed: one or more of names of colours that differ"),
    ({'overlap': 1}, 'svg: overlap=1; allowed: True, False'),
    ({'outlines': None}, 'svg: outlines=None; allowed: True, False'),
    ({'grid': 3}, 'svg: grid=3; allowed: 1, 2, 5, 10'),
    ({'grid': True}, 'svg: grid=True; allowed: 1, 2, 5, 10'),
    ({'split': 'dev'}, "svg: split='dev'; allowed: all, train, test"),
    ({'test_share': 0}, 'svg: test_share=0; allowed: numbers between 0 and 1'),
    ({'images': 3}, 'svg: images=3; allowed: integers from 1 to 2'),
    ({'image_size': (32, 64)}, r'svg: image_size=\(32, 64\); allowed: \(height, width\), equal, 16 to 512 pixels'),
    ({'image_size': (8, 8)}, r'svg: image_size=\(8, 8\)'),
    ({'image_size': 64}, 'svg: image_size=64'),
    ({'weights': {'pixels': 0}}, 'svg: weights=.*allowed: numbers from 0 by the names pixels, edges, colours, not all'),
    ({'weights': {'ssim': 1}}, 'svg: weights='),
    ({'weights': {'pixels': float('nan')}}, 'svg: weights='),
    ({'pay': 'last'}, "svg: pay='last'; allowed: best, each"),
    ({'score_reward': 0}, 'svg: score_reward=0; allowed: numbers above 0'),
    ({'success_score': 1.1}, r'svg: success_score=1\.1; allowed: numbers above 0, up to 1'),
    ({'size': 3}, 'size is not an option of svg; allowed: path, field'),
  ],
)  # fmt: skip
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    make(**options)


def test_an_action_is_the_first_document_that_can_be_drawn():
  env = make()
  program = svg('<rect width="50" height="50"/>')
  assert env.parse_action(f'```svg\n{program}\n``` and {svg("")}') == program == env.format_action(program)
  for text in ('', 'red', '<svg>', svg('<image href="/etc/passwd"/>'), svg('<rect x="nan"/>')):
    assert env.parse_action(text) is None


def test_an_episode_pays_what_a_drawing_adds_to_the_best_score():
  half = svg('<rect width="99" height="50" fill="red"/>')
  paid = {}
  for pay in ('best', 'each'):
    env = make(pay=pay, score_reward=4.0, success_score=0.9)
    session = env.open(1)
    first = read_observation(session.reset([0], [3], [0])[0], env.image_form)
    target = env.target(3)
    assert first.text == 'Target: <image>\nYour drawing: <image>\nThe canvas is still white.'
    assert np.array_equal(first.images[0], draw(read_program(target.program), 32)) and first.images[1].min() == 255
    near = target.program.replace('</svg>', '<circle cx="50" cy="50" r="9" fill="teal"/></svg>')
    steps = []
    for program in (half, near, near, half, *session.expert([0])[0]):
      result = session.step([0], [program])[0]
      steps.append(read_step(result, env.image_form, success_stands=env.success_stands))
      drawn = steps[-1].observation
      assert np.array_equal(drawn.images[1], draw(read_program(program), 32))
      assert np.array_equal(drawn.images[0], first.images[0])
    scores = [env.score(first.images[0], step.observation.images[1])[0] for step in steps]
    assert scores[-1] == 1 and scores[1] > scores[0] > 0 and scores[1] < 0.9
    assert steps[1].observation.text.endswith(')') is False and f'{int(scores[1] * 100) / 100:.2f} (' in (
      steps[1].observation.text
    )
    paid[pay] = [step.reward for step in steps]
    assert [step.done for step in steps] == [False] * 4 + [pay == 'best'] and steps[-1].success
    assert [step.effective for step in steps] == [True, True, False, True, True]
    for name in ('similarity', 'pixels', 'edges', 'colours'):
      assert sum(step.metrics[name] for step in steps) == pytest.approx(1.0)
    assert steps[3].metrics['similarity'] == 0
    session.reset([0], [3], [0])
    again = read_step(session.step([0], [half])[0], env.image_form)
    assert again.metrics == pytest.approx(steps[0].metrics) and again.reward == pytest.approx(paid[pay][0])
  assert not steps[3].success
  assert paid['each'] == pytest.approx([4 * x for x in scores])
  assert paid['best'] == pytest.approx([4 * scores[0], 4 * (scores[1] - scores[0]), 0, 0, 4 * (1 - scores[1])])


class Leaver(ScriptedText):
  """Replies once; then the prompt does not fit."""

  def reply(self, log):
    for row in log.live if log.turn else ():
      log.leave(row, Status.OUT_OF_CONTEXT)
    return super().reply(log)


@pytest.mark.parametrize(
  ('pay', 'speaker', 'replies', 'turns', 'paid', 'status'),
  [
    ('best', ScriptedText, ('won', 'won', 'won'), 1, 1, Status.SUCCESS),
    ('each', ScriptedText, ('won', 'won', 'won'), 3, 3, Status.SUCCESS),
    ('each', ScriptedText, ('won', 'white', 'no'), 3, 1, Status.SUCCESS),
    ('each', ScriptedText, ('white', 'no', 'white'), 3, 0, Status.OUT_OF_TURNS),
    ('each', Leaver, ('won',), 1, 1, Status.SUCCESS),
    ('each', Leaver, ('white',), 1, 0, Status.OUT_OF_CONTEXT),
  ],
)  # fmt: skip
def test_winning_does_not_pay_less_than_almost_winning(tmp_path, pay, speaker, replies, turns, paid, status):
  programs = {'won': svg('<rect width="50" height="50" fill="red"/>'), 'white': svg(''), 'no': 'no'}
  (tmp_path / 'a.svg').write_text(programs['won'])
  config = svg_vision_ppo.get_config()
  config.envs.SVG.update(
    {'path': str(tmp_path), 'split': 'all', 'pay': pay, 'max_turns': 3, 'max_actions': 4, 'image_size': (32, 32)}
  )
  specs = build.env_specs(config, ('SVG',), (1,))
  context = ContextManager(ChatTokenizer(presets.resolve('tiny-vl', '')), specs, context_settings())
  proxy = AgentProxy(EnvStateManager(specs, 1), context, limits(max_turns=3))
  script = [f'<think></think><answer>{programs[name]}</answer>' for name in replies]
  (episode,) = proxy.rollout(speaker(script), 5).episodes
  assert (len(episode.turns), episode.env_return, episode.status) == (turns, pytest.approx(paid), status)
  assert episode.success == ('won' in replies)


def test_with_one_image_the_target_is_shown_once():
  env = make(images=1)
  assert env.image_form == ImageForm(1, 32, 32) and 'only your drawing later' in env.rules()
  session = env.open(1)
  first = read_observation(session.reset([0], [1], [0])[0], env.image_form)
  later = read_step(session.step([0], [svg('')])[0], env.image_form).observation
  assert first.text.startswith('Target: <image>') and 'drawing' not in first.text and first.images[0].min() < 255
  assert later.text.startswith('Your drawing: <image>\nScore of this drawing: 0.00') and later.images[0].min() == 255


def test_weights_change_score_and_rules():
  env = make(weights={'colours': 2, 'pixels': 0})
  a, b = (draw(read_program(svg(f'<rect x="{x}" width="40" height="40" fill="red"/>')), 50) for x in (0, 50))
  assert env.score(a, b) == (1.0, {'pixels': 0.0, 'edges': env.score(a, b)[1]['edges'], 'colours': 1.0})
  assert 'these weights: colours 2. A drawing pays' in env.rules() and make().score(a, b)[0] < 0.4
  told = make(pay='each', score_reward=5.0, success_score=0.8).rules()
  assert 'Each drawing pays its score. A score of 1 pays 5. A score of 0.8 wins, and you may go on drawing.' in told


def test_the_user_s_drawings_are_played_and_told_apart(tmp_path):
  for i in range(12):
    (tmp_path / f'{i}.svg').write_text(svg(f'<rect x="{5 * i}" width="30" height="30"/>'))
  train, test = (make(path=str(tmp_path), split=split, test_share=0.4) for split in ('train', 'test'))
  for env in (train, test):
    env.check()
  ids = [{env.level_id(seed) for seed in range(40)} for env in (train, test)]
  assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 12
  session = train.open(2)
  session.reset([0, 1], [5, 5 + len(train.drawings)], [0, 0])
  (own,), (other,) = session.expert([0, 1])
  assert own == other == train.target(5).program and session.rationale([0]) == ['']
  # Random play draws all other drawings, and not the target.
  others = {train.random_program(5, number) for number in range(200)}
  assert others == {x.program for x in train.drawings} - {own}
  assert {x for x in session.legal_actions([0])[0]} <= others
  single = make(path=str(tmp_path / '3.svg'))
  assert single.random_program(0, 0) != single.target(0).program and read_program(single.random_program(0, 0)).parts
  with raises_one_line(r"svg: path='.*nowhere': 0 \.svg files"):
    make(path=str(tmp_path / 'nowhere')).check()


def test_tags_configs_and_errors_before_a_run():
  config = svg_vision_ppo.get_config()
  check_config(config)
  config.envs.SVG.grid = 5
  (spec,) = build.env_specs(config, ('SVGTest',), (1,))
  assert (spec.env.split, spec.env.grid, spec.actions_a_turn, spec.budget.max_turns) == ('test', 5, 1, 2)
  config.envs.SVG.weights.edges = -1.0
  assert_refused(check_config, config, r'^envs\.SVG: weights=')
  config.envs.SVG.weights.edges = 1.0
  config.agent.max_context = 450
  with pytest.raises(UserError, match=r'^envs\.SVG\.images=2: the images of an observation need'):
    check_images(config, weights=False)
  config = vagen_svg.get_config()
  (spec,) = build.env_specs(config, ('SVG',), (1,))
  assert (spec.env.score_reward, spec.budget.max_turns, config.agent.max_context) == (5.0, 2, 3600)
  assert (config.reward.format_reward, config.reward.state_reward, config.agent.max_response_tokens) == (0.5, 0.0, 750)
  config = svg_vision_ppo.get_config('qwen2.5-0.5b')
  with pytest.raises(UserError, match=r'^envs\.SVG\.images=2: .* reads text only'):
    check_images(config, weights=False)


def test_random_play_the_oracle_and_their_pictures():
  config = svg_vision_ppo.get_config()
  specs = build.env_specs(config, ('SVGTest',), (8,))
  settings = EvaluationSettings(
    first_level=0, group_size=2, temperature=1.0, top_p=1.0, top_k=0, greedy_too=False, episodes=0
  )
  (levels,) = evaluation_levels(specs, settings)
  context = ContextManager(ChatTokenizer(presets.resolve('tiny-vl', '')), specs, context_settings())
  found = {}
  for kind in ('random', 'solver'):
    episodes, _ = play_baseline(kind, levels, context, settings, limits=limits(max_turns=2), step=0)
    assert len(episodes) == 16 and not any(e.status.name == 'ENV_ERROR' for e in episodes)
    found[kind] = np.mean([e.env_return for e in episodes])
    assert {e.success for e in episodes} == {kind == 'solver'}
  assert found['solver'] == pytest.approx(1.0) and found['random'] < 0.3
  pool = OutsidePool(specs[0], 8, 1, None)
  pool.reset(np.arange(8), np.zeros(8, int))
  side = specs[0].env.side
  assert pool.picture(0).shape == (side, 2 * side + 2, 3) and set(pool.picture(0)[:, side : side + 2].flat) == {128}


def test_a_person_sees_the_pictures_in_a_file():
  config = svg_vision_ppo.get_config()
  config.envs.SVG.split, config.envs.SVG.image_size = 'all', (32, 32)
  seed = config.train.first_level
  out = io.StringIO()
  program = svg('<rect width="100" height="100" fill="red"/>')
  pictures = []

  def lines():
    yield 'hint\n'
    yield f'{program}\n'
    yield '<svg>\n'
    file = re.findall(r'The images are in (.*) until the game ends\.\n', out.getvalue())[-1]
    pictures.append((file, np.asarray(Image.open(file))))

  typed = lines()
  play(config, types.SimpleNamespace(readline=lambda: next(typed, '')), out)
  shown = out.getvalue()
  (spec,) = build.env_specs(config, ('SVG',), (1,))
  assert f'> {spec.env.target(seed).program}\n' in shown and "'<svg>' is not an action. An answer is one SVG" in shown
  ((file, picture),) = pictures
  assert not pathlib.Path(file).parent.exists()
  assert picture.shape == (32, 66, 3) and picture[5, 40].tolist() == [255, 0, 0]
