"""A person's play against rollouts of the same actions, against the environments, and against what was typed."""

from __future__ import annotations

import io
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.models import presets
from ragen_jax.modes import play as play_mode
from ragen_jax.modes.play import Person, play
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.paths import ROOT
from tests.support.processes import copy_main, environment, run_main
from tests.support.speakers import limits, scripted_tokens

TAGS = ('FrozenLake', 'SimpleSokoban', 'Bandit')
# Turns of mixed length: beyond a turn's limit, and beyond the episode's.
TURNS = {
  'FrozenLake': [['Down'], ['Left', 'Up'], ['Right'] * 7, ['Down'], ['Down', 'Right', 'Up']],
  'SimpleSokoban': [['Up', 'Left'], ['Down'] * 6, ['Right'], ['Left'] * 5, ['Up']],
  'Bandit': [['Dragon', 'Phoenix']],
}


def _config(*tags, **fields):
  return small_config(train__tags=tags, envs__FrozenLake__max_turns=5, **fields)


def _proxy(config, tag) -> AgentProxy:
  """Plays one tag as `play` does."""
  specs = build.env_specs(config, (tag,), (1,))
  context = build.context_manager(config, ChatTokenizer(presets.resolve('tiny', '')), specs)
  return AgentProxy(EnvStateManager(specs, 1), context, build.episode_limits(config, specs))


class Typist:
  """Types the actions of turns; notes the conversation before each."""

  def __init__(self, turns):
    self.conversations: list[list[int]] = []
    self.person: Person | None = None
    self._lines = iter(['||'.join(names) + '\n' for names in turns])

  def readline(self) -> str:
    self.conversations.append(list(self.person.conversation))
    return next(self._lines, '')


def _typed_level(proxy, seed, turns) -> tuple[Episode, list[list[int]]]:
  """A level in which turns are typed: the episode, and the conversation before each reply and at the end."""
  typist = Typist(turns)
  typist.person = Person(typist, io.StringIO(), pathlib.Path('none'), frozenset(), proxy)
  (episode,) = proxy.rollout(typist.person, seed).episodes
  return episode, [*typist.conversations, typist.person.conversation]


class Follower:
  """Asks for a hint in each turn, and types it."""

  def __init__(self, screen: io.StringIO):
    self.hints: list[list[str]] = []
    self._screen, self._asked = screen, False

  def readline(self) -> str:
    self._asked = not self._asked
    if self._asked:
      return 'hint\n'
    hint = self._screen.getvalue().removesuffix('\n> ').rpartition('\n')[2].removeprefix('> ')
    self.hints.append(hint.split(' || '))
    return hint + '\n'


class Keyboard:
  """Lines that are typed; notes what was shown since the line before."""

  def __init__(self, lines, screen: io.StringIO):
    self.shown: list[str] = []
    self._lines, self._screen, self._seen = iter([*(f'{line}\n' for line in lines), '']), screen, 0

  def readline(self) -> str:
    self.note()
    return next(self._lines)

  def note(self):
    text = self._screen.getvalue()
    self.shown.append(text[self._seen :].removesuffix('> '))
    self._seen = len(text)


def _typed(config, *lines) -> list[str]:
  """What is shown before the first line that is typed, and after each of them; last, after the end of the input."""
  screen = io.StringIO()
  keyboard = Keyboard(lines, screen)
  play(config, keyboard, screen)
  keyboard.note()
  return keyboard.shown


