"""Runs the Python of a manual page, block after block in one namespace: page_code.py PAGE.md [DIR]

The code reads the runs of DIR, the current folder without it. pandas, h5py and matplotlib must be installed.
"""

import os
import re
import sys

page = os.path.abspath(sys.argv[1])
os.chdir(sys.argv[2] if len(sys.argv) > 2 else ".")
with open(page, encoding="utf-8") as file:
    blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)
names = {}
for i, block in enumerate(blocks):
    print(f"== block {i + 1}\n{block}--")
    exec(compile(block, f"{os.path.basename(page)}, block {i + 1}", "exec"), names)
print(f"== {len(blocks)} blocks")
