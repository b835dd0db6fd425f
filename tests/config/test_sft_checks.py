"""What a warm start cannot learn from is refused in one line."""

from __future__ import annotations

import jax
import pytest

from ragen_jax.config import sft_checks
from ragen_jax.config.checks import check_sft
from tests.support.configs import assert_refused, small_config

_LAST = 1_000_000_000 + 4096  # behind the levels that are demonstrated by default
# A fresh model that reads images.
_FRESH = {'sft.from_scratch': True, 'sft.tower': (64, 2, 4, 128), 'model.vision': 'trained'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'model.separate_critic': True},
      r'^model\.separate_critic=True: must be False with --mode=sft, which trains',
    ),
    ({'sft.val_fraction': 1.0}, r'^sft\.val_fraction=1\.0: must be at least 0 and below 1$'),
    ({'sft.noise': 0.6, 'sft.beginner': 0.5}, r'^sft\.noise=0\.6: and sft\.beginner=0\.5 add up to more than 1$'),
    # The weights.
    ({'lora.rank': 4, 'sft.from_scratch': True}, r'^lora\.rank=4: fresh weights must all be trained$'),
    (
      {'sft.short_steps': 5, 'sft.steps': 5},
      r'^sft\.short_steps=5: must be below sft\.steps=5, or no second turn is seen$',
    ),
    ({'export.lora': 'adapter'}, r"^export\.lora='adapter': 'adapter' needs lora\.rank above 0$"),
    ({'sft.shape': (64, 2, 4, 2, 16)}, r'^sft\.shape=\(64, 2, 4, 2, 16\): must be six positive numbers$'),
    ({'sft.shape': ('a', 2, 4, 2, 16, 192)}, r"^sft\.shape=\('a', .*: must be six positive numbers$"),
    ({'sft.shape': (64, 2, 4, 0, 16, 192)}, r'^sft\.shape=\(64, 2, 4, 0, 16, 192\): must be six positive numbers$'),
    (
      {'sft.from_scratch': True, 'sft.shape': (64, 2, 4, 3, 16, 192)},
      r'^sft\.shape=\(64, .*: the 4 heads must be a multiple of the 3 of keys$',
    ),
    (
      {'sft.from_scratch': True, 'sft.shape': (64, 2, 4, 2, 15, 192)},
      r'^sft\.shape=\(64, .*: the width of a head must be even, and is 15$',
    ),
    # The linear attention of fresh weights.
    ({'sft.linear_layers': -1}, r'^sft\.linear_layers=-1: must be at least 0$'),
    ({'sft.linear_layers': 1}, r'^sft\.linear_layers=1: must be 0 unless sft\.from_scratch, and with sft\.tower$'),
    (_FRESH | {'sft.linear_layers': 1}, r'^sft\.linear_layers=1: must be 0 unless'),
    (
      {'sft.from_scratch': True, 'sft.linear_layers': 2},
      r'^sft\.shape=\(64, 2, .*\): the layers must be a multiple of 3$',
    ),
    # The vision tower of fresh weights.
    ({'sft.tower': (64, 2, 4, 128)}, r'^sft\.tower=\(64, 2, 4, 128\): must be empty unless sft\.from_scratch$'),
    (_FRESH | {'sft.tower': (64, 2, 4)}, r'^sft\.tower=\(64, 2, 4\): must be four positive numbers, or empty$'),
    (_FRESH | {'sft.tower': (60, 2, 4, 128)}, r'^sft\.tower=\(60, .*: the width must be a multiple of 4 heads, 16$'),
    (
      _FRESH | {'sft.shape': (64, 2, 4, 2, 4, 192)},
      r'^sft\.shape=.*: with sft\.tower the head width must be',
    ),
    (_FRESH | {'model.vision': 'frozen'}, r"^model\.vision='frozen': allowed: trained$"),
    (_FRESH | {'sft.tower': ()}, r"^model\.vision='trained': there is no vision tower to train: sft\.tower is empty$"),
    # Demonstrations with images.
    (
      {'envs.FrozenLake.observation': 'image'},
      r"^envs\.FrozenLake\.observation='image': model\.preset='tiny' reads text only",
    ),
    (
      {'envs.FrozenLake.observation': 'image', 'sft.from_scratch': True},
      r'^sft\.tower=\(\): FrozenLake shows images, so the model must read them$',
    ),
    (
      _FRESH | {'envs.FrozenLake.observation': 'image', 'sft.save_data': 'x'},
      r"^sft\.save_data='x': the play of FrozenLake shows images; files hold text only$",
    ),
    # Forms of replies.
    (
      {'sft.forms': ('no_think', 'think')},
      r"^sft\.forms=\('no_think', 'think'\): must be different ones of no_think",
    ),
    ({'sft.forms': ('no_think', 'no_think')}, r'^sft\.forms=.*: must be different ones of'),
    (
      {'sft.forms': ('no_think', 'free_think'), 'sft.levels': (1,), 'sft.batch_size': 1},
      r'^sft\.levels=\(1,\): must be at least 2, one for each of sft\.forms$',
    ),
    (
      {'sft.forms': ('no_think', 'free_think', 'world_modeling'), 'sft.levels': (65,), 'sft.batch_size': 60},
      r'^sft\.batch_size=60: must be at most the number of training demonstrations, 59$',
    ),
    # Paths.
    ({'sft.output': ''}, r"^sft\.output='': must be a path$"),
    ({'sft.output': 'a\nb'}, r"^sft\.output='a\\nb': must be a path of printable characters$"),
    ({'sft.output': 'a\0b'}, r"^sft\.output='a\\x00b': must be a path of printable"),
    ({'sft.output': '\x1b[2J'}, r"^sft\.output='\\x1b\[2J': must be a path of printable"),
    ({'sft.output': '../..'}, r"^sft\.output='\.\./\.\.': must be a path that ends in a name, not in '\.' or '\.\.'$"),
    ({'sft.output': 'a/./'}, r"^sft\.output='a/\./': must be a path that ends in a name"),
    ({'sft.data': 'a\nb'}, r"^sft\.data='a\\nb': must be a path of printable"),
    ({'sft.save_data': 'a\0b'}, r"^sft\.save_data='a\\x00b': must be a path of printable"),
    # Configs whose levels are not demonstrated.
    (
      {'sft.skip_held_out_of': (1, 2)},
      r'^sft\.skip_held_out_of=\(1, 2\): must be names of configs; allowed: .*frozenlake',
    ),
    ({'sft.skip_held_out_of': None}, r'^sft\.skip_held_out_of=None: must be names of configs; allowed: '),
    ({'sft.skip_held_out_of': (None,)}, r'^sft\.skip_held_out_of=\(None,\): must be names of configs; allowed: '),
    ({'sft.skip_held_out_of': ('a\nb',)}, r"^sft\.skip_held_out_of=\('a\\nb',\): must be names of configs; "),
    (
      {'sft.skip_held_out_of': ('frozenlake_pp',)},
      r"^sft\.skip_held_out_of=\('frozenlake_pp',\): must be names of configs; did you mean 'frozenlake_ppo'\? allowed",
    ),
    # Conversations in place of demonstrations.
    ({'sft.data': 'x', 'sft.value_coef': 0.1}, r'^sft\.value_coef=0\.1: conversations of sft\.data have no rewards'),
    (
      {'sft.data': 'x', 'sft.save_data': 'y'},
      r"^sft\.save_data='y': writes the solvers' play; must be empty with sft\.",
    ),
    # The levels.
    ({'sft.levels': (64, 64)}, r"^sft\.levels=\(64, 64\): must be one positive number for each of sft\.tags=\('Froz"),
    ({'sft.levels': (0,)}, r'^sft\.levels=\(0,\): must be one positive number for each'),
    ({'sft.levels': ('a',)}, r"^sft\.levels=\('a',\): must be one positive number for each"),
    ({'sft.levels': (), 'sft.tags': ()}, r'^sft\.levels=\(\): must be one positive number for each of sft\.tags=\(\)$'),
    ({'sft.tags': ('Nowhere',)}, r"^sft\.tags: 'Nowhere' is not defined in envs; allowed: .*FrozenLake"),
    ({'sft.tags': ('FrozenLak',)}, r"^sft\.tags: 'FrozenLak' is .* in envs; did you mean 'FrozenLake'\? allowed: "),
    (
      {'sft.tags': ('FrozenLake,Bandit',)},
      r"""^sft\.tags: '.*' is not defined in envs; several are written as --config\.sft\.tags="\('A','B'\)"; allowed""",
    ),
    (
      {'eval.first_level': _LAST - 1},
      r'^sft\.first_level=1000000000: demonstrated levels overlap with the held-out levels 1000004095\.\.1000004110$',
    ),
    (
      {'sft.first_level': 2**32 - 4095},
      r'^sft\.first_level=4294963201: must be at most 4294963200, for levels up to 4294967295$',
    ),
    ({'sft.first_level': 138}, r'^sft\.first_level=138: demonstrated levels overlap with .* levels 123\.\.138$'),
    ({'sft.levels': (64,)}, r'^sft\.batch_size=64: must be at most the number of training demonstrations, 60$'),
    (
      {'sft.levels': (20,), 'sft.group_size': 3, 'sft.batch_size': 58},
      r'^sft\.batch_size=58: must be at most the number of training demonstrations, 57$',
    ),
  ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_line(fields, message):
  assert_refused(check_sft, small_config(fields), message)


