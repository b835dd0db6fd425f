"""The page of a run's episodes in a browser: its filters, keys, colours and speed, and that it runs nothing foreign."""

from __future__ import annotations

import base64
import itertools
import re
import shutil
import time

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.viewer.page import PAGE, write_page
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from ragen_jax.viewer.tensorboard import transcript
from tests.support.made_up_episodes import ATTACKS, episode_record

webdriver = pytest.importorskip('selenium.webdriver', reason='needs selenium, of requirements-dev.txt')
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason='needs chromium and chromedriver (apt-get install chromium chromium-driver)'
  ),
]


@pytest.fixture(scope='module')
def browser():
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  # No sandbox: containers, in which tests run as root, do not let it be.
  for argument in ('--headless=new', '--no-sandbox', '--disable-dev-shm-usage', '--window-size=1400,900'):
    options.add_argument(argument)
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
  driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
  yield driver
  driver.quit()


@pytest.fixture
def page(browser, run):
  """The page, freshly loaded."""
  browser.get('about:blank')
  browser.get_log('browser')
  browser.get((run / PAGE).as_uri())
  yield browser
  assert [line for line in browser.get_log('browser') if line['level'] in ('SEVERE', 'WARNING')] == []


def _found(page):
  return page.find_element(By.ID, 'found').text


def _wait(page, condition):
  return WebDriverWait(page, 60, poll_frequency=0.02).until(lambda _: condition())


def _all(page, selector):
  return page.find_elements(By.CSS_SELECTOR, selector)


def _press(page, *keys):
  for key in keys:
    page.switch_to.active_element.send_keys(key)


def _set(page, field, value):
  element = page.find_element(By.ID, field)
  element.clear()
  element.send_keys(value)


def _open(page, **chosen):
  """Opens the first episode of a selection, and waits for it."""
  for name, value in chosen.items():
    Select(page.find_element(By.ID, name)).select_by_value(value)
  entry = page.find_element(By.CSS_SELECTOR, '.entry.active')
  shown = f'[data-episode="{entry.get_attribute("id").removeprefix("entry-")}"] .turn'
  entry.click()
  _wait(page, lambda: _all(page, shown) and '#' in page.current_url)


def test_the_first_episode_of_the_list_is_open_until_the_reader_opens_one(page, run):
  def wait_for(kind, step):
    of_it = ['step', step, 'kind', kind]
    _wait(page, lambda: _all(page, '.facts') and _all(page, '.facts')[0].text.split()[:4] == of_it)
    assert page.switch_to.active_element.get_attribute('id') != 'detail'

  wait_for('evaluation', '90')
  assert '#' not in page.current_url  # the page of a longer run opens its own first episode
  Select(page.find_element(By.ID, 'split')).select_by_value('val-greedy')
  wait_for('evaluation,', '90')
  Select(page.find_element(By.ID, 'order')).select_by_value('earliest')
  wait_for('evaluation,', '0')
  assert 'active open' in _all(page, '.entry')[0].get_attribute('class')
  _open(page)
  Select(page.find_element(By.ID, 'order')).select_by_value('latest')
  assert 'active open' in page.find_element(By.CSS_SELECTOR, '.entry.active').get_attribute('class')
  assert _all(page, '.facts')[0].text.split()[:4] == ['step', '0', 'kind', 'evaluation,']
  page.get('about:blank')
  page.get((run / PAGE).as_uri())
  wait_for('evaluation', '90')
  page.find_element(By.ID, 'compare').click()
  _wait(page, lambda: _all(page, '.columns'))
  Select(page.find_element(By.ID, 'order')).select_by_value('earliest')
  time.sleep(0.3)
  assert _all(page, '.columns'), 'a comparison stays'
  page.set_window_size(800, 900)  # no room beside the list
  page.get('about:blank')
  page.get((run / PAGE).as_uri())
  assert page.find_element(By.CSS_SELECTOR, '.entry.active').is_displayed() and not _all(page, '.turn')
  page.set_window_size(1400, 900)


def test_a_thousand_episodes_load_within_two_seconds(page, run):
  seconds = []
  for _ in range(3):
    page.get('about:blank')
    page.get((run / PAGE).as_uri())
    # The script has run to its end before the load event: the list is drawn.
    seconds.append(page.execute_script("return performance.getEntriesByType('navigation')[0].loadEventStart / 1000"))
  assert _found(page).startswith('1,000 episodes')
  assert 5 < len(_all(page, '.entry')) < 60  # those in sight, and a few
  assert 0 < min(seconds) < 2, seconds


