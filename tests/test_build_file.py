"""BUILD says the truth: every module is in exactly one target, and deps are what it imports.

The file is derived from the tree. Where this test says that it is out of date:

  .venv/bin/python -m tests.test_build_file > BUILD
"""

import ast
import dataclasses
import graphlib
import pathlib
import re

from tests import source_tree

_HEADER = '''\
"""Targets of the whole repository, one library per package, for Bazel's rules_python.

They mirror the import rules that tests/test_architecture.py enforces. Third-party packages are
labels of a pip hub named `pypi`, filled from requirements.lock. Derived from the imports by
`python -m tests.test_build_file > BUILD`, and checked by the same file.
"""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

licenses(["notice"])
'''
# Modules whose distribution has another name.
_DISTRIBUTIONS = {'absl': 'absl_py', 'orbax': 'orbax_checkpoint'}
# Imports that no `import` statement shows: pytest loads conftest.py.
_TEST_SUPPORT = 'tests/support'


@dataclasses.dataclass(frozen=True)
class Target:
  """One rule of BUILD."""

  kind: str
  name: str
  srcs: tuple[pathlib.Path, ...]
  deps: frozenset[str]


def _is_binary(path: pathlib.Path) -> bool:
  return any(
    isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    for node in source_tree.tree(path).body
  )


# Of pallas_kernels, what its ops need.
_BELOW = ('shapes', 'residuals', 'tuning', 'tuning_table')


def _target_of(path: pathlib.Path) -> tuple[str, str]:
  """Kind and name of the target that a file belongs to."""
  package = str(path.parent)
  if path.parts[0] == 'tests':
    is_test = path.name.startswith('test_')
    return ('py_test', str(path.with_suffix(''))) if is_test else ('py_library', _TEST_SUPPORT)
  if path.parts[0] in ('experiments', 'benchmarks', 'pallas_kernels') and _is_binary(path):
    return 'py_binary', str(path.with_suffix(''))
  # config.py and its like stand below the packages.
  if (package == 'glm5_jax' and path.name != '__init__.py') or path.stem in _BELOW:
    return 'py_library', str(path.with_suffix(''))
  return 'py_library', package


def _deps(name: str, srcs: tuple[pathlib.Path, ...]) -> frozenset[str]:
  """Labels of everything that the files of target `name` import."""
  labels = set()
  for imported in set().union(*(source_tree.imports(f) for f in srcs)):
    top = imported.partition('.')[0]
    if top not in source_tree.PACKAGES:
      labels.add(f'@pypi//{_DISTRIBUTIONS.get(top, top)}'.lower())
    elif imported in source_tree.modules():
      labels.add(f':{_target_of(source_tree.modules()[imported])[1]}')
  if name.startswith('tests/'):
    labels.add(f':{_TEST_SUPPORT}')
  return frozenset(labels - {f':{name}'})


def _expected() -> list[Target]:
  grouped: dict[tuple[str, str], list[pathlib.Path]] = {}
  for path in source_tree.modules().values():
    grouped.setdefault(_target_of(path), []).append(path)
  return [
    Target(kind, name, tuple(srcs), _deps(name, tuple(srcs)))
    for (kind, name), srcs in sorted(grouped.items(), key=lambda item: item[0][1])
  ]


def render() -> str:
  """The text that BUILD should have."""
  rules = []
  for t in _expected():
    lists = {'srcs': [str(p) for p in t.srcs], 'deps': sorted(t.deps)}
    lines = [f'{t.kind}(', f'    name = "{t.name}",']
    for key, values in lists.items():
      if len(values) == 1:
        lines.append(f'    {key} = ["{values[0]}"],')
      elif values:
        lines += [f'    {key} = [', *(f'        "{v}",' for v in values), '    ],']
    if t.name in ('configs', 'glm5_jax', 'pallas_kernels'):
      lines.append('    visibility = ["//visibility:public"],')
    rules.append('\n'.join([*lines, ')']))
  return '\n'.join([_HEADER, *(rule + '\n' for rule in rules)]).rstrip('\n')


