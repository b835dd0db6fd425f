"""SVG programs: what is read, what is refused, and that hostile ones end soon, without files or the network."""

from __future__ import annotations

import builtins
import random
import socket
import time

import numpy as np
import pytest

from ragen_jax.envs.svg import raster
from ragen_jax.envs.svg.environment import LARGEST_SIDE
from ragen_jax.envs.svg.program import MOST_CHARS, MOST_PAINTED, find_program, read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.envs.svg.values import ProgramError, read_colour, read_transform


def svg(content: str, box: str = 'viewBox="0 0 100 100"') -> str:
  return f'<svg {box}>{content}</svg>'


def pixel(program: str, x: int, y: int, size: int = 50) -> tuple[int, ...]:
  """The colour at a place on a canvas of 100 units."""
  return tuple(draw(read_program(program), size)[y * size // 100, x * size // 100].tolist())


HOSTILE = {
  'billion laughs': (
    '<!DOCTYPE svg [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><svg><title>&b;</title></svg>',
    'document type',
  ),
  'external entity': ('<!DOCTYPE svg SYSTEM "file:///etc/passwd"><svg/>', 'document type'),
  'unknown entity': (svg('<title>&x;</title>'), 'undefined entity'),
  'style sheet': ('<?xml-stylesheet href="http://127.0.0.1:9/a.css"?><svg></svg>', 'processing instruction'),
  'image': (svg('<image href="/etc/passwd"/>'), "'image' is not drawn here; allowed: g, rect"),
  'use': (svg('<g id="a"><use href="#a"/></g>'), "'use' is not drawn"),
  'script': (svg('<script>1</script>'), "'script' is not drawn"),
  'style': (svg('<style>rect{}</style>'), "'style' is not drawn"),
  'foreign': (svg('<foreignObject/>'), 'is not drawn'),
  'nested svg': (svg('<svg/>'), "'svg' is not drawn"),
  'shape in a shape': (svg('<rect><rect/></rect>'), 'rect is in rect'),
  'address of a paint': (svg('<rect width="9" height="9" fill="url(http://127.0.0.1:9/a#b)"/>'), "fill='url"),
  'filter': (svg('<rect style="filter:url(#a)"/>'), "filter='url"),
  'dashes': (svg('<rect stroke-dasharray="0.001"/>'), "stroke-dasharray='0.001'; allowed: none"),
  'deep': (svg('<g>' * 800 + '</g>' * 800), 'more than 16 others'),
  'deep title': (svg('<title>' + '<a>' * 800 + '</a>' * 800 + '</title>'), 'more than 16 others'),
  'many': (svg('<g/>' * 301), 'more than 300 elements'),
  'long': (svg(' ' * MOST_CHARS), r'characters; allowed: at most 16,384'),
  'nan': (svg('<rect x="nan"/>'), "rect: x='nan'; allowed: a number"),
  'inf': (svg('<circle r="inf"/>'), "circle: r='inf'"),
  'huge': (svg('<circle r="1e400"/>'), "circle: r='1e400'|numbers up to 100000"),
  'large': (svg('<circle r="1e6"/>'), 'numbers up to 100000'),
  'long number': (svg(f'<circle r="{"1" * 16_000}x"/>'), 'allowed: a number, px or %'),
  'long exponent': (svg('<circle r="1e0000000009"/>'), 'circle: r='),
  'Unicode digits': (svg('<circle r="٣"/>'), 'circle: r='),
  'nan in points': (svg('<polygon points="1 2 nan 3"/>'), 'does not begin with a number'),
  'odd points': (svg('<polygon points="1 2 3"/>'), 'points has 3 numbers; allowed: pairs'),
  'far': (svg('<g transform="scale(1e5) scale(1e5)"><rect width="1" height="1"/></g>'), 'too far from the canvas'),
  'far to nan': (svg('<g transform="' + 'scale(1e5)' * 70 + '"><rect width="1" height="1"/></g>'), 'too far'),
  'long path': (svg('<path d="M0 0' + 'q1 1 1 1' * 1800 + '"/>'), 'more than 10,000 points'),
  'points of several': (
    svg(('<path d="M0 0' + 'q1 1 1 1' * 250 + '"/>') * 2),
    'the program has more than 10,000 points',
  ),
  'high path': (svg('<path d="M0 0' + 'v100v-100' * 1500 + '"/>'), 'times as high as the canvas'),
  'many joins': (
    svg('<path d="M0 0' + 'h1v1' * 3000 + '" stroke="red" stroke-linejoin="round"/>'),
    'more than 100,000 edges|as high',
  ),
  'path without a beginning': (svg('<path d="L1 1"/>'), 'does not begin with M'),
  'path of another letter': (svg('<path d="M1 1 X"/>'), "'X'; allowed: the letters MLHVCSQTAZ"),
  'number behind the end': (svg('<path d="M1 1Z 3"/>'), 'a number without a command'),
  'flag': (svg('<path d="M1 1A1 1 0 2 0 3 3"/>'), "a flag of an arc is '2'"),
  'empty box': ('<svg viewBox="0 0 0 1"></svg>', 'viewBox='),
  'short box': ('<svg viewBox="0 0 1"></svg>', 'viewBox='),
  'no size': ('<svg width="0" height="5"></svg>', 'width='),
  'slice': ('<svg preserveAspectRatio="xMidYMid slice"></svg>', 'preserveAspectRatio; allowed'),
  'unknown transform': (svg('<g transform="warp(1)"/>'), "transform='warp"),
  'short matrix': (svg('<g transform="matrix(1 2)"/>'), 'matrix has 2 numbers'),
  'broken': ('<svg><g></svg>', 'no XML'),
  'two': ('<svg></svg><svg></svg>', 'no XML'),
  'text': (svg('hello'), 'has text'),
  'other root': ('<html></html>', "begins with 'html'"),
  'zero byte': (svg('\0'), 'no XML'),
  'surrogate': (svg('\ud800'), 'no XML'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_programs_are_refused_in_one_line_and_soon(name, monkeypatch):
  program, message = HOSTILE[name]

  def refused(*args, **kwargs):
    raise AssertionError('a program opened something')

  monkeypatch.setattr(socket, 'socket', refused)
  monkeypatch.setattr(builtins, 'open', refused)
  began = time.process_time()
  with pytest.raises(ProgramError, match=message) as error:
    read_program(program)
  assert '\n' not in str(error.value) and len(str(error.value)) < 400
  assert time.process_time() - began < 2


def test_the_most_costly_programs_that_are_allowed_are_drawn_soon():
  layers = ''.join(f'<g opacity=".9"><rect width="9" height="9" opacity=".{i % 9}1"/></g>' for i in range(45))
  nested = '<g opacity=".9">' * 14 + '<circle r="50"/>' + '</g>' * 14
  high = '<path d="M0 0' + 'v100v-100' * 490 + '"/>'
  joins = '<path d="M0 0' + 'h1v1' * 1000 + '" stroke="red" stroke-linejoin="round"/>'
  for content in (layers, nested, high, joins):
    began = time.process_time()
    picture = draw(read_program(svg(content)), 256)
    assert picture.shape == (256, 256, 3) and time.process_time() - began < 4


PAGE = 'width="100" height="100"'
COSTLY = {
  'opacity of shapes': lambda n: f'<rect {PAGE} opacity=".5"/>' * (n // 2),
  'opacity of groups': lambda n: '<g opacity=".5"></g>' * n,
  'fills': lambda n: f'<rect {PAGE}/>' * n,
  'fills and strokes': lambda n: f'<rect {PAGE} stroke="red"/>' * (n // 2),
  'halves': lambda n: '<rect y="25" width="9" height="50"/>' * (2 * n),
  'over the border': lambda n: '<rect y="-400" width="900" height="900"/>' * n,
}


@pytest.mark.parametrize('name', COSTLY)
def test_the_work_of_drawing_is_bounded_at_the_largest_size(name, monkeypatch):
  work = {'painted': 0.0, 'layers': 0}

  def coverage(edges, even_odd, height, width):
    work['painted'] += height * width / LARGEST_SIDE**2
    return np.zeros((height, width), np.float32)

  def zeros_like(canvas):
    work['layers'] += 1
    return np.zeros(canvas.shape, canvas.dtype)

  monkeypatch.setattr(raster, 'coverage', coverage)
  monkeypatch.setattr(raster.np, 'zeros_like', zeros_like)
  draw(read_program(svg(COSTLY[name](MOST_PAINTED))), LARGEST_SIDE)
  assert MOST_PAINTED - 1e-6 <= sum(work.values()) <= MOST_PAINTED + 1e-6
  with pytest.raises(ProgramError, match=f'paints more than {MOST_PAINTED} times the picture'):
    read_program(svg(COSTLY[name](MOST_PAINTED + 2)))


def test_the_edges_that_are_sorted_are_bounded():
  high = lambda n: svg('<path d="M0 0' + 'v100v-100' * (n // 2) + '"/>')  # noqa: E731
  read_program(high(1000))
  with pytest.raises(ProgramError, match='more than 1,000 times as high as the canvas'):
    read_program(high(1002))


def test_random_texts_never_raise_another_error():
  rng = random.Random(3)
  source = svg('<g transform="rotate(30 5 5)" style="fill:red"><path d="M1 1c1-2.5.5 3 4 5a4 5 6 016 7z"/></g>')
  read = 0
  for _ in range(600):
    text = list(source)
    for _ in range(rng.randint(1, 4)):
      text[rng.randrange(5, len(text))] = rng.choice('<>/"= 0e9.-aMZ(),%\u0663\n')
    try:
      assert draw(read_program(''.join(text)), 16).shape == (16, 16, 3)
      read += 1
    except ProgramError as e:
      assert '\n' not in str(e)
  assert 30 < read < 600


def test_the_first_document_of_a_text_is_found():
  assert find_program('Here: <svg a="1"><g/></svg > and <svg></svg>') == '<svg a="1"><g/></svg >'
  assert find_program('<svg\nviewBox="0 0 1 1"\n>\n</svg>').startswith('<svg\n')
  for text in ('', '<svgs></svgs>', '<svg>', 'svg', '</svg><svg>'):
    assert find_program(text) is None


def test_paints_and_their_opacities():
  area = 'width="100" height="100"'
  for paint, colour in (
    ('red', (255, 0, 0)), ('#0f0', (0, 255, 0)), ('#1e90FF', (30, 144, 255)), ('rgb(1, 2,3)', (1, 2, 3)),
    ('RGB(100%,0%,20%)', (255, 0, 51)), ('rgba(0,0,0,.4)', (153, 153, 153)), ('#000000cc', (51, 51, 51)),
    ('none', (255, 255, 255)), ('transparent', (255, 255, 255)), ('currentColor', (0, 0, 0)),
    ('rgb(300,-5,0)', (255, 0, 0)),
  ):  # fmt: skip
    assert pixel(svg(f'<rect {area} fill="{paint}"/>'), 50, 50) == colour, paint
  for word in ('currentColor', ' currentcolor '):  # the colour of the property 'color', which is inherited
    assert pixel(svg(f'<g color="red"><rect {area} fill="{word}"/></g>'), 50, 50) == (255, 0, 0)
    assert pixel(svg(f'<g color="red"><rect {area} color="currentColor" fill="{word}"/></g>'), 50, 50) == (255, 0, 0)
    line = f'<line x1="0" y1="50" x2="100" y2="50" stroke-width="20" style="color: lime; stroke: {word}"/>'
    assert pixel(svg(line), 50, 50) == (0, 255, 0)
  for paint in ('redd', '#12', '#12345', 'rgb(1,2)', 'hsl(1,2%,3%)', ''):
    with pytest.raises(ProgramError, match=r'fill=.*allowed: none, a name'):
      read_colour(paint, 'fill')
  assert pixel(svg(f'<rect {area} fill="blue" style="fill: red ;" />'), 50, 50) == (255, 0, 0)
  assert pixel(svg(f'<g fill="lime"><g fill="inherit"><rect {area}/></g></g>'), 50, 50) == (0, 255, 0)
  assert pixel(svg(f'<rect {area} fill-opacity="50%" opacity=".5"/>'), 50, 50) == (191, 191, 191)
  # A group is mixed once: what two of its shapes cover is not darker.
  group = f'<g opacity="0.5"><rect {area}/><rect {area} fill="red"/></g>'
  assert pixel(svg(group), 50, 50) == (255, 128, 128)
  for hidden in ('display="none"', 'visibility="hidden"', 'opacity="0"'):
    assert pixel(svg(f'<g {hidden}><rect {area}/></g>'), 50, 50) == (255, 255, 255)
    assert pixel(svg(f'<rect {area} {hidden}/>'), 50, 50) == (255, 255, 255)


def test_views_and_lengths():
  wide = '<rect x="0" y="0" width="100%" height="50%"/>'
  assert pixel(svg(wide, 'viewBox="-10 0 20 20"'), 75, 25) == (0, 0, 0)
  assert pixel(svg(wide, 'viewBox="-10 0 20 20"'), 25, 25) == (255, 255, 255)
  # A view box that is wider than high is in the middle; without its aspect ratio it fills the canvas.
  assert [pixel(svg(wide, 'viewBox="0 0 40 20"'), 50, y) for y in (20, 35, 60)] == [(255,) * 3, (0,) * 3, (255,) * 3]
  assert pixel(svg(wide, 'viewBox="0 0 40 20" preserveAspectRatio="none"'), 50, 20) == (0, 0, 0)
  assert pixel(svg('<rect width="20px" height="20"/>', 'width="40" height="40px"'), 40, 40) == (0, 0, 0)
  assert pixel(svg('<rect width="20" height="20"/>', ''), 40, 40) == (255, 255, 255)
  assert pixel('<svg:svg xmlns:svg="x"><svg:rect width="60" height="60"/></svg:svg>', 50, 50) == (0, 0, 0)
  assert (
    pixel(svg('<title>a<b/></title><desc>b</desc><rect width="60" height="60"><title/></rect>'), 50, 50) == (0,) * 3
  )


def test_a_radius_that_is_not_given_is_as_long_as_the_other():
  view = 'viewBox="0 0 200 100"'
  for shape in ('rect x="10" y="10" width="180" height="80"', 'ellipse cx="100" cy="50"'):
    wanted = draw(read_program(svg(f'<{shape} rx="20" ry="20"/>', view)), 100)
    for radii in ('ry="20%"', 'rx="10%"', 'rx="auto" ry="20"', 'rx="20"'):
      assert np.array_equal(draw(read_program(svg(f'<{shape} {radii}/>', view)), 100), wanted), (shape, radii)


def test_transforms_act_from_the_right():
  point = np.array([3.0, 1.0, 1.0])
  for text, there in (
    ('translate(2)', (5, 1)), ('translate(2,3)', (5, 4)), ('scale(2)', (6, 2)), ('scale(2 -1)', (6, -1)),
    ('rotate(90)', (-1, 3)), ('rotate(90 3 0)', (2, 0)), ('matrix(1 2 3 4 5 6)', (11, 16)), ('skewX(45)', (4, 1)),
    ('skewY(45)', (3, 4)), ('translate(10) scale(2)', (16, 2)), (' scale(2) , translate(10)', (26, 2)), ('', (3, 1)),
  ):  # fmt: skip
    np.testing.assert_allclose((read_transform(text, 'transform') @ point)[:2], there, atol=1e-12, err_msg=text)
  program = svg('<g transform="translate(50 50)"><rect width="10" height="10" transform="rotate(180)"/></g>')
  assert pixel(program, 44, 44) == (0, 0, 0) and pixel(program, 56, 56) == (255, 255, 255)
