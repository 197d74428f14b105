import signal
import subprocess
import sys


def test_a_process_ends_with_its_parent() -> None:
    """The parent that is named has another number than the process that started this one."""
    code = "from workers.cpu.lifetime import end_with; end_with(2**22 + 1)"
    ended = subprocess.run([sys.executable, "-c", code], start_new_session=True, check=False)
    assert ended.returncode == -signal.SIGKILL
