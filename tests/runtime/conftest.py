import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # case.py and serial.py are shared by the tests here