def test_filters_leave_what_they_name(page, run):
  records = [record for file in read_episodes(run) for record in file.records()]

  def count(fits):
    return f'{sum(map(fits, records)):,} of 1,000 episodes'

  Select(page.find_element(By.ID, 'tag')).select_by_value('Bandit')
  assert _found(page).startswith(count(lambda r: r['tag'] == 'Bandit'))
  Select(page.find_element(By.ID, 'status')).select_by_value('success')
  assert _found(page) == count(lambda r: r['tag'] == 'Bandit' and r['status'] == 'success') + ', 100 % won'
  _set(page, 'step-min', '40')
  _set(page, 'step-max', '60')
  wanted = count(lambda r: r['tag'] == 'Bandit' and r['status'] == 'success' and 40 <= r['step'] <= 60)
  assert _found(page).startswith(wanted)
  page.find_element(By.ID, 'reset').click()
  assert _found(page).startswith('1,000 episodes')
  _set(page, 'score-max', '-0.4')
  assert _found(page) == count(lambda r: r['score'] <= -0.4) + ', 0 % won'
  Select(page.find_element(By.ID, 'split')).select_by_value('val-greedy')
  assert _found(page).startswith(count(lambda r: r['score'] <= -0.4 and r['split'] == 'val-greedy'))
  _set(page, 'step-min', '1000')
  assert _found(page) == 'No episode fits the filters' and not _all(page, '.entry')


def test_the_search_finds_what_was_replied(page):
  _press(page, '/')
  assert page.switch_to.active_element.get_attribute('id') == 'search'
  _press(page, 'LEVEL 7 of step 30.')
  _wait(page, lambda: _found(page).startswith('2 of 1,000'))  # sampled and greedy
  assert all('level 7' in entry.text and 'step 30' in entry.text for entry in _all(page, '.entry'))
  page.find_element(By.ID, 'reset').click()
  _wait(page, lambda: _found(page).startswith('1,000'))


def test_the_list_is_in_the_order_that_was_chosen(page):
  orders = {'latest': 'step 90', 'earliest': 'step 0', 'best': '+1', 'worst': '−0.5'}
  for order, shown in orders.items():
    Select(page.find_element(By.ID, 'order')).select_by_value(order)
    assert shown in _all(page, '.entry')[0].text


def test_the_keyboard_is_enough(page):
  def active():
    chosen = page.find_element(By.ID, 'list').get_attribute('aria-activedescendant')
    assert page.find_element(By.ID, chosen).get_attribute('aria-selected') == 'true'
    return int(page.find_element(By.ID, chosen).get_attribute('aria-posinset'))

  assert page.switch_to.active_element.get_attribute('id') == 'list' and active() == 1
  _press(page, Keys.ARROW_DOWN, 'j', 'j', 'k')
  assert active() == 3
  _press(page, Keys.END)
  assert active() == 1000
  _press(page, Keys.HOME, Keys.ARROW_UP)
  assert active() == 1
  _press(page, Keys.ENTER)
  _wait(page, lambda: page.switch_to.active_element.get_attribute('id') == 'detail')
  first = page.find_element(By.CSS_SELECTOR, '.facts').text
  _press(page, 'j')  # while reading: the next one at once
  _wait(page, lambda: page.find_element(By.CSS_SELECTOR, '.facts').text != first)
  assert active() == 2
  _press(page, 'c')
  _wait(page, lambda: _all(page, '.column'))
  _press(page, Keys.ESCAPE)
  _wait(page, lambda: _all(page, '.turn'))
  _press(page, Keys.ESCAPE)
  assert page.switch_to.active_element.get_attribute('id') == 'list' and not _all(page, '.turn')
  _press(page, '?')
  assert page.find_element(By.ID, 'help').is_displayed()
  _press(page, Keys.ESCAPE)
  assert not page.find_element(By.ID, 'help').is_displayed()


