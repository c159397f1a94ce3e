"""The rules of the code's layout: who may import whom, how long a file may be, what a config is.

docs/decisions.md says why. All of it is read from the syntax trees; nothing is imported.
"""

import ast
import pathlib
import statistics

import pytest

from tests import source_tree

BASE = ('glm5_jax.config', 'glm5_jax.shapes', 'glm5_jax.sharding')

# Package or module -> what it may import of ours, and of other people's. `None` is anything. A
# package may always import itself.
RULES: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
  'glm5_jax.config': ((), ()),
  'glm5_jax.shapes': ((), ('jax',)),
  'glm5_jax.sharding': (BASE, ('jax', 'numpy')),
  'glm5_jax.kernels': (BASE + ('glm5_jax.ops', 'pallas_kernels'), ('jax',)),
  # The indexer's KL is taken inside an attention chunk: outside, its inputs no longer exist.
  'glm5_jax.ops': ((*BASE, 'glm5_jax.losses.indexer_kl'), ('jax', 'numpy')),
  'glm5_jax.losses': (BASE, ('jax', 'numpy')),
  'glm5_jax.modules': (
    (*BASE, 'glm5_jax.ops', 'glm5_jax.losses.indexer_kl'),
    ('jax', 'flax'),
  ),
  'glm5_jax.optim': (BASE, ('jax', 'optax', 'numpy')),
  'glm5_jax.data': (
    BASE,
    ('numpy', 'grain', 'array_record', 'pyarrow', 'tokenizers', 'jinja2', 'absl'),
  ),
  'glm5_jax.convert': (BASE, ('jax', 'numpy', 'ml_dtypes', 'safetensors', 'absl')),
  'pallas_kernels': ((), ('jax', 'numpy')),
  'configs': (('configs.base', 'configs.rl_base'), ('ml_collections',)),
}
# train, infer, rl and whatever comes later: anything of ours but these.
NEVER_IN_LIBRARY = ('experiments', 'configs', 'benchmarks', 'tests', 'pallas_kernels')
ONLY_OUTSIDE_LIBRARY = ('torch', 'transformers', 'pytest', 'chex', 'hypothesis')

MODULES = source_tree.modules()


def _within(name: str, package: str) -> bool:
  return name == package or name.startswith(package + '.')


def _allowed(name: str, packages: tuple[str, ...]) -> bool:
  return any(_within(name, p) for p in packages)


def _rule(module: str):
  fitting = [p for p in RULES if _within(module, p)]
  return max(fitting, key=len) if fitting else None


def _violations(module: str, imported: frozenset[str]) -> list[str]:
  """Of everything `imported` by `module`, what the rules forbid, each with its reason."""
  out = []
  ours = {i for i in imported if i.partition('.')[0] in source_tree.PACKAGES}
  rule = _rule(module)
  if rule:
    own, other = RULES[rule]
    if own is not None:
      out += [f'{i}: {rule} may import only {own}' for i in ours
              if not _allowed(i, (*own, rule))]  # fmt: skip
    if other is not None:
      out += [f'{i}: {rule} may import only {other}' for i in imported - ours
              if not _allowed(i, other)]  # fmt: skip
  if _within(module, 'glm5_jax'):
    never = NEVER_IN_LIBRARY if module != 'glm5_jax.kernels' else NEVER_IN_LIBRARY[:-1]
    out += [f'{i}: not in the library' for i in imported
            if _allowed(i, never + ONLY_OUTSIDE_LIBRARY)]  # fmt: skip
  if not _within(module, 'experiments') and not _within(module, 'tests'):
    out += [f'{i}: nobody imports experiments' for i in ours if _within(i, 'experiments')]
  if not _within(module, 'tests'):
    out += [f'{i}: only tests import tests' for i in ours if _within(i, 'tests')]
  return sorted(set(out))


def test_import_directions():
  found = {
    str(path): bad
    for module, path in MODULES.items()
    if (bad := _violations(module, source_tree.imports(path)))
  }
  assert not found, '\n'.join(f'{p} imports {b}' for p, bad in found.items() for b in bad)


@pytest.mark.parametrize(
  'module, imported',
  [
    ('glm5_jax.ops.mla', 'flax.linen'),
    ('glm5_jax.losses.language_model', 'optax'),
    ('glm5_jax.ops.mla', 'glm5_jax.modules.mlp'),
    ('glm5_jax.modules.attention', 'pallas_kernels.indexer'),
    ('glm5_jax.data.packing', 'glm5_jax.modules.model'),
    ('glm5_jax.convert.hf_map', 'glm5_jax.modules.model'),
    ('glm5_jax.optim.muon', 'glm5_jax.train.step'),
    ('glm5_jax.train.loop', 'experiments.run'),
    ('glm5_jax.train.loop', 'torch'),
    ('pallas_kernels.topk.api', 'glm5_jax.config'),
    ('configs.nano_pretrain', 'glm5_jax.config'),
    ('benchmarks.hf_cpu', 'experiments.run'),
  ],
)
def test_the_rules_catch(module, imported):
  assert _violations(module, frozenset({imported}))


def test_private_jax_only_in_kernels():
  bad = [
    str(path)
    for module, path in MODULES.items()
    if not _within(module, 'pallas_kernels') and path.name != pathlib.Path(__file__).name
    and any(_within(i, 'jax._src') for i in source_tree.imports(path)) | _mentions_jax_src(path)
  ]  # fmt: skip
  assert not bad, f'jax._src is private: {bad}'


def _mentions_jax_src(path: pathlib.Path) -> bool:
  return any(
    isinstance(n, ast.Attribute) and n.attr == '_src' for n in ast.walk(source_tree.tree(path))
  )


def test_file_lengths():
  lengths = {
    path: len((source_tree.ROOT / path).read_text(encoding='utf-8').splitlines())
    for path in MODULES.values()
  }
  too_long = {
    str(p): n
    for p, n in lengths.items()
    if n > (800 if p.parts[0] == 'pallas_kernels' and p.name.startswith('kernel_') else 600)
  }
  assert not too_long, f'split by idea: {too_long}'
  assert statistics.median(lengths.values()) < 200


def _config_files() -> list[pathlib.Path]:
  return [
    p
    for m, p in MODULES.items()
    if _within(m, 'configs') and p.stem != '__init__' and not p.stem.endswith('base')
  ]


def test_configs_define_get_config():
  assert _config_files()
  for path in _config_files():
    functions = {n.name: n for n in source_tree.tree(path).body if isinstance(n, ast.FunctionDef)}
    assert 'get_config' in functions, f'{path} has no get_config()'
    docs = [ast.get_docstring(n) or '' for n in (source_tree.tree(path), functions['get_config'])]
    assert '--config=' in ''.join(docs), f'{path}: the docstring must say the command to run'


def test_configs_have_no_side_effects():
  """Importing a config only defines names: no loop, no condition, no call but of a container."""
  containers = ('dict', 'tuple', 'frozenset')
  for path in (p for m, p in MODULES.items() if _within(m, 'configs')):
    for node in source_tree.tree(path).body:
      where = f'{path}:{node.lineno}'
      docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
      plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign)
      assert docstring or isinstance(node, plain), f'{where}: {type(node).__name__} at top level'
      if isinstance(node, ast.Assign | ast.AnnAssign):
        calls = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
        assert set(calls) <= set(containers), f'{where}: calls {calls} at top level'