@pytest.mark.parametrize(('form', 'force_prefix'), [('free_think', True), ('no_think', False)])
def test_prompts_rewards_and_ends_are_those_of_a_rollout_with_the_same_actions(form, force_prefix):
  config = _config(*TAGS, agent__format=form, agent__force_prefix=force_prefix)
  specs = build.env_specs(config, TAGS, (1, 1, 1))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  context = build.context_manager(config, tokenizer, specs)
  opening = '<think></think><answer>' if form == 'free_think' else '<answer>'
  replies = [
    [(opening + ' || '.join(names) + '</answer>').removeprefix(context.reply_prefix) for names in TURNS[tag]]
    for tag in TAGS
  ]
  together = AgentProxy(EnvStateManager(specs, 1), context, limits())
  alone = [_proxy(config, tag) for tag in TAGS]
  ends = set()
  for first in range(10_000, 10_024, 3):
    rollout = together.rollout(scripted_tokens(tokenizer, replies), first)
    for row, there in enumerate(rollout.episodes):
      here, conversations = _typed_level(alone[row], first + row, TURNS[there.tag])
      used = slice(int(rollout.trajectory.length[row]))
      ids, turns = rollout.trajectory.tokens[row, used], rollout.trajectory.turn[row, used]
      sampled = rollout.trajectory.loss_mask[row, used]
      assert len(conversations) == len(there.turns) + 1 and conversations[-1] == ids.tolist()
      for number, conversation in enumerate(conversations[:-1]):
        fed = (turns < number) | ((turns == number) & ~sampled)
        assert conversation == ids[fed].tolist()
      assert [(t.observation, t.reply, t.actions, t.reward, t.penalty) for t in here.turns] == [
        (t.observation, t.reply, t.actions, t.reward, t.penalty) for t in there.turns
      ]
      assert (here.status, here.final_observation, here.level_seed) == (
        there.status, there.final_observation, there.level_seed
      )  # fmt: skip
      ends.add(here.status)
  assert ends >= {Status.SUCCESS, Status.FAILURE, Status.OUT_OF_ACTIONS}


@pytest.mark.parametrize('tag', TAGS)
def test_the_prompt_that_is_shown_is_the_conversation_in_the_chat_format(tag):
  config = _config(tag)
  words = TURNS[tag][0]
  proxy = _proxy(config, tag)
  _, conversations = _typed_level(proxy, config.train.first_level, [words])
  first, after = (proxy.context.tokenizer.decode(conversation) for conversation in conversations[:2])
  shown = _typed(config, 'prompt', '||'.join(words).lower(), 'PROMPT')
  assert shown[1] == first + '\n'
  assert first.startswith('<|im_start|>system\n') and first.endswith('<|im_start|>assistant\n<think>')
  assert shown[3] == after + '\n'
  assert f'<think></think><answer>{" || ".join(words)}</answer><|im_end|>' in shown[3]


def test_a_level_is_the_environment_stepped_by_hand():
  env, step = FrozenLake(), jax.jit(FrozenLake().step)
  state = jax.jit(env.reset)(jax.random.key(500))
  luck = jax.random.fold_in(jax.random.fold_in(jax.random.key(500), 1), 0)
  shown = _typed(_config('FrozenLake', train__first_level=500), 'left', 'Down', 'RIGHT', ' up ')
  texts = []
  for number, action in enumerate([None, 0, 1, 2, 3]):
    if action is not None:
      state, _ = step(state, action, jax.random.fold_in(luck, number - 1))
    texts.append(env.render(jax.tree.map(lambda x: np.asarray(x)[None], state))[0])
    assert not state.done and shown[number].endswith(
      f'Turn {number + 1} of 5, actions left: {10 - number}\n{texts[-1]}\n'
    )
  assert len(set(texts)) > 1


def test_levels_go_on_from_the_first_and_tags_take_turns():
  config = _config('Bandit', 'FrozenLake', train__first_level=500, seed=2)
  specs = build.env_specs(config, ('Bandit', 'FrozenLake'), (1, 1))
  managers = [EnvStateManager([spec], 1) for spec in specs]
  shown = _typed(config, *['new'] * 6)
  for number in range(7):
    spec, manager = specs[number % 2], managers[number % 2]
    assert shown[number].lstrip().startswith(f'{spec.tag}, level {number + 1} (seed {20_000_500 + number})\n')
    assert shown[number].endswith(manager.reset(20_000_500 + number)[0] + '\n')
    assert (spec.env.rules() in shown[number]) == (number < 2)
  assert len(set(shown)) == 8


@pytest.mark.parametrize('tag', TAGS)
@pytest.mark.slow_cases('FrozenLake')
def test_hints_lead_to_the_success_that_is_stated(tag):
  won, best = [], []
  config = _config(tag)
  proxy = _proxy(config, tag)
  (spec,) = proxy.envs.specs
  for number in range(40 if tag == 'FrozenLake' else 8):
    screen = io.StringIO()
    follower = Follower(screen)
    (episode,) = proxy.rollout(
      Person(follower, screen, pathlib.Path('none'), frozenset(), proxy), config.train.first_level + number
    ).episodes
    assert len(follower.hints) == len(episode.turns) > 0 and episode.status != Status.ABANDONED
    assert all(1 <= len(hint) <= spec.budget.max_actions_per_turn for hint in follower.hints)
    won.append(episode.success)
    best.append(proxy.envs.optimal()[0])
  best = np.asarray(best, float)
  assert ((best > 0) & (best <= 1)).all()
  # Four standard deviations of a sum of coins with these chances; none where the game has no chance in it.
  assert abs(np.sum(won) - best.sum()) <= 4 * np.sqrt(np.sum(best * (1 - best))) + 1e-6
  assert tag == 'FrozenLake' or all(won)