def test_an_episode_is_shown_turn_by_turn(page, run):
  _open(page, split='train', order='earliest')
  Select(page.find_element(By.ID, 'status')).select_by_value('failure')
  _all(page, '.entry')[4].click()  # behind the attacks
  record = next(file for file in read_episodes(run) if 'train' in file.path.name).records()[4]
  _wait(
    page, lambda: f'level {record["level"]}' in page.find_element(By.CSS_SELECTOR, '.facts').text.replace('\n', ' ')
  )
  turns = _all(page, '.turn')
  assert len(turns) == 3 + 1
  natural = (
    "return Array.from(document.querySelectorAll('.turn img'), i => [i.complete, i.naturalWidth, i.naturalHeight])"
  )
  assert page.execute_script(natural) == [[True, 64, 64]] * 4
  for index, (shown, turn) in enumerate(zip(turns, record['turns'], strict=False)):
    told = [token.get_attribute('textContent') for token in shown.find_elements(By.CSS_SELECTOR, '.token')]
    assert told == [turn['forced'], *turn['pieces']]
    masked = [token.get_attribute('textContent') for token in shown.find_elements(By.CSS_SELECTOR, '.token.masked')]
    assert masked == ['<think>']
    prompt = shown.find_element(By.CSS_SELECTOR, '.prompt')
    assert not prompt.is_displayed()
    shown.find_element(By.CSS_SELECTOR, 'summary:not(.board-text)').click()
    drawn, prompt_of = shown.find_elements(By.CSS_SELECTOR, 'summary')
    prompt_of.click()
    assert prompt.is_displayed() and prompt.text == turn['prompt'].strip()
    assert f'board {index}' in shown.text and drawn.text == 'as text'
    assert 'played Left' in ' '.join(shown.text.split())
  assert 'failure' in turns[-1].text


@pytest.mark.parametrize(('key', 'kind'), [('2', 'advantage'), ('3', 'value'), ('4', 'logprob'), ('5', 'entropy')])
def test_tokens_have_the_colours_of_their_numbers(page, run, key, kind):
  _open(page, split='train', order='latest')
  record = list(read_episodes(run))
  record = next(file for file in record if file.path.name == 'train-00000010.jsonl.gz').records()[0]
  _press(page, key)
  colours = page.execute_script(
    "return Array.from(document.querySelectorAll('.token'), t => getComputedStyle(t).backgroundColor)"
  )
  numbers = [x for turn in record['turns'] for x in (0, *turn[kind])]  # 0: of the forced token
  assert len(colours) == len(numbers)
  most = max(map(abs, numbers))
  positive, negative, amount = '32, 110, 230', '233, 107, 20', '140, 70, 210'
  for colour, x in zip(colours, numbers, strict=True):
    strength = 0.62 * abs(x) / most
    if strength < 0.004:
      continue
    tone, alpha = re.fullmatch(r'rgba\((\d+, \d+, \d+), ([\d.]+)\)', colour).groups()
    assert float(alpha) == pytest.approx(strength, abs=0.004)
    assert tone == (amount if kind in ('logprob', 'entropy') else positive if x > 0 else negative)
  assert f'{most:.3g}' in page.find_element(By.CSS_SELECTOR, '.legend-scale').text
  _press(page, '1')
  after = page.execute_script("return getComputedStyle(document.querySelectorAll('.token')[1]).backgroundColor")
  assert after == 'rgba(0, 0, 0, 0)'


def test_what_was_not_recorded_cannot_be_chosen(page):
  _open(page, split='val')
  assert not page.find_element(By.CSS_SELECTOR, 'input[value=advantage]').is_enabled()
  assert page.find_element(By.CSS_SELECTOR, 'input[value=value]').is_enabled()


def test_an_episode_that_was_filtered_out_is_masked_as_a_whole(page):
  _set(page, 'step-min', '2')
  _set(page, 'step-max', '2')
  _open(page, split='train')
  assert 'did not learn from this episode' in page.find_element(By.CSS_SELECTOR, '.note').text
  assert len(_all(page, '.token.masked')) == len(_all(page, '.token')) > 30


def test_a_token_tells_its_numbers(page, run):
  _open(page, split='val', order='earliest')
  reply = _all(page, '.tokens')[0]
  page.execute_script('arguments[0].focus()', reply)
  tip = page.find_element(By.ID, 'tip')
  _press(page, Keys.ARROW_RIGHT)
  assert 'put there, not sampled' in tip.text
  _press(page, Keys.ARROW_RIGHT)
  turn = next(iter(read_episodes(run))).records()[0]['turns'][0]
  told = dict(zip(tip.text.split('\n')[1::2], tip.text.split('\n')[2::2], strict=True))
  for label, kind in (('log-prob', 'logprob'), ('entropy', 'entropy'), ('value', 'value')):
    assert float(told[label].replace('−', '-')) == pytest.approx(turn[kind][0], rel=0.01)
  assert float(told['probability']) == pytest.approx(np.exp(turn['logprob'][0]), rel=0.01)


