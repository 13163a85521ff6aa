"""Regenerates rows/: the same rows as JSONL, as Parquet, and as folders of save_to_disk.

    python tests/golden/rows.py            (datasets 5, pyarrow 26)

  rows.jsonl        the rows, with the fields that a row lacks left out
  rows.parquet      snappy, in two row groups
  zstd.parquet      the first rows, with zstd; gzip.parquet with gzip
  saved/            save_to_disk, two Arrow streams
  splits/           save_to_disk of a DatasetDict: train and test
  zstd.arrow        the first rows as an Arrow stream, with zstd
  image.parquet     a column that is not text
"""

import json
import pathlib
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

OUT = pathlib.Path(__file__).with_suffix("")


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def row(i):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": i, "b": None if i % 2 else 2}}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    answer = [message("assistant", f"{i} plus 2 is {i + 2}é")]
    fields = {
        "messages": [message("user", f"{i} + 2?"), message("assistant", "", tool_calls=[call]),
                     message("tool", str(i + 2))] + answer,
        "prompt": f"{i} + 2 = ",
        "response": str(i + 2),
        "chosen": answer,
        "rejected": [message("assistant", "no")],
        "tools": [tool] if i % 3 else None,
        "ids": [i, 1, 2],
        "answer": i + 2,
        "score": i / 4,
        "is_even": i % 2 == 0,
        "note": None if i == 1 else "text",
    }
    return fields


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    rows = [row(i) for i in range(10)]
    (OUT / "rows.jsonl").write_text(
        "".join(json.dumps(without_nulls(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, OUT / "rows.parquet", row_group_size=6, write_statistics=False)
    small = table.select(["prompt", "response", "answer"]).slice(0, 3)
    pq.write_table(small, OUT / "zstd.parquet", compression="zstd")
    pq.write_table(small, OUT / "gzip.parquet", compression="gzip")
    with pa.ipc.new_stream(OUT / "zstd.arrow", small.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(small)
    image = small.append_column("image", pa.array([{"bytes": b"\x00\xff", "path": "a.png"}] * 3))
    pq.write_table(image, OUT / "image.parquet")
    data = datasets.Dataset(table)
    data.save_to_disk(OUT / "saved", num_shards=2)
    parts = {"train": datasets.Dataset(table.slice(0, 7)), "test": datasets.Dataset(table.slice(7))}
    datasets.DatasetDict(parts).save_to_disk(OUT / "splits")
    for path in sorted(OUT.rglob("*")):
        if path.is_file():
            print(path.relative_to(OUT), path.stat().st_size)


if __name__ == "__main__":
    main()
