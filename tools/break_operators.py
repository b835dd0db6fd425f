"""The operators of tools/breaks.py: which changes they make at a node of a syntax tree, and which nodes they leave.

A change is (start, end, new text), in bytes of the source. Everything else in the file stays as it is. Docstrings,
annotations, errors and log messages are never changed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

ARITHMETIC = {
  ast.Add: ('+', '-'), ast.Sub: ('-', '+'), ast.Mult: ('*', '/'), ast.Div: ('/', '*'), ast.FloorDiv: ('//', '*'),
  ast.Mod: ('%', '//'), ast.Pow: ('**', '*'), ast.BitAnd: ('&', '|'), ast.BitOr: ('|', '&'),
}  # fmt: skip
COMPARISON = {
  ast.Lt: ('<', '<='), ast.LtE: ('<=', '<'), ast.Gt: ('>', '>='), ast.GtE: ('>=', '>'), ast.Eq: ('==', '!='),
  ast.NotEq: ('!=', '=='), ast.In: ('in', 'not in'), ast.NotIn: ('not in', 'in'), ast.Is: ('is', 'is not'),
  ast.IsNot: ('is not', 'is'),
}  # fmt: skip
_PAIRS = ('min', 'max'), ('minimum', 'maximum'), ('argmin', 'argmax'), ('any', 'all'), ('floor', 'ceil')
EXTREMES = dict(_PAIRS) | {b: a for a, b in _PAIRS}
# What these say is no behaviour: `strict` and `daemon` guard against mistakes, the others make a program faster.
_IGNORED_KEYWORDS = {
  'strict', 'daemon', 'encoding', 'prefix', 'donate_argnums', 'static_argnums', 'static_argnames', 'unroll',
}  # fmt: skip
# Calls whose only argument cannot take their place, because every test would fail, or whose argument is as good almost
# everywhere, such as a scalar of NumPy for `int`.
_OTHER_TYPES = {
  'len', 'range', 'enumerate', 'iter', 'next', 'str', 'repr', 'type', 'isinstance', 'asdict', 'append', 'join', 'get',
  'int', 'float', 'TypeVar',
}  # fmt: skip
_SKIPPED = re.compile(r'_?(log|logger|logging|warnings)\.|os\.kill')


Changes = Iterator[tuple[int, int, str]]


class Source:
  """A source, its syntax tree, and where a node stands in it, in bytes."""

  def __init__(self, text: str):
    self.data, self.tree = text.encode(), ast.parse(text)
    self._lines = [0, *(m.end() for m in re.finditer(b'\n', self.data))]

  def start(self, node: ast.AST) -> int:
    return self._lines[node.lineno - 1] + node.col_offset

  def end(self, node: ast.AST) -> int:
    return self._lines[node.end_lineno - 1] + node.end_col_offset

  def text(self, node: ast.AST) -> str:
    return self.data[self.start(node) : self.end(node)].decode()

  def between(self, left: ast.AST, right: ast.AST, token: str, new: str) -> Changes:
    """Changes a token between two nodes, where else only brackets, spaces and comments stand."""
    gap = self.data[self.end(left) : self.start(right)]
    gap = re.sub(rb'#[^\n]*', lambda m: b' ' * len(m[0]), gap)
    if found := re.search(r'\s+'.join(re.escape(word) for word in token.split()).encode(), gap):
      yield self.end(left) + found.start(), self.end(left) + found.end(), new


def _is_text(node: ast.AST) -> bool:
  return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def arithmetic(source: Source, node: ast.AST) -> Changes:
  """Changes the operator of `a + b` and `a += b`, and drops the sign of `-a`."""
  if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left) | _is_text(node.right):
    yield from source.between(node.left, node.right, *ARITHMETIC[type(node.op)])
  if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC and not _is_text(node.value):
    yield from source.between(node.target, node.value, *ARITHMETIC[type(node.op)])
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    yield source.start(node), source.start(node) + 1, ''


def comparison(source: Source, node: ast.AST) -> Changes:
  """Includes or excludes the bound of `a < b`, and reverses `==`, `is` and `in`."""
  if isinstance(node, ast.Compare):
    sides = [node.left, *node.comparators]
    for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
      yield from source.between(left, right, *COMPARISON[type(op)])


def logic(source: Source, node: ast.AST) -> Changes:
  """Exchanges `and` with `or`, and drops `not` and `~`."""
  if isinstance(node, ast.BoolOp):
    token, new = ('and', 'or') if isinstance(node.op, ast.And) else ('or', 'and')
    for left, right in zip(node.values, node.values[1:], strict=False):
      yield from source.between(left, right, token, new)
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
    yield source.start(node), source.start(node) + (3 if isinstance(node.op, ast.Not) else 1), ''


def constant(source: Source, node: ast.AST) -> Changes:
  """Adds 1 to a number, and exchanges True with False."""
  if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
    new = not node.value if isinstance(node.value, bool) else node.value + 1
    yield source.start(node), source.end(node), repr(new)


def keyword(source: Source, node: ast.AST) -> Changes:
  """Drops a keyword argument of a call."""
  for argument in node.keywords if isinstance(node, ast.Call) else ():
    if argument.arg and argument.arg not in _IGNORED_KEYWORDS:
      end = source.end(argument)
      comma = re.match(rb'\s*,', source.data[end:])
      yield source.start(argument), end + (comma.end() if comma else 0), ''


def branch(source: Source, node: ast.AST) -> Changes:
  """Replaces `where(mask, a, b)` and `a if mask else b` by one of its branches."""
  both = [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
  if isinstance(node, ast.Call) and len(node.args) == 3 and _called(node) == 'where':
    both = node.args[1:]
  for one in both:
    yield source.start(node), source.end(node), f'({source.text(one)})'


def extreme(source: Source, node: ast.AST) -> Changes:
  """Exchanges `min` with `max`, `any` with `all`, and the like."""
  if isinstance(node, ast.Call) and (name := _called(node)) in EXTREMES:
    yield source.end(node.func) - len(name), source.end(node.func), EXTREMES[name]


def bound(source: Source, node: ast.AST) -> Changes:
  """Drops a bound of a slice."""
  for limit in (node.lower, node.upper) if isinstance(node, ast.Slice) else ():
    if limit is not None:
      yield source.start(limit), source.end(limit), ''


def statement(source: Source, node: ast.AST) -> Changes:
  """Deletes a call, an assignment that changes something, `break`, `continue`, or an `if` without `else`."""
  deleted = isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Delete)
  deleted |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
  deleted |= isinstance(node, ast.If) and not node.orelse
  if isinstance(node, ast.Assign):  # without a first assignment, a name would be missing
    target = node.targets[0]
    used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    deleted |= isinstance(target, ast.Attribute | ast.Subscript) or getattr(target, 'id', None) in used
  if deleted:
    yield source.start(node), source.end(node), 'pass'


def operand(source: Source, node: ast.AST) -> Changes:
  """Keeps one side of `a + b`, `a and b` and `min(a, b)`, and turns `a += b` into `a = b`."""
  sides: list[ast.AST] = []
  if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left) | _is_text(node.right):
    sides = [node.left, node.right]
  elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
    sides = node.values
  elif isinstance(node, ast.Call) and _called(node) in EXTREMES and len(node.args) == 2:
    sides = node.args
  for side in sides:
    yield source.start(node), source.end(node), f'({source.text(side)})'
  if isinstance(node, ast.AugAssign) and not _is_text(node.value):
    yield source.start(node), source.end(node), f'{source.text(node.target)} = {source.text(node.value)}'


def wrapper(source: Source, node: ast.AST) -> Changes:
  """Replaces a call by its only argument, such as `rng.permutation(x)`, and `text.replace(a, b)` by the text."""
  if not isinstance(node, ast.Call) or _called(node) in _OTHER_TYPES:
    return
  if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
    yield source.start(node), source.end(node), f'({source.text(node.args[0])})'
  elif isinstance(node.func, ast.Attribute) and node.func.attr == 'replace' and len(node.args) == 2:
    yield source.start(node), source.end(node), source.text(node.func.value)


OPERATORS: dict[str, Callable[[Source, ast.AST], Changes]] = {
  f.__name__: f
  for f in (arithmetic, comparison, logic, constant, keyword, branch, extreme, bound, statement, operand, wrapper)
}


def _called(call: ast.Call) -> str:
  """The last part of the name of the called function."""
  return getattr(call.func, 'attr', getattr(call.func, 'id', ''))


def _says_something(node: ast.AST) -> bool:
  """Whether a node is text for people or for the type checker, and no behaviour."""
  if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
    return True
  if isinstance(node, ast.Expr):
    return _is_text(node.value) or _says_something(node.value)
  if isinstance(node, ast.Call):
    return bool(_SKIPPED.match(ast.unparse(node.func))) or _called(node).endswith(('Error', 'Warning'))
  return isinstance(node, ast.keyword) and node.arg in _IGNORED_KEYWORDS


def walk(node: ast.AST) -> Iterator[ast.AST]:
  """A node and those below it, without texts, errors, annotations and decorators."""
  if _says_something(node):
    return
  yield node
  for field, value in ast.iter_fields(node):
    if field not in ('annotation', 'returns', 'decorator_list', 'type_params', 'format_spec'):
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.AST):
          yield from walk(child)