def _committed() -> dict[str, Target]:
  """BUILD as it stands. Starlark's subset used there is Python syntax."""
  out = {}
  body = ast.parse((source_tree.ROOT / 'BUILD').read_text(encoding='utf-8')).body
  for call in (node.value for node in body if isinstance(node, ast.Expr)):
    if isinstance(call, ast.Call) and re.match('py_', ast.unparse(call.func)):
      values = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
      srcs = tuple(map(pathlib.Path, values['srcs']))
      assert values['name'] not in out, f'two targets are named {values["name"]}'
      out[values['name']] = Target(
        ast.unparse(call.func), values['name'], srcs, frozenset(values.get('deps', ()))
      )
  return out


_HOW = 'update it: .venv/bin/python -m tests.test_build_file > BUILD'


def test_every_module_is_in_exactly_one_target():
  listed = [src for t in _committed().values() for src in t.srcs]
  twice = {str(p) for p in listed if listed.count(p) > 1}
  assert not twice, f'in two targets: {twice}'
  missing = sorted(map(str, set(source_tree.modules().values()) - set(listed)))
  gone = sorted(map(str, set(listed) - set(source_tree.modules().values())))
  assert not missing and not gone, f'BUILD lacks {missing}, names absent {gone}; {_HOW}'


def test_deps_match_imports():
  for target in _committed().values():
    imported = _deps(target.name, target.srcs)
    assert target.deps == imported, (
      f'{target.name}: BUILD lacks {sorted(imported - target.deps)},'
      f' names unused {sorted(target.deps - imported)}; {_HOW}'
    )


def test_targets_mirror_the_layout():
  """No cycles (the sorter raises), and what must stay apart stays apart, also indirectly."""
  targets = _committed()
  ours = {t.name: {d[1:] for d in t.deps if d.startswith(':')} for t in targets.values()}
  reach: dict[str, set[str]] = {}
  for name in graphlib.TopologicalSorter(ours).static_order():
    assert name in targets, f'BUILD names :{name} among deps, but has no such target'
    reach[name] = set(targets[name].deps).union(*(reach[d] for d in ours[name]))
  assert not reach['glm5_jax/ops'] & {'@pypi//flax', '@pypi//optax', ':glm5_jax/modules'}
  assert not reach['glm5_jax/data'] & {':glm5_jax/modules', ':glm5_jax/ops'}
  assert '@pypi//torch' not in reach['glm5_jax']
  libraries = [n for n, t in targets.items() if t.kind == 'py_library' and 'tests' not in n]
  assert libraries and not any('experiments' in d for n in libraries for d in reach[n])


def test_kinds():
  for target in _committed().values():
    expected = {_target_of(src) for src in target.srcs}
    assert expected == {(target.kind, target.name)}, f'{target.name}: {_HOW}'


def _declared(*files: str) -> set[str]:
  """Labels of the packages that requirements files name."""
  lines = [line for f in files for line in (source_tree.ROOT / f).read_text().splitlines()]
  names = (re.match(r'[\w-]+', line) for line in lines if not line.startswith(('#', '-')))
  return {f'@pypi//{m[0]}'.lower().replace('-', '_') for m in names if m}


def test_what_is_imported_is_declared():
  """Not brought in by chance, as another package's dependency."""
  # XManager is for those who have it: the launcher imports it when asked to, and says what is missing.
  runs = _declared('requirements.txt') | {'@pypi//xmanager'}
  # MaxText, which benchmarks/maxtext_aot runs in an environment of its own, has a list there.
  tests = runs | _declared('requirements-dev.txt', 'requirements-hf.txt') | {'@pypi//maxtext'}
  for target in _committed().values():
    outside = target.name.startswith(('tests', 'benchmarks'))
    missing = {d for d in target.deps if d.startswith('@')} - (tests if outside else runs)
    assert not missing, f'{target.name} imports {missing}, which no requirements file names'


if __name__ == '__main__':
  print(render())