def test_a_level_is_compared_across_steps(page):
  _press(page, '/')
  _press(page, 'level 9 of step 60.')
  _wait(page, lambda: _found(page).startswith('2 of'))
  _open(page, split='val')
  page.find_element(By.ID, 'compare').click()
  columns = _wait(page, lambda: _all(page, '.column'))
  assert [column.get_attribute('aria-label') for column in columns] == [f'Step {step}' for step in range(0, 100, 10)]
  won = ['success' in column.find_element(By.CSS_SELECTOR, 'header').text for column in columns]
  assert won == [step / 3 > 9 for step in range(0, 100, 10)]
  for step, column in zip(range(0, 100, 10), columns, strict=True):
    assert f'I am at level 9 of step {step}.' in column.get_attribute('textContent')
  # Turns stand side by side.
  tops = page.execute_script(
    "return Array.from(document.querySelectorAll('.column'), c => c.children[2].getBoundingClientRect().top)"
  )
  assert max(tops) - min(tops) < 1
  assert [c.get_attribute('aria-label') for c in columns if 'this' in c.get_attribute('class').split()] == ['Step 60']


def test_what_a_policy_writes_is_shown_and_not_run(page):
  title = page.title
  _set(page, 'step-min', '1')
  _set(page, 'step-max', '1')
  for i, attack in enumerate(ATTACKS):
    Select(page.find_element(By.ID, 'split')).select_by_value('train')
    _all(page, '.entry')[i].click()
    heading = '#detail h2:not(:empty)'
    _wait(page, lambda: _all(page, heading) and _all(page, heading)[0].get_attribute('textContent') == attack)  # noqa: B023
    told = page.find_element(By.CSS_SELECTOR, '.turn').get_attribute('textContent')
    assert told.count(attack) >= 4  # board, prompt, reply and action
    assert not _all(page, '#detail img[src=x]') and not _all(page, '#detail script')
  assert page.title == title == 'Trajectories: lake & <co>'


def test_a_transcript_in_tensorboard_is_text(browser, tmp_path):
  plugin = pytest.importorskip('tensorboard.plugin_util', reason='needs tensorboard, of requirements.txt')
  fetches = '\r<b>![x](http://127.0.0.1:9/x)\r\r![x](http://127.0.0.1:9/x)\r<img src=http://127.0.0.1:9/y>'
  for i, attack in enumerate([*ATTACKS, fetches]):
    turn = Turn(attack, attack, [attack], (0.5,), 0.0, True, 1)
    shown = plugin.markdown_to_safe_html(transcript(Episode('A', 0, 7, [turn], attack, Status.ENV_ERROR, error=attack)))
    file = tmp_path / f'{i}.html'
    file.write_text(f'<!doctype html><meta charset="utf-8"><title>text</title>{shown}', encoding='utf-8')
    browser.get_log('browser')
    browser.get(file.as_uri())
    assert browser.title == 'text'
    names = browser.execute_script('return [...document.body.querySelectorAll("*")].map(e => e.tagName)')
    assert set(names) == {'P', 'STRONG', 'PRE'} and names.count('PRE') == 3
    assert browser.get_log('browser') == []  # nothing was fetched
    # All that can be printed is shown.
    printed = ' '.join(re.sub(r'[\x00-\x1f\x7f\u2028]', ' ', attack).split())
    blocks = browser.execute_script('return [...document.querySelectorAll("pre")].map(e => e.textContent)')
    assert [' '.join(block.replace('\ufffd', ' ').split()) for block in blocks] == [printed] * 3


def test_a_link_leads_to_its_episode(page):
  _open(page, split='val-greedy', order='earliest')
  first, address = page.find_element(By.CSS_SELECTOR, '.facts').text, page.current_url
  assert address.endswith('#0/val-greedy/FrozenLake/0/0')
  page.get('about:blank')
  page.get(address)
  _wait(page, lambda: _all(page, '.turn'))
  assert page.find_element(By.CSS_SELECTOR, '.facts').text == first


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_colours_follow_the_reader_and_can_be_read(page, scheme):
  page.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': [{'name': 'prefers-color-scheme', 'value': scheme}]})
  _open(page, split='val')
  pairs = page.execute_script("""
    const rgb = x => x.match(/[\\d.]+/g).map(Number);
    return ['body', '.soft', '.badge', '.token', '.button', '.label'].map(selector => {
      const node = document.querySelector(selector);
      const layers = [];
      for (let at = node; at; at = at.parentElement) layers.unshift(rgb(getComputedStyle(at).backgroundColor));
      const ground = layers.reduce((under, [r, g, b, a = 1]) =>
        [r, g, b].map((x, i) => a * x + (1 - a) * under[i]), [255, 255, 255]);
      return [selector, rgb(getComputedStyle(node).color).slice(0, 3), ground];
    });""")

  def luminance(colour):
    parts = [x / 255 for x in colour]
    parts = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

  for selector, text, ground in pairs:
    light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5, f'{selector}: WCAG AA'
  assert (luminance(pairs[0][2]) > 0.5) == (scheme == 'light')
  picture = base64.b64decode(page.get_screenshot_as_base64())
  assert picture[:8] == b'\x89PNG\r\n\x1a\n' and len(picture) > 20_000  # not blank


