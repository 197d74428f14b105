"""`python -m cluster <command>`: an alias of `tandem <command>`, for one release."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tandem", run_name="__main__", alter_sys=True)
