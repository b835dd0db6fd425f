"""What tests of the endpoint's wire share: small tokenizers, requests, replies and their pieces."""

from __future__ import annotations

import pathlib
import random

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.reply_reader import BadCalls, ReplyReader
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.types import Finish, Generated, Piece, SamplingParams
from ragen_jax.serving.wire.images import ImageLimits
from ragen_jax.serving.wire.results import AnswerContext, Head
from ragen_jax.serving.wire.spec import CallSpec, RequestLimits
from tests.support.chat_templates import CALL_TAGS, QWEN3, QWEN3_TAGS, QWEN25, Kind, write_tokenizer
from tests.support.chat_templates import CHATML_TOKENS as SPECIALS

__all__ = ['CALL_TAGS', 'QWEN3_TAGS', 'SPECIALS']

VISION_TOKENS = ('<|vision_start|>', '<|image_pad|>', '<|vision_end|>')
# A visual token has 8 x 8 pixels.
PROCESSOR = ProcessorConfig(4, 2, 2, min_pixels=256, max_pixels=65536, mean=(0.5,) * 3, std=(0.5,) * 3)
IMAGES = ImageLimits(PROCESSOR, count=3, tokens=64)

TOOL = {'type': 'function', 'function': {'name': 'look', 'parameters': {'type': 'object', 'properties': {}}}}
DEFAULTS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=64, stop=(), top_logprobs=0)


def tokenizer(directory: pathlib.Path, tags: tuple[str, ...], *, images: bool = False) -> ChatTokenizer:
  """A tokenizer with a token for each byte and tag, and the template of the model family that has such tags."""
  template = QWEN3 if '<think>' in tags else QWEN25 if tags else None
  specials = (*SPECIALS, *VISION_TOKENS) if images else SPECIALS
  return ChatTokenizer(write_tokenizer(directory, Kind(template, specials, tags, eos='<|im_end|>')), images=images)


def limits(**changes) -> RequestLimits:
  """Limits of a small server."""
  return RequestLimits(**dict(vocabulary=300, context=1000, replies=8, messages=50, tools=8, lenient=True) | changes)


def head(prefix: str) -> Head:
  """What the parts of an answer repeat."""
  return Head(id=f'{prefix}_1', created=1_700_000_000, model='policy')


def context(tok: ChatTokenizer, fmt: QwenFormat | None, spec: CallSpec, prefix: str) -> AnswerContext:
  """What the answer of a request is written with; without a format no reply is read."""
  options = dict(parse_calls=spec.parse_calls, parallel=spec.parallel_tool_calls)
  return AnswerContext(spec, head(prefix), DEFAULTS, lambda _: reader(fmt, **options), tok.decode, tok.token_bytes)


def generated(tok: ChatTokenizer, text: str, **changes) -> Generated:
  """A reply with this text, closed by the stop token unless its `finish` is another."""
  finish = changes.get('finish', Finish.STOP)
  ids = changes.get('ids', (*tok.encode(text), *((tok.stop_ids[0],) if finish is Finish.STOP else ())))
  n = len(ids)
  fields = {
    'ids': ids,
    'logprobs': -np.arange(1, n + 1, dtype=np.float32) / 8,
    'values': np.zeros(n, np.float32),
    'entropies': np.zeros(n, np.float32),
    'versions': np.full(n, 3, np.int32),
    'top': tuple(((i, -0.5), (65, -1.5)) for i in ids),
    'text': text,
    'finish': finish,
    'cached_tokens': 2,
    'stop_text': '',
  }
  return Generated(**fields | changes)


def pieces(tok: ChatTokenizer, reply: Generated, seed: int) -> list[Piece]:
  """The reply in random pieces, whose text lags behind their ids. Some of the end is left out."""
  draw = random.Random(seed)
  parts, at, shown = [], 0, 0
  while at < len(reply.ids):
    end = min(at + draw.randint(1, 4), len(reply.ids))
    known = tok.decode(reply.ids[:end]).removesuffix('<|im_end|>').rstrip('\ufffd')
    # The text up to here, less some characters that a stop text could begin with.
    ready = max(shown, min(len(known) - draw.choice([0, 0, 1, 3]), len(reply.text)))
    if draw.random() < 0.1 and end == len(reply.ids):
      break
    text = reply.text[shown:ready]
    parts.append(Piece(reply.ids[at:end], reply.logprobs[at:end], reply.top[at:end], text))
    at, shown = end, ready
  return parts


def reader(fmt: QwenFormat, prompt=(), **changes) -> ReplyReader:
  """A reader that looks for tool calls."""
  options = dict(parse_calls=True, tools=(), bad_calls=BadCalls.CONTENT, parallel=True, call_id='call_{}'.format)
  return fmt.reader(prompt, **options | changes)
