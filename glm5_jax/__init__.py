"""GLM-5 in JAX. The names below are the stable public surface; see docs/paper_map.md for the rest."""

import importlib

_PUBLIC = {
  'ModelConfig': 'glm5_jax.config',
  'GLM5': 'glm5_jax.modules.model',
  'forward': 'glm5_jax.modules.model',
  'generate': 'glm5_jax.infer.generate',
  'load_hf': 'glm5_jax.convert',
  'save_hf': 'glm5_jax.convert',
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
  return __all__
