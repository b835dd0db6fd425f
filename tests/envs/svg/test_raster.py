"""Pictures of SVG programs: areas by formulas, rules of filling, strokes, and another rasteriser if it is installed."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from ragen_jax.envs.svg import targets
from ragen_jax.envs.svg.program import read_program
from ragen_jax.envs.svg.raster import coverage, draw
from tests.envs.svg.test_program import svg


def area(content: str, size: int = 200) -> float:
  """The black area of a drawing, in square units of a canvas of 100 x 100."""
  return float(np.sum(255 - draw(read_program(svg(content)), size)[..., 0].astype(float)) / 255 * (100 / size) ** 2)


STAR = 'points="50,5 20,95 95,35 5,35 80,95"'


@pytest.mark.parametrize(
  ('content', 'expected'),
  [
    ('<rect x="10.3" y="20.7" width="30.4" height="40.2"/>', 30.4 * 40.2),
    ('<rect width="30" height="40" rx="10"/>', 1200 - (4 - math.pi) * 100),
    ('<rect width="30" height="40" ry="99" rx="5"/>', 1200 - (4 - math.pi) * 100),
    ('<circle cx="50" cy="50" r="30"/>', math.pi * 900),
    ('<ellipse cx="50" cy="50" rx="40" ry="12"/>', math.pi * 480),
    ('<ellipse cx="50" cy="50" rx="20"/>', math.pi * 400),
    ('<ellipse cx="50" cy="50" rx="auto" ry="20"/>', math.pi * 400),
    ('<ellipse cx="50" cy="50"/>', 0),
    ('<circle cx="0" cy="0" r="30"/>', math.pi * 225),
    ('<circle r="-3"/>', 0),
    ('<polygon points="10,10 60,10 10,80"/>', 1750),
    ('<polyline points="10,10 60,10 10,80"/>', 1750),
    ('<line x1="10" y1="10" x2="90" y2="90"/>', 0),
    ('<line x1="10" y1="20" x2="70" y2="20" stroke="black" stroke-width="6"/>', 360),
    ('<line x1="10" y1="20" x2="70" y2="20" stroke="black" stroke-width="6" stroke-linecap="square"/>', 396),
    ('<line x1="10" y1="20" x2="70" y2="20" stroke="black" stroke-width="6" stroke-linecap="round"/>',
     360 + math.pi * 9),
    ('<circle cx="50" cy="50" r="30" fill="none" stroke="black" stroke-width="10"/>', math.pi * (35**2 - 25**2)),
    ('<rect x="20" y="20" width="40" height="40" fill="none" stroke="black" stroke-width="10"/>', 2500 - 900),
    ('<rect x="20" y="20" width="40" height="40" fill="none" stroke="black" stroke-width="10" '
     'stroke-linejoin="bevel"/>', 1600 - 4 * 12.5),
    ('<rect x="20" y="20" width="40" height="40" fill="none" stroke="black" stroke-width="10" '
     'stroke-linejoin="round"/>', 1600 - (4 - math.pi) * 25),
    ('<rect x="20" y="20" width="40" height="40" fill="none" stroke="black" stroke-width="10" '
     'stroke-miterlimit="1.3"/>', 1600 - 4 * 12.5),
    ('<line x1="5" y1="5" x2="5" y2="5" stroke="black" stroke-width="6" stroke-linecap="round"/>', math.pi * 9),
    *((f'<{shape} stroke="black" stroke-width="6" stroke-linecap="round"/>', dots * math.pi * 9) for shape, dots in
      (('path d="M5 5"', 0), ('path d="M5 5M9 9"', 0), ('polyline points="5 5"', 0), ('path d="M5 5h0"', 1),
       ('path d="M5 5z"', 1), ('path d="M5 5M50 50h0"', 1))),
    ('<path d="M10 10H60V80z"/>', 1750),
    ('<path d="m10 10 50 0 0 70z"/>', 1750),
    ('<path d="M10 10 60 10 60 80"/>', 1750),
    ('<path d="M10 50Q50 0 90 50Z"/>', 2 / 3 * 80 * 25),
    ('<path d="M10 50C10 0 90 0 90 50Z"/>', 3 / 5 * 50 * 80),
    ('<path d="M20 50A30 30 0 0 1 80 50Z"/>', math.pi * 450),
    ('<path d="M20 50A5 5 0 0 1 80 50Z"/>', math.pi * 450),
    ('<path d="M50 20A30 30 0 1 1 20 50L50 50Z"/>', math.pi * 675),
    ('<path d="M50 20A30 30 0 0 0 20 50L50 50Z"/>', math.pi * 225),
    ('<path d="M50 20a30 15 90 01-30 30L50 50Z"/>', None),
    ('<path d="M10 10h50v50h-50zM20 20h30v30h-30z"/>', 2500),
    ('<path d="M10 10h50v50h-50zM20 20v30h30v-30z"/>', 2500 - 900),
    ('<path fill-rule="evenodd" d="M10 10h50v50h-50zM20 20h30v30h-30z"/>', 2500 - 900),
    ('<path d="M10 10h20v20h-20z h30v30h-30z"/>', 900),
    ('<path d="M10 50Q30 10 50 50T90 50Z"/>', 2 * 2 / 3 * 40 * 20),
    ('<path d="M10 50C10 30 50 30 50 50S90 70 90 50Z"/>', 2 * 3 / 5 * 40 * 20),
  ],
)  # fmt: skip
def test_areas_are_those_of_formulas(content, expected):
  found = area(content)
  if expected is None:
    assert 0 < found < 100 * 100
  else:
    assert found == pytest.approx(expected, rel=0.006, abs=0.6)


@pytest.mark.parametrize(
  ('smooth', 'spelt_out'),
  [  # without a curve of its kind before it, the present point is the first control point
    ('L40 30S60 90 90 50', 'L40 30C40 30 60 90 90 50'),
    ('Q20 10 40 30S60 90 90 50', 'Q20 10 40 30C40 30 60 90 90 50'),
    ('C20 10 30 10 40 30T90 50', 'C20 10 30 10 40 30Q40 30 90 50'),
  ],
)
def test_a_smooth_curve_continues_only_curves_of_its_kind(smooth, spelt_out):
  one, other = (draw(read_program(svg(f'<path d="M10 50{d}Z"/>')), 100) for d in (smooth, spelt_out))
  np.testing.assert_array_equal(one, other)


def test_a_star_is_full_or_has_a_hole():
  full, hollow = area(f'<polygon {STAR}/>'), area(f'<polygon {STAR} fill-rule="evenodd"/>')
  points = np.array([50, 5, 20, 95, 95, 35, 5, 35, 80, 95], float).reshape(-1, 2)
  x, y = points.T
  # The shoelace formula counts what is wound around twice twice.
  wound = abs(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y)) / 2
  assert full + (full - hollow) == pytest.approx(wound, rel=0.005) and hollow < 0.8 * full


def test_coverage_is_that_of_many_samples():
  rng = np.random.default_rng(5)
  for even_odd in (False, True):
    points = rng.uniform(-5, 21, (7, 2))
    edges = np.concatenate([points, np.roll(points, -1, 0)], 1)
    fine, n = np.zeros((16, 16)), 24
    at = (np.arange(16 * n) + 0.5) / n
    for y in at:
      winding = np.zeros(16 * n, int)
      for x0, y0, x1, y1 in edges:
        if (y0 <= y) != (y1 <= y):
          winding += np.where(x0 + (y - y0) / (y1 - y0) * (x1 - x0) < at, 1 if y1 > y0 else -1, 0)
      inside = winding % 2 != 0 if even_odd else winding != 0
      fine[int(y)] += inside.reshape(16, n).mean(1) / n
    found = coverage(edges, even_odd, 16, 16)
    assert found.shape == (16, 16) and np.abs(found - fine).mean() < 0.01 and np.abs(found - fine).max() < 0.15


def test_a_picture_does_not_depend_on_what_was_drawn_before():
  layer = read_program(svg(f'<g opacity=".5"><polygon {STAR} fill="teal"/></g><circle r="20"/>'))
  first = draw(layer, 64)
  draw(layer, 33)
  assert np.array_equal(first, draw(layer, 64)) and draw(layer, 33).shape == (33, 33, 3)


@pytest.mark.parametrize(('size', 'mean'), [(64, 1.0), (256, 0.3)])
def test_pictures_are_those_of_another_rasteriser(size, mean):
  resvg = pytest.importorskip('resvg_py', reason='resvg_py draws the pictures to compare with')
  recipe = targets.Recipe(2, 6, targets.KINDS, targets.COLOURS, True, True, 5)
  differences = []
  for seed in range(20):
    program = targets.make_target(recipe, seed, 'all', 0.1, size).program
    own = draw(read_program(program), size).astype(int)
    standard = program.replace('<svg ', '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    drawn = resvg.svg_to_bytes(
      svg_string=standard, background='#ffffff', skip_system_fonts=True, width=size, height=size
    )
    other = np.asarray(Image.open(io.BytesIO(drawn)).convert('RGB')).astype(int)
    difference = np.abs(own - other)
    assert (difference.max(-1) > 96).mean() < 0.002
    differences.append(difference.mean())
  assert np.mean(differences) < mean and np.max(differences) < 3 * mean
