"""Text and segments to token ids and back: a Hugging Face tokenizer with the chat format of its template."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax.agent.chat_template import END_THOUGHT, SYSTEM, THOUGHT, TOOL, USER, Around
from ragen_jax.agent.segments import (
  Encoded,
  ImageSegment,
  ImageSpan,
  Observation,
  Segments,
  TextSegment,
  as_text,
  join,
  map_text,
  stripped,
)
from ragen_jax.agent.template_probe import find_format
from ragen_jax.agent.tool_format import FormatText
from ragen_jax.agent.tool_probe import find_tools
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import CALL, END_CALL

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


@functools.cache
def _byte_of_characters() -> dict[str, int]:
  """The bytes that the characters of byte-level tokens stand for.

  Printable characters of Latin-1 stand for their own bytes, and the characters from U+0100 on for the other bytes.
  """
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(others)}


def _reader(directory: str | Path) -> type:
  """The class of transformers that reads the directory's tokenizer: the one that `AutoTokenizer` chooses.

  It is imported late: that takes more than a second, and many commands read no tokenizer. `AutoTokenizer` imports
  PyTorch as well where it is installed, which takes longer still, so it is not asked about Qwen2, the type of the
  built-in model and of Qwen2.5: whatever class such a folder names, it chooses Qwen2's.
  """
  try:
    config = json.loads((Path(directory) / 'config.json').read_text())
    known = config['model_type'] == 'qwen2' and (Path(directory) / 'tokenizer.json').is_file()
  except (OSError, ValueError, LookupError, TypeError):
    known = False
  if known:
    from transformers import Qwen2Tokenizer as reader
  else:
    from transformers import AutoTokenizer as reader
  return reader


class ChatTokenizer:
  """A Hugging Face tokenizer and the format of its chat template.

  A conversation is cut after each reply. Every piece begins after a special token and ends with the text that opens the
  next reply, so the concatenated ids of the pieces are the ids of the whole conversation.

  Attributes:
    format: the chat format.
    tools: the format of tools: the template's, or Qwen2.5's if the template has none that can be followed.
    tools_refused: what the template does instead; '' if `tools` is the template's.
    call_tags: the tags around calls that have tokens, by id.
    stop_ids: ids that end a reply; the first is the stop token of the chat format.
    pad_id: id for unused columns.
    size: number of ids; larger ids are not tokens of this tokenizer, or special ones that its model has no row for.
    specials: texts of special tokens and of the chat format's marks, which plain text must not contain.
    marks: those of `specials` that are texts without a token of their own.
    added: id of each added token, by its text; special tokens are a part of them.
    banned: ids that are never sampled, ascending: those without a token, and the tokens of images if the model reads
      images.
  """

  def __init__(self, directory: str | Path, *, images: bool = False):
    """Reads the tokenizer in a model directory; `images` tells whether the model reads images.

    Raises:
      UserError: the directory has no tokenizer, its chat format cannot be followed (see `find_format`), or it lacks,
        with `images`, the tokens of images.
    """
    try:
      tokenizer = _reader(directory).from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
      raise UserError(f'model.path={directory}: no tokenizer can be read there ({str(e).splitlines()[0]})') from e
    self._directory = directory
    self._backend = tokenizer.backend_tokenizer
    self.format = find_format(tokenizer, f'model.path={directory}')
    self.tools, refused = find_tools(tokenizer, self.format)
    if self.tools.strips_results:
      self.format = dataclasses.replace(self.format, stripped=self.format.stripped | {TOOL})
    self.tools_refused = f'model.path={directory}: its chat template {refused}' if refused else ''
    end = self._backend.token_to_id(self.format.end)
    self._image_ids = tuple(map(self._backend.token_to_id, _IMAGE_TOKENS)) if images else None
    if images and None in self._image_ids:
      raise UserError(f'model.path={directory}: the tokenizer lacks {" or ".join(_IMAGE_TOKENS)}')
    self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    self.size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
    others = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    others += [i for i in _ends_of_generation(Path(directory)) if 0 <= i < self.size]
    self.stop_ids = tuple(dict.fromkeys([end, *others]))
    added = self._backend.get_added_tokens_decoder()
    self.added = {token.content: i for i, token in added.items()}
    special = [t.content for t in added.values() if t.special and t.content]
    used, marks = _marks(self.format.texts, special, [t.content for t in added.values() if t.content and not t.special])
    self.marks = tuple(dict.fromkeys(marks))
    self.specials = tuple(dict.fromkeys([*special, *used, *marks]))
    rows = _described(Path(directory), ('config.json',), 'vocab_size')
    beyond = {text for text, i in self.added.items() if isinstance(rows, int) and i >= rows}
    in_use = any(text in fixed for text in beyond for fixed in self.format.texts)
    if beyond <= {*special} and len(beyond) == self.size - (rows or 0) and not in_use:
      self.size = rows  # Gemma 3's tokenizer has a token of images for models that read text only
    self._spelled = _any_of(self.specials)
    tags = (CALL, END_CALL, *re.findall(r'<[^<>|]+>', self.tools.results.before + self.tools.results.after))
    self._spelled_with_tools = _any_of((*self.specials, *tags))
    self.call_tags = {self.added[tag]: tag for tag in (CALL, END_CALL) if tag in self.added}
    banned = [self.added[t] for t in _VISION_TOKENS if t in self.added] if images else []
    if self._backend.get_vocab_size(with_added_tokens=True) < self.size:  # some ids have no token
      banned += [i for i in range(self.size) if self._backend.id_to_token(i) is None]
    self.banned = tuple(sorted(banned))
    self._cached = functools.lru_cache(maxsize=_CACHED_SEGMENTS)(self.encode_once)
    self._check_pieces()

  def _check_pieces(self) -> None:
    """Raises UserError if the ids of a conversation are not those of its pieces, as with a space before each text."""
    pieces = [as_text(self.opening('a', 'b', '')), 'c', as_text(self.following('d', '', closed=False))]
    if sum(map(self.encode_once, pieces), ()) != self.encode_once(''.join(pieces)):
      raise UserError(
        f'model.path={self._directory}: the tokenizer cannot encode a conversation piece by piece: its tokens reach '
        'over the beginnings and ends of replies'
      )

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

  def ends(self, text: str) -> list[int]:
    """The index behind the last character of each token of a text; equal for tokens of one character."""
    return [end for _, end in self._backend.encode(text, add_special_tokens=False).offsets]

  def encode_segments(self, segments: Segments) -> Encoded:
    """Encodes segments as ids, with the columns of their images; UserError for images if the model reads none."""
    ids: tuple[int, ...] = ()
    images = []
    for segment in segments:
      if isinstance(segment, TextSegment):
        ids += self.encode(segment.text)
      elif isinstance(segment, ImageSegment):
        if self._image_ids is None:
          raise UserError(f'model.path={self._directory}: the model reads text only, and a prompt holds an image')
        first = len(ids) + 1
        ids += self.image_ids(segment.columns)
        images.append(ImageSpan(segment, first, first + segment.columns))
      else:
        ids += segment.ids
    return Encoded(ids, tuple(images))

  def image_ids(self, columns: int) -> tuple[int, ...]:
    """The ids of an image of so many placeholders, for a model that reads images."""
    start, placeholder, end = self._image_ids
    return (start, *(placeholder,) * columns, end)

  @property
  def _has_bytes(self) -> bool:
    """Whether characters without a token are written as tokens of their bytes."""
    return getattr(self._backend.model, 'byte_fallback', False)

  def decode(self, ids) -> str:
    """The text of ids, including special tokens. Bytes that are no character become U+FFFD, and no others."""
    if self._has_bytes:  # the backend would replace all bytes beside a part of a character
      return b''.join(self.token_bytes(int(i)) for i in ids).decode('utf-8', 'replace')
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

  def token_bytes(self, id_: int) -> bytes:
    """The bytes of one token, which may be a part of a character; b'' for an id that is no token."""
    token = self._backend.id_to_token(id_)
    if token is None:
      return b''
    if token in self.added:
      return (token.replace('\u2581', ' ') if self._has_bytes else token).encode()
    if self._has_bytes:  # text, or the number of a byte
      byte = re.fullmatch('<0x([0-9A-F]{2})>', token)
      return bytes.fromhex(byte[1]) if byte else token.replace('\u2581', ' ').encode()
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
    if self._has_bytes:
      return [self.decode(row) for row in rows]
    return self._backend.decode_batch(rows, skip_special_tokens=False)

  def check_tools(self, what: str) -> None:
    """Raises UserError if the template has no tools that can be followed; `what` says what needs them."""
    if self.tools_refused:
      raise UserError(
        f'{what}. {self.tools_refused}; a template must write tools as JSON, and calls between {CALL} and {END_CALL} '
        'as that of Qwen2.5 (JSON) or that of Qwen3.5 (a tag for each argument)'
      )

  def opening(self, system: str, user: Observation, reply_prefix: str, functions: Sequence[str] = ()) -> Segments:
    """The beginning of a conversation: system and user message, and the opening of the reply.

    `functions` are the tools that the template lists, as JSON texts.
    """
    around = self.format.around(USER, behind_system=True)
    if not functions:
      return join(self.format.beginning(self.harmless(system)), self._message(user, reply_prefix, around))
    parts = self.tools.beginning(self.format.strip(SYSTEM, system), functions)
    texts = [x.text if isinstance(x, FormatText) else self.harmless(x, tools=True) for x in parts]
    return join(*texts, self._message(user, reply_prefix, around, tools=True))

  def following(
    self, message: Observation, reply_prefix: str, *, closed: bool, role: str = USER, tools: bool = False
  ) -> Segments:
    """The segments between two replies.

    Args:
      message: of the user, or with the role 'tool' the result of the call of the previous reply.
      reply_prefix: the part of the next reply that is forced, see `ChatFormat.reply_prefix`.
      closed: the previous reply ended with the format's stop token; otherwise the token is added here.
      tools: whether the conversation began with `functions`.
    """
    around = self.tools.results if role == TOOL else self.format.user
    written = self._message(message, reply_prefix, around, role=role, tools=tools)
    return join('' if closed else self.format.end, self.format.separator, written)

  def before_reply(self, messages: list[tuple[str, str]], reply_prefix: str, *, first: bool) -> str:
    """The text before a reply of any conversation, with the forced part `reply_prefix` of the reply, all of it.

    `messages` are (role, text) between the previous reply, which is closed, and this reply. A system message is the
    first of the conversation.
    """
    system = [text for role, text in messages if role == SYSTEM]
    others = [message for message in messages if message[0] != SYSTEM]
    written = '' if first else self.format.separator
    written += self.format.talk(others, system=system[0] if system else None, first=first)
    return f'{written}{self.format.assistant.before}{reply_prefix}'

  def messages(self, text: str) -> list[tuple[str, str]]:
    """The (role, text) of each message of a conversation in the chat format."""
    return self.format.messages(text)

  def _message(
    self, message: Observation, reply_prefix: str, around: Around, *, role: str = USER, tools: bool = False
  ) -> Segments:
    form = self.format
    message = map_text(functools.partial(self.harmless, tools=tools), message)
    message = stripped(message) if role in form.stripped else message
    return join(around.before, message, f'{around.after}{form.assistant.before}{form.reply_prefix(reply_prefix)}')

  def harmless(self, text: str, *, tools: bool = False) -> str:
    """The text with a space in each spelling of `specials`, so that it opens and ends no message.

    With `tools`, it opens and ends no call and no result either.
    """
    spelled = self._spelled_with_tools if tools else self._spelled
    return spelled.sub(lambda found: f'{found[0][:1]} {found[0][1:]}', text)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
  return re.compile('|'.join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _marks(texts: Sequence[str], specials: Sequence[str], others: Sequence[str]) -> tuple[list[str], list[str]]:
  """What tells the messages of a format apart besides special tokens: other added tokens, and texts without any token.

  Tags of thoughts are left out, because contents may have them.
  """
  others = [token for token in others if token not in (THOUGHT, END_THOUGHT)]
  open_texts = [text for text in texts if text.strip() and not any(token in text for token in specials)]
  used = [token for token in others if any(token in text for text in open_texts)]
  return used, [text.strip() for text in open_texts if not any(token in text for token in used)]


def _ends_of_generation(directory: Path) -> list[int]:
  """The ids of `eos_token_id` in generation_config.json, or without that file in config.json: one id or several.

  A model with a vision tower has it in the part of the file that describes the text model.
  """
  found = _described(directory, ('generation_config.json', 'config.json'), 'eos_token_id')
  return [i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int) and not isinstance(i, bool)]


def _described(directory: Path, files: Sequence[str], field: str) -> Any:
  """A field of the first of some files that can be read; None if there is none."""
  for name in files:
    try:
      raw = json.loads((directory / name).read_text(encoding='utf-8'))
    except (OSError, ValueError):
      continue
    raw = raw if isinstance(raw, dict) else {}
    return (raw.get('text_config') or {}).get(field) if raw.get(field) is None else raw[field]
  return None
