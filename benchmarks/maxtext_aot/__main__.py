"""`python -m benchmarks.maxtext_aot`: see compare.py."""

import sys

from benchmarks.maxtext_aot import compare

if __name__ == '__main__':
  sys.exit(compare.main())
