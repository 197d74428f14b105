"""A check that fails where a C++ compiler warns of our sources; it passes where there is none."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from workers.cpu import native

if compiler := next(filter(None, map(shutil.which, native.COMPILERS)), None):
    result = native.run_compiler(compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    sys.exit(result.stderr or result.returncode)
