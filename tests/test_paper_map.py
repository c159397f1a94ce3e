"""docs/paper_map.md: complete, and everything that it names exists."""

import ast
import pathlib
import re

import pytest

from tests import source_tree

TEXT = (source_tree.ROOT / 'docs' / 'paper_map.md').read_text(encoding='utf-8')
# Every numbered section and equation of arXiv 2602.15763v2 but for lists of names.
PAPER = (
  """
1 2 2.1 2.1.1 2.1.2 2.2 2.3 2.4 2.4.1 2.4.2 2.4.3
3 3.1 3.2 3.3 3.4 3.5 3.6 3.6.1 3.6.2 3.6.3
4 4.1 4.1.1 4.1.2 4.2 4.2.1 4.2.2 4.2.3 4.2.4 4.2.5
5 6 6.1 6.1.1 6.1.2 6.1.3 6.2 6.2.1 6.2.2 6.2.3 6.2.4 6.3 6.3.1 6.3.2 6.3.3 6.3.4 6.3.5
7 8 A B B.1 B.2 B.3 B.4 B.4.1
""".split()
  + [f'Eq. {n}' for n in range(1, 6)]
)


def _rows() -> list[list[str]]:
  lines = [line for line in TEXT.splitlines() if line.startswith('|') and '---' not in line]
  rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
  return [row for row in rows if row[0] != 'in the paper']


def _references(text: str) -> list[tuple[str, str]]:
  """All (file, symbol) in back quotes; the symbol is '' where only a file is named."""
  return re.findall(r'`([\w./-]+\.(?:py|md|json|gz|svg))(?:::([\w.]+))?`', text)


def test_every_section_and_equation_is_there():
  named = [place for row in _rows() for place in row[0].split(', ')]
  missing = [place for place in PAPER if place not in named]
  assert not missing, f'docs/paper_map.md lacks {missing}'


def test_rows_are_honest():
  """A row names code and a test of it, or says that it is planned, or why there is no code."""
  for row in _rows():
    assert len(row) == 4, f'{row[0]}: four columns'
    code, tests = row[2:]
    if _references(code):
      assert _references(tests), f'{row[0]}: names code but no test'
      assert all(path.startswith('tests/') for path, _ in _references(tests)), row[0]
    else:
      assert re.match(r'(planned|no code)\b', code), f'{row[0]}: no file, and does not say why'
      assert not _references(tests), f'{row[0]}: has tests but no code'


def _defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
  out: dict[str, ast.stmt] = {}
  for node in body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      out[node.name] = node
    elif isinstance(node, ast.Assign):
      out |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      out[node.target.id] = node
  return out


def _exists(path: str, symbol: str) -> bool:
  if not (source_tree.ROOT / path).is_file():
    return False
  body = source_tree.tree(pathlib.Path(path)).body if symbol else []
  for name in filter(None, symbol.split('.')):
    node = _defined(body).get(name)
    if node is None:
      return False
    body = getattr(node, 'body', [])
  return True


def test_all_that_is_named_exists():
  references = _references(TEXT)
  assert len(references) > 30
  absent = sorted({'::'.join(filter(None, r)) for r in references if not _exists(*r)})
  assert not absent, f'docs/paper_map.md names what does not exist: {absent}'


@pytest.mark.parametrize(
  'reference, exists',
  [
    (('glm5_jax/config.py', 'ModelConfig.index_topk'), True),
    (('glm5_jax/config.py', 'ModelConfig.no_such_field'), False),
    (('glm5_jax/config.py', 'no_such_function'), False),
    (('glm5_jax/no_such_file.py', ''), False),
  ],
)
def test_the_check_itself(reference, exists):
  assert _exists(*reference) is exists