def test_a_hint_is_typed_as_it_is_shown_and_the_end_tells_what_was_reached():
  config = _config('SimpleSokoban')
  hint = _typed(config, 'hint')[1].strip()
  shown = _typed(config, hint, 'hint', hint, 'new')
  episode, _ = _typed_level(_proxy(config, 'SimpleSokoban'), config.train.first_level, [hint.split(' || ')])
  assert episode.success and len(episode.turns) == 1
  moves = len(hint.split(' || '))
  assert f'Reward: {11 - 0.1 * moves:.1f}\n' in shown[1]
  # The solver knows the level of the file too.
  assert 'Won. Success: 1, best possible: 1.000, ' in shown[1]
  assert f'reward: {11 - 0.1 * moves:.1f}, turns: 1, actions: {moves}.' in shown[1]
  assert shown[2] == shown[3] == "This level is over; 'new' begins the next one.\n"
  assert shown[-1] == '\nLevels won: 1 of 1 that were played to the end; the best play wins 1.00 of them on average.\n'


def test_limits_are_told():
  config = _config('SimpleSokoban')
  shown = _typed(config, '||'.join(['Up'] * 7), '||'.join(['Down'] * 3), ' || '.join(['Up'] * 4))
  assert 'Carried out: 5 of 7 actions\n' in shown[1] and 'Turn 2 of 5, actions left: 5\n' in shown[1]
  assert 'Carried out' not in shown[2] and 'Turn 3 of 5, actions left: 2\n' in shown[2]
  assert 'Carried out: 2 of 4 actions\n' in shown[3]
  assert 'No actions left. Success: 0, best possible: 1.000, reward: -1, turns: 3, actions: 10.' in shown[3]
  shown = _typed(config, *['Up'] * 5)
  assert 'No turns left. Success: 0, best possible: 1.000, reward: -0.5, turns: 5, actions: 5.' in shown[5]


def test_words_that_are_no_action_are_told_in_one_line_and_cost_nothing():
  shown = _typed(_config('FrozenLake'), 'Left || Lift', 'left, right', '', ' || ', 'help')
  assert shown[1].startswith("'Lift' is not an action; allowed: Left, Down, Right, Up, separated by ||")
  assert shown[2].startswith("'left, right' is not an action; ")
  assert shown[1].count('\n') == shown[2].count('\n') == 1
  assert shown[3] == shown[4] and shown[3].startswith('Turn 1 of 5, actions left: 10\n')
  assert shown[3] in shown[0] and shown[5] in shown[0]
  for word in ('hint', 'prompt', 'new', 'help', 'quit', 'Actions: Left, Down, Right, Up.'):
    assert word in shown[5]
  assert 'is the name of one of the two arms on offer' in _typed(_config('Bandit'), 'Lift')[1]
  # Another separator, and then the usual one is part of a word.
  shown = _typed(_config('FrozenLake', agent__action_sep=';'), 'left; right', 'left || right')
  assert 'actions left: 8\n' in shown[1] or 'Carried out' in shown[1] or 'Lost' in shown[1]
  assert "'left || right' is not an action" in shown[2] and 'separated by ;' in shown[2]


