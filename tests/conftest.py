"""Set before anything else is imported: what a test run may use of the machine."""

import os

# Two cores are shared by everything a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing may be fetched: a test that names an unknown model must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# The default differs between ray.init and ray start, and writes a token to the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
