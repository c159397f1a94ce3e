"""What the repository's modules import, read from their syntax trees without running them."""

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ('glm5_jax', 'pallas_kernels', 'experiments', 'configs', 'benchmarks', 'tests')


@functools.cache
def modules() -> dict[str, pathlib.Path]:
  """Dotted name -> file (relative to the root) of every Python module of the repository."""
  files = (f for p in PACKAGES for f in sorted((ROOT / p).rglob('*.py')))
  return {module_name(f.relative_to(ROOT)): f.relative_to(ROOT) for f in files}


def module_name(path: pathlib.Path) -> str:
  """glm5_jax/ops/__init__.py -> glm5_jax.ops."""
  parts = path.with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
  """The syntax tree of a file given relative to the root."""
  return ast.parse((ROOT / path).read_text(encoding='utf-8'), filename=str(path))


@functools.cache
def imports(path: pathlib.Path) -> frozenset[str]:
  """Dotted names of all modules a file imports, at its top or inside functions.

  Our own are complete (`from glm5_jax.ops import mla` gives glm5_jax.ops.mla); of others,
  `from a.b import c` gives a.b. The standard library is left out. What a facade (__init__.py)
  imports lazily, by name, counts as well.
  """
  found: set[str] = set()
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Import):
      found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        raise AssertionError(f'{path}:{node.lineno}: relative import; write the whole name')
      for alias in node.names:
        whole = f'{node.module}.{alias.name}'
        found.add(whole if whole in modules() else str(node.module))
    elif isinstance(node, ast.Constant) and path.name == '__init__.py' and node.value in modules():
      found.add(str(node.value))  # A facade that imports lazily, by name.
  return frozenset(n for n in found if n.partition('.')[0] not in sys.stdlib_module_names)