def test_descriptions_are_beside_the_boards_that_they_are_about_with_right_and_wrong_told(page):
  _set(page, 'step-max', '3')
  _set(page, 'step-min', '3')
  _open(page, split='train')
  rows = _all(page, '.turn')[0].find_elements(By.CSS_SELECTOR, '.described')
  assert [row.get_attribute('aria-label') for row in rows] == ['Observation of turn 1', 'Prediction of turn 1']
  labels = [row.find_element(By.CSS_SELECTOR, '.label').text.lower() for row in rows]
  assert labels == ['observation: score 0.5, reward +0.25', 'prediction: not scored']
  claims = rows[0].find_elements(By.CSS_SELECTOR, '.claim')
  assert [(claim.get_attribute('class'), claim.text) for claim in claims] == [
    ('claim right', '✓ goal is here'), ('claim half', '½ hole is near (in truth: the hole is far)'),
  ]  # fmt: skip
  paragraphs = [p.text for p in rows[0].find_elements(By.CSS_SELECTOR, 'p')]
  assert paragraphs[0].startswith('The ✓ goal is here; the ½ hole is near')
  assert paragraphs[1:] == ['not described: the hole is behind']
  # What the policy wrote is text, and colours differ.
  claims += rows[1].find_elements(By.CSS_SELECTOR, '.claim')
  assert claims[-1].text == f'✗ {ATTACKS[1]}' and page.title != 'broken'
  assert len({claim.value_of_css_property('background-color') for claim in claims}) == 3
  # The board before the turn, and the board after it.
  sources = "return [...document.querySelectorAll('.turn')].map(t => [...t.querySelectorAll('.board')].map(b => b.src))"
  turns = page.execute_script(sources)
  for (before, *described), (after, *_) in itertools.pairwise(turns):
    assert described == [before, after]
  assert '+0.75 for the reply' in _all(page, '.turn .outcome')[0].text


def test_images_that_the_policy_saw_are_shown_in_place_of_the_board(page, run):
  _set(page, 'step-max', '4')
  _set(page, 'step-min', '4')
  _open(page, split='train')
  first, end = _all(page, '.turn')[0], _all(page, '.turn')[-1]
  script = 'return [...arguments[0].querySelectorAll("img")].map(i => [i.className, i.naturalWidth, i.alt])'
  shown = page.execute_script(script, first)
  assert [(name, width) for name, width, _ in shown] == [('board seen', 32)] * 2
  assert [alt for _, _, alt in shown] == [f'Image {i} that the policy saw: board 0' for i in (1, 2)]
  assert 'the images that the policy saw' in first.text and 'as text' in first.text
  assert [name for name, *_ in page.execute_script(script, end)] == ['board']
  # The file has each image once, however many turns show it.
  (file,) = [x for x in read_episodes(run) if x.path.name == 'train-00000004.jsonl.gz']
  used = {i for record in file.records() for turn in record['turns'] for i in turn['images']}
  assert len(used) == 2 and len(set(file.pictures)) == len(file.pictures)


def test_a_page_of_some_steps_tells_it(browser, tmp_path):
  for step in range(20):
    EpisodeWriter(tmp_path, start_step=step).write('eval', step, [episode_record(step=step)])
  write_page(tmp_path, max_bytes=1)
  browser.get((tmp_path / PAGE).as_uri())
  told = browser.find_element(By.ID, 'partial').text
  assert told == (
    '1 of 20 steps: the newest, the first and some between. --mode=view with the workdir writes a page of all.'
  )
  write_page(tmp_path)
  browser.refresh()
  assert browser.find_element(By.ID, 'partial').text == ''
