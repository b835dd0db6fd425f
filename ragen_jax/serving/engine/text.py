"""Engine: the text of a reply while its tokens arrive, complete characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A decoder writes this character for bytes that are not, or not yet, a character.
_INCOMPLETE = '\ufffd'


class ReplyText:
  """The text of one reply; `stop` is the stop string that ended it, '' if none did.

  The text that `release` has returned never changes afterwards: an incomplete character at the end is held back, as is
  text that may be the beginning of a stop string.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]):
    """The text of ids is that of their parts unless a cut divides a character; no stop text is empty."""
    self.stop = ''
    self._decode = decode
    self._stops = tuple(stops)
    self._overlap = max(map(len, self._stops), default=1) - 1
    self._text = ''  # of all complete characters; cut before the stop string once one is found
    self._settled = 0  # characters of `_text` that the ids in `_open` do not belong to
    self._open: list[int] = []  # the last ids, since the text ended with a complete character
    self._released = 0

  def add(self, ids: Sequence[int]) -> int:
    """Appends ids; returns how many belong to the reply: all, or those up to the token that completed a stop string."""
    before = max(len(self._text) - self._overlap, 0)
    found, text = self._with(ids), ''
    if self._first_stop(found, before) is None:
      self._text = found
      self._settle(ids)
      return len(ids)
    for n in range(1, len(ids) + 1):
      text = self._with(ids[:n])
      stop = self._first_stop(text, before)
      if stop is not None:
        break
    at, self.stop = stop
    self._text = text[:at]
    return n

  def finish(self) -> str:
    """The whole text of a reply that gets no further ids; an incomplete character at its end stays as U+FFFD."""
    if not self.stop:
      self._text = self._text[: self._settled] + self._decode(self._open)
    return self._text

  def release(self, *, final: bool) -> str:
    """The text that was not returned before and will not change; all of it if `final`, after `finish`."""
    end = len(self._text)
    if not final:
      end -= next((n for n in range(min(self._overlap, end), 0, -1) if self._may_begin_stop(self._text[-n:])), 0)
    text = self._text[self._released : end]
    self._released = max(self._released, end)
    return text

  def _with(self, ids: Sequence[int]) -> str:
    """The complete characters of the text with more ids."""
    new = self._decode([*self._open, *ids])
    return self._text[: self._settled] + (new[:-1] if new.endswith(_INCOMPLETE) else new)

  def _settle(self, ids: Sequence[int]) -> None:
    self._open += ids
    text = self._decode(self._open)
    if not text.endswith(_INCOMPLETE):
      self._settled, self._open = len(self._text), []
      return
    # An incomplete character has at most 3 bytes, so the ids before the last 3 are complete, or no characters at all.
    # The cut must not divide a character: one of 4 neighbouring places does not.
    for cut in range(len(self._open) - 3, max(len(self._open) - 7, 0), -1):
      settled = self._decode(self._open[:cut])
      if settled + self._decode(self._open[cut:]) == text:
        self._settled += len(settled)
        del self._open[:cut]
        return

  def _first_stop(self, text: str, start: int) -> tuple[int, str] | None:
    """Position and text of the first stop string from a position on; of those at one position, the first given."""
    found = [(text.find(stop, start), i) for i, stop in enumerate(self._stops)]
    at, i = min((f for f in found if f[0] >= 0), default=(-1, -1))
    return None if at < 0 else (at, self._stops[i])

  def _may_begin_stop(self, tail: str) -> bool:
    return any(stop.startswith(tail) for stop in self._stops)
