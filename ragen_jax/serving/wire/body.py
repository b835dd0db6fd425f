"""Wire: request bodies, bytes to a JSON object, and typed reads of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen_jax.serving.errors import bad_request, too_large, wrong_value
from ragen_jax.serving.wire.fields import Field, Treatment
from ragen_jax.utils.tool_calls import encodable, parse_json

_DEEPEST = 100


def read_json(raw: bytes, limit: int) -> dict[str, Any]:
  """The JSON object in a request's body of at most `limit` bytes, with every lone surrogate replaced by U+FFFD.

  ApiError if the body is too large, is no JSON object in UTF-8, or is nested too deeply.
  """
  if len(raw) > limit:
    raise too_large(limit)
  try:
    text = raw.decode('utf-8')
    body = parse_json(text)
  except ValueError as e:
    raise bad_request('', f'the body is no JSON: {e}', 'invalid_json') from e
  if not isinstance(body, dict):
    raise bad_request('', f'the body must be a JSON object, not {type(body).__name__}', 'invalid_json')
  _check_depth(body)
  return _mend(body) if '\\u' in text else body


def _check_depth(body: dict[str, Any]) -> None:
  level: list[Any] = [body]
  for _ in range(_DEEPEST):
    level = [child for node in level for child in _children(node)]
    if not level:
      return
  raise bad_request('', f'the body is nested more than {_DEEPEST} levels deep', 'invalid_json')


def _children(node: Any) -> list[Any]:
  children = node.values() if isinstance(node, dict) else node
  return [child for child in children if isinstance(child, dict | list)]


def _mend(node: Any) -> Any:
  """The JSON value with `encodable` texts."""
  if isinstance(node, str):
    return encodable(node)
  if isinstance(node, list):
    return [_mend(child) for child in node]
  if isinstance(node, dict):
    return {_mend(key): _mend(child) for key, child in node.items()}
  return node


class Body:
  """The fields of a request; null is the same as absent.

  Every read names a field that the table marks as honoured. `unread` returns the others, so a test can compare the
  table with the code.
  """

  def __init__(self, body: dict[str, Any], fields: Sequence[Field]):
    """Refuses what the table refuses: ApiError if a refused field has a value with an effect."""
    self._body = body
    self._unread = {field.name for field in fields if field.treatment in (Treatment.HONOUR, Treatment.LENIENT)}
    self._names = frozenset(self._unread)
    for field in fields:
      if field.treatment is Treatment.REFUSE and not field.is_neutral(body.get(field.name)):
        raise wrong_value(field.name, body[field.name], f'{field.allowed()}; {field.note}')

  @property
  def unread(self) -> frozenset[str]:
    """Fields of the table that no method has read."""
    return frozenset(self._unread)

  def value(self, name: str) -> Any:
    """The value as it came; None if absent."""
    if name not in self._names:
      raise KeyError(f'{name} is not a field that is honoured')
    self._unread.discard(name)
    return self._body.get(name)

  def boolean(self, name: str, default: bool) -> bool:
    """true or false."""
    value = self.value(name)
    if value is None:
      return default
    if not isinstance(value, bool):
      raise wrong_value(name, value, 'true or false')
    return value

  def integer(self, name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; None if absent."""
    value = self.value(name)
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if value is None or (type(value) is int and low <= value <= high):
      return value
    raise wrong_value(name, value, f'a whole number from {low} to {high}')

  def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """A number from `low` (above it, with `above`) to `high`; None if absent."""
    value = self.value(name)
    if value is None:
      return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
      allowed = f'above {low:g}, at most {high:g}' if above else f'from {low:g} to {high:g}'
      raise wrong_value(name, value, f'a number {allowed}')
    return float(value)

  def string(self, name: str) -> str:
    """A text; '' if absent."""
    value = self.value(name)
    if value is None:
      return ''
    if not isinstance(value, str):
      raise wrong_value(name, value, 'a text')
    return value

  def mapping(self, name: str) -> dict[str, Any]:
    """A JSON object; empty if absent."""
    value = self.value(name)
    if value is None:
      return {}
    if not isinstance(value, dict):
      raise wrong_value(name, value, 'an object')
    return value

  def items(self, name: str, limit: int) -> list[Any]:
    """A list of at most `limit` items; empty if absent."""
    value = self.value(name)
    if value is None:
      return []
    if not isinstance(value, list):
      raise wrong_value(name, value, 'a list')
    if len(value) > limit:
      raise bad_request(name, f'{name} has {len(value)} items: must be at most {limit}')
    return value