@pytest.mark.parametrize(
  ('least', 'names'),
  [
    (1, ('group_size', 'batch_size')),
    (2, ('steps',)),
    (0, ('actions_per_turn', 'learning_rate', 'value_coef', 'eval_every', 'checkpoint_every', 'short_steps')),
  ],
)
def test_numbers_that_are_too_small(least, names):
  for name in names:
    message = rf'^sft\.{name}={least - 1}(\.0)?: must be at least {least}$'
    assert_refused(check_sft, small_config({f'sft.{name}': least - 1}), message)


@pytest.mark.parametrize('name', ['noise', 'beginner', 'timid', 'hurry', 'discount'])
def test_probabilities_and_the_discount_are_fractions(name):
  check_sft(small_config({f'sft.{name}': 1.0}))
  for x in (-0.5, 1.5):
    assert_refused(check_sft, small_config({f'sft.{name}': x}), rf'^sft\.{name}={x}: must be between 0 and 1$')


@pytest.mark.parametrize(
  'fields',
  [
    {'sft.noise': 0.5, 'sft.beginner': 0.5},
    {'lora.rank': 4, 'export.lora': 'adapter'},
    {'eval.first_level': _LAST},
    {'sft.first_level': 139},
    {'sft.first_level': 2**32 - 4096},
    {'sft.output': '../a', 'sft.data': '', 'sft.skip_held_out_of': ('vagen_frozenlake', 'frozenlake_ppo:qwen2.5-0.5b')},
    {'sft.levels': (20,), 'sft.group_size': 3, 'sft.batch_size': 57},
    {'sft.tags': ('FrozenLake', 'Bandit'), 'sft.levels': (64, 8)},
    {'sft.data': 'x', 'sft.levels': (1,), 'eval.first_level': 1_000_000_000},  # levels have no effect
    {'sft.data': 'x', 'sft.tags': ('FrozenLake', 'Bandit'), 'sft.levels': (1,)},
  ],
)
def test_what_stands_beside_a_refused_config_is_allowed(fields):
  check_sft(small_config(fields))


