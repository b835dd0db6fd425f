"""What is read of WebShop's pages."""

from __future__ import annotations

import time

import pytest

from ragen_jax.envs.webshop.pages import MOST_CHARS, MOST_OPEN, PageError, read_page
from tests.support import webshop_server as shop


def test_the_search_page():
  page = read_page(shop.start('s_fixed_0', 'Find me a "red" & cheap shirt'))
  assert page.instruction == 'Find me a "red" & cheap shirt' and page.has_search and page.score is None
  assert page.texts == ('Instruction:', 'Find me a "red" & cheap shirt', 'Now', 'Search')
  assert page.text == 'Instruction: [SEP] Find me a "red" & cheap shirt [SEP] Now [SEP] Search'
  assert page.links == {}


def test_results_with_headings_that_are_closed_by_others():
  page = read_page(shop.results('s_fixed_0', 'a hat', 'hat red', 1))
  assert list(page.links) == ['back to search', 'b01', 'b03'] and not page.has_search
  assert page.links['back to search'] == '/s_fixed_0'
  assert page.links['b01'] == '/item_page/s_fixed_0/B01/%5B%27hat%20red%27%5D/1/%7B%7D'
  assert page.texts[3:] == (
    'Page 1 of 2 results',
    'Back to Search',
    'B01',
    'Red shirt',
    '$12.5',
    'B03',
    'Blue hat',
    '$5.0',
  )


def test_options_with_the_name_of_something_else_are_told_apart():
  page = read_page(shop.item('s', 'x', 'B01', 'w', '1', {}))
  assert {'color: red', 'trim: red', 'blue', 'none'} <= set(page.links) and 'red' not in page.links
  assert page.options['trim: red'] == ('trim', 'red') and page.options['blue'] == ('color', 'blue')
  page = read_page(shop.item('s', 'x', 'B02', 'w', '1', {}))
  assert page.links['features'].startswith('/item_sub_page/') and page.links['fit: features'].startswith('/item_page/')
  assert 'a | b' in page.links


def test_the_last_page_has_the_score_and_its_parts():
  page = read_page(shop.done(0, 'B01', {}))
  assert page.score == pytest.approx(2 / 3) and page.parts == {'r_type': 1.0, 'r_att': 1.0, 'r_price': 1.0}
  assert page.instruction == ''
  broken = shop.done(0, 'B01', {}).replace('&#x27;r_type&#x27;', 'f()')
  assert read_page(broken).parts == {} and read_page(broken).score == page.score


@pytest.mark.parametrize('parts', ["{'r_type': 1" + '0' * 400 + '}', '{[]: 1}', '[' * 300, '3', "{'r_type': 'x'}"])
def test_parts_that_are_no_numbers_are_left_out(parts):
  page = read_page(f'<h3 id="reward"><pre>0.5</pre></h3><h4 id="reward_info"><pre>{parts}</pre></h4>')
  assert page.score == 0.5 and page.parts == {}


@pytest.mark.parametrize(
  ('source', 'told'),
  [
    ('', 'has neither an instruction nor a score'),
    ('<h1>Internal Server Error</h1>', 'has neither an instruction nor a score; it begins .<h1>Internal'),
    ('<h3 id="reward"><pre>much</pre></h3>', "the score is no number: 'much'"),
    ('<h3 id="reward"><pre>nan</pre></h3>', 'the score is not from 0'),
    ('<h3 id="reward"><pre>-1</pre></h3>', 'the score is not from 0'),
  ],
)
def test_other_pages_are_errors(source, told):
  with pytest.raises(PageError, match=told):
    read_page(source)


def test_names_that_lead_nowhere_are_no_links():
  head = '<div id="instruction-text"><h4>Instruction: x</h4></div>'
  page = read_page(
    f'{head}<button class="btn">alone</button><form action="/a"><button>plain</button></form></p></div>'
    '<input type="radio" value="x"><input type="radio" data-url="/y" value=" "><a href="/z">z</a>'
  )
  assert page.links == {} and page.instruction == 'x'


def test_a_heading_may_be_closed_as_another_one():
  page = read_page('<div id="instruction-text"><h4>Instruction: x</h5><p>y</p></div></h4><h4>z</h4>')
  assert page.instruction == 'x' and page.texts == ('Instruction: x', 'y', 'z')


HEAD = '<div id="instruction-text"><h4>Instruction: x</h4></div>'


def test_elements_within_one_another_are_limited():
  page = read_page(HEAD + '<a class="product-link" href="/y">' * MOST_OPEN + 'y' + '</a>' * MOST_OPEN)
  assert page.links == {'y': '/y'}
  for deep in ('<a>x ' * (MOST_OPEN + 1), '<p>' * 10**5, '<a>x ' * 4000):
    with pytest.raises(PageError, match=r'^the page has more than 200 elements within one another$'):
      read_page(HEAD + deep)
  assert read_page(HEAD + '<b>x</b><br>' * (2 * MOST_OPEN)).instruction == 'x'


def test_large_pages_are_errors_and_others_are_read_in_time():
  with pytest.raises(PageError, match=r'^the page has 1,048,577 characters, more than 1,048,576$'):
    read_page(' ' * (MOST_CHARS + 1))
  for tag in ('<a ', '<!--'):
    with pytest.raises(PageError, match=r'^the page has more than 200 tags at its end that are not closed$'):
      read_page(HEAD + tag * (MOST_OPEN + 1))
  began = time.process_time()
  read_page(HEAD + '<a>' * MOST_OPEN + 'x<br>' * 20_000)
  assert time.process_time() - began < 5
