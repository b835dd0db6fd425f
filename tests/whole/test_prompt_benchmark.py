"""benchmarks/prompt_search.py: its critic reads the requests of a search, and its result is of its code."""

from __future__ import annotations

import json

import pytest

from ragen_jax.prompt_search import wording
from ragen_jax.prompt_search.wording import Failure
from tests.support.benchmarks import benchmark


@pytest.fixture(scope='module')
def script():
  with benchmark('prompt_search') as module:
    yield module


def test_the_critic_changes_one_line(script):
  known = script.game_text().split('\n')
  prompt, changes = script.game_text().lower(), set()
  for i in range(40):
    request = wording.critique_request(prompt, [Failure(str(i), 0.0, '', (('| a', 'b'),))], 2000)
    critique = script.answer(request[-1]['content'], known)
    assert wording.read_prompt(critique) is None
    reply = script.answer(wording.edit_request(prompt, critique, 8000, 2000)[-1]['content'], known)
    text = wording.read_prompt(reply)
    changes.add(text)
    lines = text.split('\n')
    assert abs(len(lines) - len(known)) <= 1
    assert sum(line in lines for line in prompt.split('\n')) >= len(known) - 1
  assert len(changes) > 8 and any(line in text.split('\n') for text in changes for line in known)


def test_the_result_is_of_this_search(script):
  result = json.loads(script.RESULT.read_text())
  assert result['size'] == script.FULL and result['prompts'][0]['text'] == script.game_text().lower()
  assert result['final']['difference'] > 3 * result['final']['difference_error'] > 0
