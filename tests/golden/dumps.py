"""Makes the dumps of tests/cli/verify.rs: what transformers computes for models of tests/golden/models, as
jobs/tools/dump_model.py writes it.

    python tests/golden/dumps.py  # needs torch, transformers >= 5.24, safetensors
"""

import pathlib
import subprocess
import sys

IDS = "5,77,130,12,9,64,3,101,88,42,17,120,55,31,99,6,70,23,111,2,48,90,14,66"
here = pathlib.Path(__file__).parent
script = here.parent.parent / "jobs/tools/dump_model.py"
for name in ["llama3", "qwen3", "gemma3_text"]:
    out = here / f"dumps/{name}.safetensors"
    subprocess.run([sys.executable, script, here / "models" / name, out, "--ids", IDS, "--new", "8"], check=True)
    out.chmod(0o644)
