"""The table of the endpoints; the tests of each endpoint show that its stream says what its whole answer says."""

from __future__ import annotations

import pytest

from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.errors import internal
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.spec import Kind
from tests.support.wire import context, limits, tokenizer

BODIES = {
  Kind.CHAT: {'messages': [{'role': 'user', 'content': 'a'}]},
  Kind.COMPLETIONS: {'prompt': ['a', 'b']},
  Kind.RESPONSES: {'input': 'a'},
}


@pytest.mark.parametrize('kind', list(Kind))
def test_a_stream_of_each_endpoint_that_fails_ends_with_the_error(tmp_path, kind):
  endpoint, tok = ENDPOINTS[kind], tokenizer(tmp_path, ())
  spec = endpoint.parse({'model': 'policy', **BODIES[kind]}, limits())
  stream = endpoint.stream(context(tok, QwenFormat(tok, keep_thoughts=True), spec, 'x'))
  stream.start([(1,)] * max(len(spec.prompts), 1))
  assert spec.kind is kind and b'"it broke"' in stream.error(internal('it broke', retry=False))[-1]


def test_ids_of_answers_have_their_endpoints_prefix():
  assert len({endpoint.prefix for endpoint in ENDPOINTS.values()}) == len(Kind)