def test_boards_that_the_model_would_see_are_written_to_a_file():
  config = _config('FrozenLake', 'Bandit')
  config.envs.FrozenLake.observation = 'image'
  screen, seen = io.StringIO(), []
  lines = iter(['Down\n', 'Up\n', 'new\n', 'quit\n'])

  def readline() -> str:
    files = re.findall(r'The images are in (.*) until the game ends', screen.getvalue())
    seen.append(np.asarray(Image.open(files[-1])) if len(files) > len(seen) else None)
    return next(lines)

  play(config, types.SimpleNamespace(readline=readline), screen)
  env = build.env_specs(config, ('FrozenLake',), (1,))[0].env
  envs = EnvStateManager(build.env_specs(config, ('FrozenLake',), (1,)), 1)
  envs.reset(config.train.first_level)
  assert seen[3] is None  # the Bandit has no board
  for shown, action in zip(seen[:3], ['Down', 'Up', None], strict=True):
    board = envs.picture(0)
    assert board.shape == env.render_rgb(jax.tree.map(lambda x: x[0], envs.pools[0].states)).shape
    np.testing.assert_array_equal(shown, board)
    if action:
      envs.step([[env.parse_action(action)]])


def test_quit_and_the_end_of_the_input_end_the_play():
  config = _config('Bandit')
  for word in ('quit', 'q', 'Exit'):
    assert _typed(config, word)[-1] == _typed(config)[-1].lstrip('\n')
  assert len(_typed(config, ' Quit ', 'Dragon', 'new')) == 2
  assert _typed(config)[-1] == '\nLevels won: 0 of 0 that were played to the end.\n'


def test_an_action_has_precedence_over_a_command_of_the_same_name():
  config = _config('Bandit')
  with config.unlocked():
    config.envs.Bandit.arms = (('Quit', 'Hint'),)
  shown = _typed(config, 'hint', 'new', 'quit')
  assert 'Won. Success: 1' in shown[1]
  assert 'Lost. Success: 0' in shown[3]


def test_games_without_a_solver_say_so(monkeypatch):
  class Unsolved(FrozenLake):
    has_solver = False

  monkeypatch.setitem(registry.TYPES, 'frozen_lake', Unsolved)
  shown = _typed(_config('FrozenLake'), 'hint', *['Up'] * 5)
  assert "'hint'" not in shown[0] and "'help'" in shown[0]
  assert shown[1] == 'FrozenLake has no solver, so there is no hint.\n'
  end = next(part for part in shown if 'Success: ' in part)
  assert 'best possible: not known' in end
  assert shown[-1].endswith('of 1 that were played to the end.\n')


def test_games_too_large_for_their_solver_can_be_played():
  config = _config('FrozenLake', envs__FrozenLake__max_actions=16, envs__FrozenLake__max_actions_per_turn=16)
  shown = _typed(config, 'hint', 'Up')
  assert 'the solver tries all' in shown[1]
  assert 'Turn 2 of 5, actions left: 15\n' in shown[2]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'train__tags': ()}, 'train.tags'),
    (
      {'train__tags': ('Chess',)},
      "train.tags: 'Chess' is not defined in envs; allowed: ALFWorld",
    ),
    ({'agent__action_sep': ' '}, "agent.action_sep=' '"),
    ({'train__first_level': -1}, 'train.first_level=-1'),
    ({'envs__FrozenLake__size': 1}, 'size=1'),
  ],
)
def test_fields_that_cannot_be_played_with_are_named(fields, message):
  with pytest.raises(UserError) as e:
    play(small_config(**fields), io.StringIO(), io.StringIO())
  assert message in str(e.value) and '\n' not in str(e.value)


def test_a_level_that_is_left_is_no_level_that_was_played():
  config = _config('SimpleSokoban')
  proxy = _proxy(config, 'SimpleSokoban')
  episode, conversations = _typed_level(proxy, config.train.first_level, [['Up'], ['Left']])
  assert episode.status == Status.ABANDONED and len(episode.turns) == 2 and len(conversations) == 4
  assert 'Levels won: 0 of 0 ' in _typed(config, 'Up', 'new', 'Up', 'new')[-1]


# -- a level from a file -----------------------------------------------------------------------------------------------

LEVEL = 'P___\n_OO_\n_O__\n___G'


