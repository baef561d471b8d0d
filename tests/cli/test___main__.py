import subprocess
import sys


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hetxl.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hetxl ")
