"""Text and segments to token ids and back: a Hugging Face tokenizer with the ChatML format."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from ragen_jax.agent.segments import (
  Encoded,
  ImageSegment,
  ImageSpan,
  Observation,
  Segments,
  TextSegment,
  join,
)
from ragen_jax.utils.errors import UserError

_IM_START = '<|im_start|>'
_IM_END = '<|im_end|>'
# An image of the Qwen-VL family: start, one placeholder for each embedding, end.
_IMAGE_TOKENS = ('<|vision_start|>', '<|image_pad|>', '<|vision_end|>')
# Tokens of images, videos and places in images, which replies of text have no use for.
_VISION_TOKENS = (
  *_IMAGE_TOKENS, '<|vision_pad|>', '<|video_pad|>', '<|object_ref_start|>', '<|object_ref_end|>', '<|box_start|>',
  '<|box_end|>', '<|quad_start|>', '<|quad_end|>',
)  # fmt: skip
# Texts of which the ids are kept, and the longest of them in characters; prompts repeat short texts.
_CACHED_SEGMENTS = 65536
_LONGEST_CACHED = 4096
_OPENING = re.compile(rf'{re.escape(_IM_START)}(\w+)\n')


@functools.cache
def _byte_of_characters() -> dict[str, int]:
  """The bytes that the characters of byte-level tokens stand for.

  Printable characters of Latin-1 stand for their own bytes, and the characters from U+0100 on for the other bytes.
  """
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(others)}


class ChatTokenizer:
  """A Hugging Face tokenizer and ChatML, the format of the Qwen family.

  A conversation is cut after each reply. Every piece begins after a special token and ends with the text that opens the
  next reply, so the concatenated ids of the pieces are the ids of the whole conversation.

  Attributes:
    stop_ids: ids that end a reply; the first is the stop token of the chat format.
    pad_id: id for unused columns.
    size: number of ids; larger ids are not tokens of this tokenizer.
    specials: texts of special tokens, which plain text must not contain.
    added: id of each added token, by its text; special tokens are a part of them.
    banned: ids that are never sampled, ascending: the tokens of images if the model reads images.
  """

  def __init__(self, directory: str | Path, *, images: bool = False):
    """Reads the tokenizer in a model directory.

    Args:
      directory: a directory with tokenizer.json.
      images: whether the model in the directory reads images.

    Raises:
      UserError: the directory has no tokenizer, or the tokenizer lacks the tokens of ChatML or, with `images`, of
        images.
    """
    try:
      tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
      raise UserError(f'model.path={directory}: no tokenizer can be read there ({str(e).splitlines()[0]})') from e
    self._directory = directory
    self._backend = tokenizer.backend_tokenizer
    end, start = self._backend.token_to_id(_IM_END), self._backend.token_to_id(_IM_START)
    if end is None or start is None:
      raise UserError(f'model.path={directory}: the tokenizer lacks {_IM_START} or {_IM_END}; ChatML models only')
    self._image_ids = tuple(map(self._backend.token_to_id, _IMAGE_TOKENS)) if images else None
    if images and None in self._image_ids:
      raise UserError(f'model.path={directory}: the tokenizer lacks {" or ".join(_IMAGE_TOKENS)}')
    others = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    self.stop_ids = tuple(dict.fromkeys([end, *others]))
    self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    self.size = self._backend.get_vocab_size(with_added_tokens=True)
    added = self._backend.get_added_tokens_decoder()
    self.specials = tuple(t.content for t in added.values() if t.special)
    self.added = {token.content: i for i, token in added.items()}
    self.banned = tuple(sorted(self.added[t] for t in _VISION_TOKENS if t in self.added)) if images else ()
    self._cached = functools.lru_cache(maxsize=_CACHED_SEGMENTS)(self.encode_once)

  def same_tokens(self, other: ChatTokenizer) -> bool:
    """Whether both tokenizers have the same token for each id."""
    mine, theirs = (x._backend.get_vocab(with_added_tokens=True) for x in (self, other))
    return mine == theirs

  @property
  def placeholder(self) -> int | None:
    """The id that stands for each token of an image; None for a model that reads text only."""
    return None if self._image_ids is None else self._image_ids[1]

  def encode(self, text: str) -> tuple[int, ...]:
    """The ids of a text, in which a special token may be spelled. Those of short texts are kept."""
    return self._cached(text) if len(text) <= _LONGEST_CACHED else self.encode_once(text)

  def encode_once(self, text: str) -> tuple[int, ...]:
    """`encode` for a text that is unlikely to come again: the ids are not kept."""
    return tuple(self._backend.encode(text, add_special_tokens=False).ids)

  def encode_segments(self, segments: Segments) -> Encoded:
    """Encodes segments as ids, with the columns of their images.

    Raises:
      UserError: there is an image, and the model reads no images.
    """
    ids: tuple[int, ...] = ()
    images = []
    for segment in segments:
      if isinstance(segment, TextSegment):
        ids += self.encode(segment.text)
      elif isinstance(segment, ImageSegment):
        if self._image_ids is None:
          raise UserError(f'model.path={self._directory}: the model reads text only, and a prompt holds an image')
        start, placeholder, end = self._image_ids
        first = len(ids) + 1
        ids += (start, *(placeholder,) * segment.columns, end)
        images.append(ImageSpan(segment, first, first + segment.columns))
      else:
        ids += segment.ids
    return Encoded(ids, tuple(images))

  def decode(self, ids) -> str:
    """The text of ids, including special tokens."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

  def token_bytes(self, id_: int) -> bytes:
    """The bytes of one token, which may be a part of a character; b'' for an id that is no token."""
    token = self._backend.id_to_token(id_)
    if token is None or token in self.added:
      return (token or '').encode()
    byte_of = _byte_of_characters()
    return bytes(byte_of[character] for character in token)

  def count_until(self, ids: Sequence[int], text: str) -> int:
    """Number of the first ids whose text contains `text`, which is ASCII; 0 if that of all ids does not."""
    ids = [int(i) for i in ids]
    if text not in self.decode(ids):
      return 0
    low, high = 1, len(ids)
    while low < high:
      middle = (low + high) // 2
      low, high = (low, middle) if text in self.decode(ids[:middle]) else (middle + 1, high)
    return low

  def decode_batch(self, rows: list[list[int]]) -> list[str]:
    """`decode` for many rows."""
    return self._backend.decode_batch(rows, skip_special_tokens=False)

  def opening(self, system: str, user: Observation, reply_prefix: str) -> Segments:
    """The beginning of a conversation: system and user message, and the opening of the reply."""
    return join(f'{_IM_START}system\n{system}{_IM_END}\n', self._user(user, reply_prefix))

  def following(self, user: Observation, reply_prefix: str, *, closed: bool) -> Segments:
    """The segments between two replies.

    Args:
      user: the user's message.
      reply_prefix: the part of the next reply that is forced.
      closed: the previous reply ended with the format's stop token; otherwise the token is added here.
    """
    return join('' if closed else _IM_END, '\n', self._user(user, reply_prefix))

  @staticmethod
  def before_reply(messages: list[tuple[str, str]], reply_prefix: str, *, first: bool) -> str:
    """The text before a reply of any conversation.

    Args:
      messages: (role, text) of the messages between the previous reply, which is closed, and this reply.
      reply_prefix: the part of the reply that is forced.
      first: this is the first reply.
    """
    written = ''.join(f'{_IM_START}{role}\n{text}{_IM_END}\n' for role, text in messages)
    return f'{"" if first else chr(10)}{written}{_IM_START}assistant\n{reply_prefix}'

  @staticmethod
  def messages(text: str) -> list[tuple[str, str]]:
    """The (role, text) of each message of a conversation in the chat format."""
    found = []
    for part in text.split(_IM_END)[:-1]:
      opening = _OPENING.search(part)
      if opening is not None:
        found.append((opening[1], part[opening.end() :]))
    return found

  @staticmethod
  def _user(message: Observation, reply_prefix: str) -> Segments:
    return join(f'{_IM_START}user\n', message, f'{_IM_END}\n{_IM_START}assistant\n{reply_prefix}')