def test_a_level_of_a_file_is_played_and_played_again(tmp_path):
  path = tmp_path / 'mine.txt'
  path.write_text(LEVEL + '\n')
  config = _config('FrozenLake', envs__FrozenLake__is_slippery=False, train__first_level=500)
  screen = io.StringIO()
  right = 'Right || Right || Right'
  keyboard = Keyboard([right, 'new', 'Down||Down||Down', right, 'new'], screen)
  play(config, keyboard, screen, level=str(path))
  shown = keyboard.shown
  assert shown[0].startswith(f'FrozenLake, level of {path}, attempt 1 (seed 500)\n') and LEVEL in shown[0]
  assert '___P' in shown[1] and LEVEL not in shown[1]
  assert f'level of {path}, attempt 2 (seed 501)' in shown[2] and LEVEL in shown[2]
  # The solver knows the level of the file too.
  assert 'Won. Success: 1, best possible: 1.000' in shown[4] and 'attempt 3' in shown[5]
  # The luck is that of the seed, which differs between attempts.
  slippery = _config('FrozenLake', train__first_level=500)
  lines = ['Right||Right||Down', 'new'] * 6
  screen = io.StringIO()
  keyboard = Keyboard(lines, screen)
  play(slippery, keyboard, screen, level=str(path))
  assert len(set(keyboard.shown[1:12:2])) > 1 and all(LEVEL in text for text in keyboard.shown[2:-1:2])


@pytest.mark.parametrize(
  ('tags', 'content', 'message'),
  [
    (('FrozenLake',), None, r"envs\.FrozenLake: level file '.*' cannot be read \(No such file or directory\)$"),
    (('FrozenLake',), 'P_\n_G', r"envs\.FrozenLake: level file '.*': frozen_lake: the board has 2 rows, must be 4$"),
    (
      ('FrozenLake', 'Bandit'),
      LEVEL,
      r"is for one environment, name it alone in train\.tags=\('FrozenLake', 'Bandit'\)",
    ),
  ],
)
def test_a_level_that_cannot_be_played_is_named_in_one_line(tmp_path, tags, content, message):
  path = tmp_path / 'mine.txt'
  if content is not None:
    path.write_text(content)
  with pytest.raises(UserError, match=f'^--level.*: {message}') as error:
    play(_config(*tags), io.StringIO(), io.StringIO(), level=str(path))
  assert '\n' not in str(error.value)


@pytest.mark.slow
def test_the_flag_names_a_level(tmp_path):
  (tmp_path / 'mine.txt').write_text(LEVEL)
  played = copy_main('--mode=play', '--config=frozenlake_ppo', f'--level={tmp_path / "mine.txt"}', given='quit\n')
  assert played.returncode == 0 and LEVEL in played.stdout, played.stderr


def test_what_is_no_text_is_an_unknown_action():
  done = subprocess.run(
    [sys.executable, 'main.py', '--mode=play', '--config=bandit_ppo'], input=b'Dra\xffgon\nquit\n', capture_output=True,
    cwd=ROOT, env=environment(PYTHONIOENCODING='utf-8:strict'), timeout=120,
  )  # fmt: skip
  assert done.returncode == 0 and b'Traceback' not in done.stderr, done.stderr
  assert 'Dra\ufffdgon' in done.stdout.decode()


def test_tasks_of_programs_are_refused_before_their_package_is_read(monkeypatch):
  monkeypatch.setattr(play_mode, 'check_needs', lambda *_, **__: pytest.fail('reads what the environment needs'))
  config = small_config(train__tags=('Verifiers',), envs__Verifiers__package='no-such-package')
  with pytest.raises(UserError, match=r"^envs\.Verifiers\.type='verifiers': programs play it, in training and"):
    play(config, io.StringIO(), io.StringIO())


@pytest.mark.slow
def test_classes_are_found_in_the_folder_of_the_command(tmp_path):
  (tmp_path / 'games').mkdir()
  (tmp_path / 'games' / 'coin.py').write_text(
    'class Coin:\n  def rules(self):\n    return "Call the coin."\n\n  def reset(self, seed):\n    return "It flies."'
    '\n\n  def step(self, action):\n    return "It fell.", 1.0, True, True\n'
  )
  (tmp_path / 'mine.py').write_text(
    'from configs import default\n\n\ndef get_config(model=""):\n  config = default.get_config(model)\n'
    '  config.envs.Coin = {"type": "python", "class_path": "games.coin:Coin", "max_turns": 1, "max_actions": 1,\n'
    '    "max_actions_per_turn": 1, "max_words": 9}\n  config.train.tags = config.eval.tags = ("Coin",)\n'
    '  return config\n'
  )
  result = run_main('--mode=play', '--config=mine.py', cwd=tmp_path, input='Heads\nquit\n')
  assert 'Levels won: 1 of 1' in result.stdout, result.stderr
