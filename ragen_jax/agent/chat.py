"""Text to tokens and back: a tokenizer with a chat format, one segment at a time."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from transformers import AutoTokenizer

from ragen_jax.utils.errors import UserError

_IM_START = '<|im_start|>'
_IM_END = '<|im_end|>'
_CACHED_SEGMENTS = 65536


class ChatTokenizer:
  """A Hugging Face tokenizer and ChatML, the format of the Qwen family.

  A conversation is cut at the ends of replies. Every piece begins behind a special token and ends with the text that
  opens the next reply, so tokenizing the pieces equals tokenizing the whole.

  Attributes:
    stop_ids: ids that end a reply; the first is the one that the format asks for.
    pad_id: id for unused columns.
    size: ids from here on are not tokens of this tokenizer.
    specials: texts that stand for special tokens, which plain text must not hold.
  """

  def __init__(self, directory: str | Path):
    """Reads the tokenizer in a model directory.

    Raises:
      UserError: there is no tokenizer in it, or it has no ChatML tokens.
    """
    try:
      tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
      raise UserError(f'model.path={directory}: no tokenizer can be read there ({str(e).splitlines()[0]})') from e
    self._backend = tokenizer.backend_tokenizer
    end, start = self._backend.token_to_id(_IM_END), self._backend.token_to_id(_IM_START)
    if end is None or start is None:
      raise UserError(f'model.path={directory}: the tokenizer lacks {_IM_START} or {_IM_END}; ChatML models only')
    others = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    self.stop_ids = tuple(dict.fromkeys([end, *others]))
    self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    self.size = self._backend.get_vocab_size(with_added_tokens=True)
    self.specials = tuple(t.content for t in self._backend.get_added_tokens_decoder().values() if t.special)
    self.encode = functools.lru_cache(maxsize=_CACHED_SEGMENTS)(self._encode)

  def _encode(self, text: str) -> tuple[int, ...]:
    return tuple(self._backend.encode(text, add_special_tokens=False).ids)

  def decode(self, ids) -> str:
    """Ids to text, special tokens shown."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

  def decode_batch(self, rows: list[list[int]]) -> list[str]:
    """`decode` for many."""
    return self._backend.decode_batch(rows, skip_special_tokens=False)

  def opening(self, system: str, user: str, reply_prefix: str) -> str:
    """The first segment: system and user message, and the reply's opening."""
    return f'{_IM_START}system\n{system}{_IM_END}\n' + self._user(user, reply_prefix)

  def following(self, user: str, reply_prefix: str, *, closed: bool) -> str:
    """A later segment. `closed`: the reply before ended with the format's own stop token, else it is added here."""
    return ('' if closed else _IM_END) + '\n' + self._user(user, reply_prefix)

  @staticmethod
  def before_reply(messages: list[tuple[str, str]], reply_prefix: str, *, first: bool) -> str:
    """The segment before a reply of any conversation.

    Args:
      messages: (role, text) of what stands between the reply before, which is closed, and this one.
      reply_prefix: what of the reply is put there.
      first: there is no reply before.
    """
    told = ''.join(f'{_IM_START}{role}\n{text}{_IM_END}\n' for role, text in messages)
    return f'{"" if first else chr(10)}{told}{_IM_START}assistant\n{reply_prefix}'

  @staticmethod
  def messages(text: str) -> list[tuple[str, str]]:
    """The (role, text) of a conversation that is written in the chat format."""
    return re.findall(rf'{re.escape(_IM_START)}(\w+)\n(.*?){re.escape(_IM_END)}', text, re.DOTALL)

  @staticmethod
  def _user(text: str, reply_prefix: str) -> str:
    return ChatTokenizer.before_reply([('user', text)], reply_prefix, first=True)
