"""The prompts of all shipped tags are, to the byte, those that the built-in models and published runs have seen.

The numbers are digests of the prompts of an earlier version. A change of a prompt needs new built-in models, so do not
replace a digest to make a test pass.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from configs import default
from ragen_jax import build
from ragen_jax.agent.context_manager import CONTEXTS, ContextManager
from ragen_jax.agent.episode import Turn
from tests.support.speakers import context_settings

DIGESTS = {
  'AlignTwoCube': '3921ae800ba8f483',
  'AlignTwoCubeTest': '3921ae800ba8f483',
  'Bandit': '9e0107667b7f08f4',
  'BanditPairs': 'f4fe33972afc3722',
  'BanditPairsTest': '7864c08b55135ec8',
  'BanditProfessions': 'f6f18bb1990218da',
  'BanditProfessionsTest': '5e335c5e3d104b2a',
  'BanditRev': '90348c074e432b26',
  'BanditRevTest': '677109915f47d8c1',
  'BanditTest': '677109915f47d8c1',
  'CoordFrozenLake': '0cdc59c75b378c61',
  'CoordSokoban': '6e030ca93133eded',
  'Countdown': '2a9ebf7701055cef',
  'FrozenLake': 'd91a155eb22260e9',
  'Game2048': '91be79595817d4b8',
  'LargerSokoban': '7fef54515e30666c',
  'Navigation': '200def2bf6a58107',
  'NavigationTest': '200def2bf6a58107',
  'NavigationValidation': '200def2bf6a58107',
  'PlaceTwoCube': 'f395f67513f004f3',
  'PlaceTwoCubeTest': 'f395f67513f004f3',
  'PutAppleInDrawer': '99e2a840669315ff',
  'PutAppleInDrawerTest': '99e2a840669315ff',
  'Rubik2x2': '08da3bc5c423e8a0',
  'SimpleSokoban': '74e5a841e5b43d63',
  'SokobanDifferentGridVocab': 'a5d2bd513292d89f',
  'StackThreeCube': '401fc479df1e178c',
  'StackThreeCubeTest': '401fc479df1e178c',
  'Sudoku': '3a64f25cca9931ba',
  'Sudoku9x9': '208998afa34a989e',
}

_BOARDS = {'bandit': 'Arms on offer:\nAsh\nOak\nThink'}
_REQUESTS = (default.get_config().agent.request, 'Say {form}, as {example}, of {actions}, in {max_words} words.')
_NOT_HERE = ('agent', 'alfworld', 'dataset', 'lean', 'svg', 'textworld', 'verifiers', 'webshop')
_TAGS = [tag for tag, options in default.get_config().envs.items() if options.type not in _NOT_HERE]


def texts_of(tag: str, tokenizer) -> list:
  """The prompts of three turns under every policy of the context, as messages and as tokens in text."""
  (spec,) = build.env_specs(default.get_config(), (tag,), (1,))
  board = _BOARDS.get(spec.env.name, 'a\nboard')
  found = []
  for policy in CONTEXTS:
    for request in _REQUESTS:
      context = ContextManager(tokenizer, [spec], context_settings(context=policy, request=request))
      past = []
      for turn in range(3):
        found.append(context.messages(0, past, f'{board} {turn}', 9 - turn))
        prompt = context.prompt(0, past, f'{board} {turn}', 9 - turn, used=0, room=10**6)
        found.append([prompt.fresh, tokenizer.decode(prompt.ids)])
        reply, ids = f'reply {turn}', tokenizer.encode(f'reply {turn}')
        past.append(
          Turn(f'{board} {turn}', reply, ['A', 'B'], (0.5, turn), 0.0, True, 1, actions_left=9 - turn, ids=ids)
        )
  return found


@pytest.mark.parametrize('tag', _TAGS)
@pytest.mark.slow_cases(*(tag for tag in _TAGS if tag.endswith(('Test', 'Validation'))))
def test_prompts_of_shipped_tags_are_those_of_before(tag, tiny):
  told = json.dumps(texts_of(tag, tiny), ensure_ascii=False)
  assert hashlib.sha256(told.encode()).hexdigest()[:16] == DIGESTS[tag]


def test_every_shipped_tag_has_a_digest():
  assert set(DIGESTS) == set(_TAGS)