def test_a_game_without_a_solver_cannot_be_demonstrated():
  config = small_config(sft__tags=('Mine',))
  with config.unlocked():
    config.envs.Mine = {
      'type': 'http', 'url': 'http://127.0.0.1:9', 'task': 'Guess.', 'max_turns': 1, 'max_actions': 1,
      'max_actions_per_turn': 1, 'max_words': 9,
    }  # fmt: skip
  assert_refused(check_sft, config, r"^sft\.tags: 'Mine' has no solver whose play could be demonstrated$")
  config.sft.data = 'x'
  check_sft(config)


def test_half_a_batch_must_divide_over_the_row_shards(monkeypatch):
  monkeypatch.setattr(sft_checks, 'row_shards', lambda mesh: 8)
  check_sft(small_config())
  check_sft(small_config(sft__batch_size=24, sft__packing=True))
  message = r'sft\.batch_size=24: half of it, 12, goes through the model at once and must be a multiple of 8 row shards'
  assert_refused(check_sft, small_config(sft__batch_size=24), message)


def test_several_processes_are_refused(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert_refused(check_sft, small_config(), r'^--mode=sft runs in one process, there are 2$')


def test_the_environments_of_a_config_whose_levels_are_skipped_must_exist(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text('from configs import default\n\n\ndef get_config():\n  config = default.get_config()\n')
  with path.open('a') as file:
    file.write("  config.eval.tags = ('Nowhere',)\n  return config\n")
  config = small_config({'sft.skip_held_out_of': (str(path),)})
  assert_refused(
    check_sft, config, r"^sft\.skip_held_out_of=.*mine\.py cannot be used: eval\.tags: 'Nowhere' is not defined"
  )
