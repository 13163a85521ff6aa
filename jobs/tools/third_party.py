#!/usr/bin/env python3
"""Prints the licenses of the crates in the binary: a list, then each different text once.

Reads the output of `cargo metadata --locked --format-version 1 --filter-platform TARGET` from standard input. A crate that
has neither the name nor the text of a license is an error.
"""

import json
import sys
from pathlib import Path


def linked(metadata):
    """Returns the packages that the root needs to build or run, without the root itself."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    seen, left = set(), [root]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            deps = nodes[name]["deps"]
            left += [dep["pkg"] for dep in deps if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    return sorted((p for p in metadata["packages"] if p["id"] in seen - {root}), key=lambda p: (p["name"], p["version"]))


def texts(package):
    """Yields the license files of a crate, including the ones of bundled sources (HDF5, Oniguruma)."""
    folder = Path(package["manifest_path"]).parent
    words = ("license", "licence", "copying", "copyright", "notice", "unlicense")
    code = (".rs", ".py", ".c", ".h", ".cmake", ".sh", ".html", ".in")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.lower().startswith(words) and path.suffix.lower() not in code:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            if text:
                yield str(path.relative_to(folder)), text


def main():
    packages = linked(json.load(sys.stdin))
    users = {}
    print("Crates in the binary, with the licenses under which they may be used:\n")
    for package in packages:
        label = f"{package['name']} {package['version']}"
        print(f"  {label:40} {package['license'] or 'see its file'}  {package['repository'] or ''}".rstrip())
        found = list(texts(package))
        for name, text in found:
            users.setdefault(text, []).append(f"{label} ({name})")
        if not found and not package["license"]:
            sys.exit(f"error: {label} has neither the name nor the text of a license")
    for text, of in users.items():
        print(f"\n{'=' * 100}\n{', '.join(of)}\n{'=' * 100}\n\n{text}")


if __name__ == "__main__":
    main()
