"""Parts of answers: log-probabilities, usage, versions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragen_jax.agent.reply_reader import ParsedReply
from ragen_jax.serving.types import Piece
from ragen_jax.serving.wire.results import Choice, Rest, token_logprobs, usage, versions, whole
from tests.support.wire import generated, pieces, tokenizer


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), ())


def _choice(tok, index, prompt, text, **changes):
  return Choice(index, prompt, generated(tok, text, **changes), ParsedReply(text, '', (), (), 1), '')


def test_tokens_have_their_bytes_and_alternatives(tok):
  ids = tok.encode('aé')
  top = tuple(((i, -0.5), (tok.encode('b')[0], -math.inf)) for i in ids)
  piece = Piece(ids, np.array([-0.25, -math.inf, -0.5]), top, 'aé')
  first, second, third = token_logprobs(piece, 1, tok.token_bytes)
  alternative = {'token': 'a', 'logprob': -0.5, 'bytes': [97]}
  assert first == {'token': 'a', 'logprob': -0.25, 'bytes': [97], 'top_logprobs': [alternative]}
  assert (second['token'], second['logprob']) == ('\ufffd', -9999.0)
  assert bytes(second['bytes'] + third['bytes']).decode() == 'é'
  assert token_logprobs(piece, 2, tok.token_bytes)[0]['top_logprobs'][1]['logprob'] == -9999.0
  bad = Piece(ids[:1], np.array([math.nan]), (), 'a')
  assert token_logprobs(bad, 0, tok.token_bytes)[0]['logprob'] == -9999.0  # JSON has no NaN
  # A list, even without alternatives: clients iterate over it.
  assert token_logprobs(Piece(ids, np.zeros(3), (), ''), 0, tok.token_bytes)[0]['top_logprobs'] == []


def test_the_rest_is_what_no_piece_had(tok):
  reply = generated(tok, 'héllo wörld')
  for seed in range(20):
    rest, sent = Rest(), pieces(tok, reply, seed)
    for piece in sent:
      rest.add(piece)
    sent.append(rest.of(reply))
    assert sum((piece.ids for piece in sent), ()) == reply.ids
    assert ''.join(piece.text for piece in sent) == reply.text
    np.testing.assert_array_equal(np.concatenate([piece.logprobs for piece in sent]), reply.logprobs)
    assert sum((tuple(piece.top) for piece in sent), ()) == reply.top
  assert whole(reply).ids == reply.ids


def test_usage_counts_a_prompt_once(tok):
  choices = [
    _choice(tok, 0, (1, 2, 3), 'ab', cached_tokens=1),
    _choice(tok, 1, (1, 2, 3), 'abc', cached_tokens=3),
    _choice(tok, 2, (1, 2), 'a', cached_tokens=2),
  ]
  assert usage(choices, 2) == {
    'prompt_tokens': 5,
    'completion_tokens': 3 + 4 + 2,
    'total_tokens': 14,
    'prompt_tokens_details': {'cached_tokens': 3},
    'completion_tokens_details': {'reasoning_tokens': 3},
  }


def test_usage_counts_each_prompt_of_a_list_also_if_they_are_equal(tok):
  choices = [_choice(tok, i, (1, 2, 3), 'a', cached_tokens=i) for i in range(4)]
  counted = usage(choices, 2)
  assert counted['prompt_tokens'] == 6 and counted['prompt_tokens_details'] == {'cached_tokens': 0 + 2}


def test_versions_are_those_of_all_tokens(tok):
  choices = [
    _choice(tok, 0, (1,), 'ab', versions=np.array([4, 4, 5], np.int32)),
    _choice(tok, 1, (1,), 'a', versions=np.array([3, 4], np.int32)),
  ]
  assert versions(choices) == {'policy_version': 5, 'policy_versions': {'min': 3, 'max': 5}}
  assert versions([_choice(tok, 0, (1,), '', ids=(), versions=np.zeros(0, np.int32))]) == {}
