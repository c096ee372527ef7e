# SPDX-License-Identifier: Apache-2.0
"""The reader: properties and rows, missing and damaged files, and exports."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.capture.captured import assert_same, captured
from vllm_steer.capture import SiteRows
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.export import export_npz, export_parquet, to_arrow, to_dataset
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.request import CaptureSpec, parse_capture

LAYOUTS = ("per_request", "packed", "sharded")


def write(root: Path, *requests, layout="per_request"):
    consumer = FilesystemConsumer(root=str(root), layout=layout)
    for request in requests:
        consumer.accept(request)
    consumer.close()
    return open_captures(root)


class TestReader:
    def test_home(self, tmp_path, monkeypatch):
        """Catches a root that the consumer finds in the home directory and the reader in the present one."""
        monkeypatch.setenv("HOME", str(tmp_path))
        consumer = FilesystemConsumer(root="~/acts")
        consumer.accept(captured())
        consumer.close()
        assert len(open_captures("~/acts")) == 1

    def test_properties(self, tmp_path):
        """Catches properties that are lost, swapped or renamed."""
        request = captured(
            "id",
            sample=2,
            status="partial",
            error="preempted",
            before=True,
            dtype=torch.float16,
            reduce={"directions": [[1.0] * 16] * 5},
            options={"tag": "run 3"},
        )
        (stored,) = write(tmp_path, request)
        assert (stored.request_id, stored.sample, stored.model, stored.tag) == ("id", 2, "tiny", "run 3")
        assert (stored.status, stored.error) == ("partial", "preempted")
        assert (stored.num_prompt_tokens, stored.num_output_tokens) == (5, 7)
        assert stored.num_bytes == 3 * 5 * 16 * 2
        assert stored.spec == {
            "hooks": {"pre_attn": [0], "post_block": [0, 3]},
            "positions": "all",
            "before": True,
            "dtype": None,
            "reduce": {"directions": [5, 16]},
        }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_numpy(self, tmp_path, dtype):
        """Catches bfloat16 returned as integers, and values changed by the conversion."""
        request = captured(dtype=dtype)
        (stored,) = write(tmp_path, request)
        array = stored.numpy("post_block", 3)
        assert array.dtype == (np.float16 if dtype == torch.float16 else np.float32)
        np.testing.assert_array_equal(array, request.tensor("post_block", 3).float().numpy())

    @pytest.mark.parametrize("positions", ["last_prompt", "all_prompt", "all_generated", "all", [0, [3, None], -2]])
    def test_spec_round_trip(self, tmp_path, positions):
        """Catches a stored spec that its own parser rejects."""
        request = captured()
        spec = CaptureSpec(hooks={"pre_attn": [0], "post_block": "all"}, positions=positions, dtype="float16")
        (stored,) = write(tmp_path, dataclasses.replace(request, spec=spec))
        assert parse_capture({"memory": stored.spec}) == (("memory", spec),)

    def test_unknown_site_lists_captured_sites(self, tmp_path):
        """Catches an error that does not say what was captured."""
        (stored,) = write(tmp_path, captured())
        for read in (stored.tensor, stored.numpy, stored.positions, stored.token_ids):
            with pytest.raises(KeyError, match=r"post_attn\[0\] was not captured.*pre_attn\[0\]"):
                read("post_attn", 0)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_find(self, tmp_path, layout):
        """Catches a search by prefix, and samples that are ignored."""
        captures = write(tmp_path, *(captured(f"r{i}", seed=i) for i in range(12)), layout=layout)
        (stored,) = captures.find("r1")
        assert_same(stored, captured("r1", seed=1))
        assert captures.find("r") == [] and captures.find("r1", sample=1) == []

    def test_find_in_a_renamed_file(self, tmp_path):
        """Catches a search that trusts the name of a single file."""
        write(tmp_path, captured("id"))
        (path,) = tmp_path.iterdir()
        path.rename(tmp_path / f"{'0' * 32}-0.safetensors")
        assert len(open_captures(next(tmp_path.iterdir())).find("id")) == 1

    def test_rows_outlive_the_file(self, tmp_path):
        """Catches a mapping that ends with its reader."""
        request = captured()
        (stored,) = write(tmp_path, request)
        rows = stored.tensor("pre_attn", 0)
        stored.path.unlink()
        del stored
        assert torch.equal(rows, request.tensor("pre_attn", 0))

    def test_files_are_not_kept_mapped(self, tmp_path):
        """Catches one mapping per file of a directory; Linux allows 65,530."""
        held = list(write(tmp_path, *(captured(f"r{i}") for i in range(50))))
        maps = Path("/proc/self/maps").read_text()
        assert len(held) == 50 and str(tmp_path) not in maps

    def test_other_files_are_skipped(self, tmp_path):
        """Catches errors about files that are not captures."""
        (tmp_path / "notes.txt").write_text("x")
        (tmp_path / ".x.safetensors.part").write_text("x")
        (tmp_path / "folder.safetensors").mkdir()
        assert [request.request_id for request in write(tmp_path, captured("own"))] == ["own"]

    def test_missing_path_and_empty_directory(self, tmp_path):
        """Catches a missing path read as an empty directory."""
        with pytest.raises(FileNotFoundError, match="no-such"):
            open_captures(tmp_path / "no-such")
        assert list(open_captures(tmp_path)) == []


def contents(path: Path):
    """Return the tensors and the metadata of a file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118


def change_index(path: Path, change) -> None:
    """Rewrite a file with a changed index."""
    tensors, metadata = contents(path)
    index = json.loads(metadata["requests"])
    change(index[0])
    save_file(tensors, path, metadata | {"requests": json.dumps(index)})


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path):
        write(tmp_path, captured())
        return next(tmp_path.iterdir())

    def read(self, path):
        for request in open_captures(path):
            for site in request.sites:
                request.tensor(*site), request.positions(*site), request.token_ids(*site)

    def test_undamaged_file(self, path):
        """Catches a helper that damages every file."""
        self.read(path)
        change_index(path, lambda entry: None)
        self.read(path)

    @pytest.mark.parametrize("keep", [0, 7, 100, 600, -1])
    def test_truncated_file(self, path, keep):
        """Catches zeros, or rows of another request, read from a truncated file, and one that is only found later."""
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CaptureFileError, match=rf"{path.name} cannot be read .*: .*; remove it, or copy it again"):
            open_captures(path.parent)

    def test_another_safetensors_file(self, path):
        """Catches another safetensors file read as a capture without requests."""
        save_file({"weight": torch.zeros(3)}, path)
        with pytest.raises(CaptureFileError, match="another safetensors file"):
            self.read(path)

    def test_another_version(self, path):
        """Catches a later format read as this one."""
        save_file({"weight": torch.zeros(3)}, path, {"format": "vllm-steer capture", "version": "2"})
        with pytest.raises(CaptureFileError, match="version 2"):
            self.read(path)

    def test_missing_index(self, path):
        """Catches a KeyError instead of a CaptureFileError."""
        save_file({"weight": torch.zeros(3)}, path, {"format": "vllm-steer capture", "version": "1"})
        with pytest.raises(CaptureFileError, match=path.name):
            self.read(path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda entry: entry.pop("request_id"),
            lambda entry: entry.update(sample="0"),
            lambda entry: entry["sites"][0].update(rows=[0, 6]),
            lambda entry: entry["sites"][0].update(rows=[-1, 5]),
            lambda entry: entry["sites"][0].update(rows=[3, 2]),
            lambda entry: entry["sites"][0].update(tokens=[0, 10**30]),
            lambda entry: entry["sites"][0].update(tokens=[1, 99]),
            lambda entry: entry["sites"][0].update(tensor="../../etc/passwd"),
        ],
    )
    def test_index_with_invalid_entries(self, path, change):
        """Catches ranges that Python slices shorten or count from the end."""
        change_index(path, change)
        with pytest.raises(CaptureFileError, match=path.name):
            self.read(path)

    def test_index_with_invalid_bytes(self, path):
        """Catches a UnicodeDecodeError instead of a CaptureFileError."""
        data = path.read_bytes()
        assert b"tiny" in data
        path.write_bytes(data.replace(b"tiny", b"\xff\xfe\xff\xfe"))
        with pytest.raises(CaptureFileError, match=path.name):
            self.read(path)

    def test_index_with_nested_json(self, path):
        """Catches a RecursionError instead of a CaptureFileError."""
        change_index(path, lambda entry: entry["spec"].update(x="NESTED"))
        tensors, metadata = contents(path)
        text = metadata["requests"].replace('"NESTED"', "[" * 9999 + "]" * 9999)
        save_file(tensors, path, {**metadata, "requests": text})
        with pytest.raises(CaptureFileError, match=path.name):
            self.read(path)

    @pytest.mark.parametrize("name", ["positions", "token_ids", "post_block.3"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool])
    def test_tensors_of_other_dtypes(self, path, name, dtype):
        """Catches bytes of another dtype read as rows, and errors of numpy or torch."""
        tensors, metadata = contents(path)
        tensors[name] = tensors[name].reshape(len(tensors[name]), -1)[:, 0].to(dtype)
        save_file(tensors, path, metadata)
        with pytest.raises(CaptureFileError, match=path.name):
            self.read(path)


class TestNpz:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_npz_contents(self, tmp_path, layout):
        """Catches missing arrays, and member names taken from request ids."""
        requests = [captured(f"../r{i}", seed=i, dtype=torch.bfloat16) for i in range(3)]
        captures = write(tmp_path / "root", *requests, layout=layout)
        assert export_npz(captures, tmp_path / "out.npz") == 9
        with np.load(tmp_path / "out.npz", allow_pickle=False) as archive:
            about = json.loads(str(archive["requests"]))
            assert {entry["request_id"] for entry in about} == {"../r0", "../r1", "../r2"}
            for i, entry in enumerate(about):
                request = requests[int(entry["request_id"][-1])]
                for point, layer in request.sites:
                    name = f"{i}.{point}.{layer}"
                    np.testing.assert_array_equal(archive[name], request.tensor(point, layer).float().numpy())
                    assert archive[f"{name}.positions"].tolist() == request.positions(point, layer).tolist()
                    assert archive[f"{name}.token_ids"].tolist() == request.token_ids(point, layer).tolist()
            assert len(archive.files) == 1 + 27

    def test_select_sites(self, tmp_path):
        """Catches filters that are ignored or combined with or."""
        captures = write(tmp_path / "root", captured())
        assert export_npz(captures, tmp_path / "a.npz", point="post_block") == 2
        assert export_npz(captures, tmp_path / "b.npz", layer=0) == 2
        assert export_npz(captures, tmp_path / "c.npz", "post_block", 3) == 1

    def test_empty_export_leaves_no_file(self, tmp_path):
        """Catches an empty archive."""
        captures = write(tmp_path / "root", captured())
        with pytest.raises(ValueError, match="no rows match"):
            export_npz(captures, tmp_path / "out.npz", layer=7)
        assert not (tmp_path / "out.npz").exists()

    def test_existing_file_is_kept(self, tmp_path):
        """Catches an export that overwrites a file."""
        captures = write(tmp_path / "root", captured())
        (tmp_path / "out.npz").write_text("mine")
        with pytest.raises(FileExistsError):
            export_npz(captures, tmp_path / "out.npz")
        assert (tmp_path / "out.npz").read_text() == "mine"


class TestArrow:
    def test_missing_packages(self, tmp_path, monkeypatch):
        """Catches an error that does not say what to install."""
        captures = write(tmp_path / "root", captured())
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "datasets", None)
        for call in (to_arrow, lambda c: export_parquet(c, tmp_path / "out.parquet")):
            with pytest.raises(ImportError, match="needs pyarrow, which is not installed: pip install pyarrow"):
                call(captures)
        with pytest.raises(ImportError, match="pip install datasets"):
            to_dataset(captures)
        assert not (tmp_path / "out.parquet").exists()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_table_contents(self, tmp_path, dtype):
        """Catches columns that do not belong to their row."""
        pytest.importorskip("pyarrow")
        requests = [captured(f"r{i}", seed=i, rows=i, dtype=dtype, options={"tag": "t"}) for i in (2, 0, 3)]
        table = to_arrow(write(tmp_path, *requests, layout="packed"))
        lines = table.to_pylist()
        expected = [
            (request.request_id, *site, position, token, row)
            for request in requests
            for site in sorted(request.sites)
            for position, token, row in zip(
                request.positions(*site).tolist(),
                request.token_ids(*site).tolist(),
                request.tensor(*site).tolist(),
                strict=True,
            )
        ]
        keys = ("request_id", "point", "layer", "position", "token_id", "row")
        assert sorted(tuple(line[key] for key in keys) for line in lines) == sorted(expected)
        assert {(line["sample"], line["model"], line["tag"], line["status"]) for line in lines} == {
            (0, "tiny", "t", "ok")
        }

    def test_runs_are_separate_in_tables(self, tmp_path):
        """Catches requests of two runs that cannot be told apart, and an error for files that store no run."""
        pytest.importorskip("pyarrow")
        sites = (("post_block", 3),)
        for run in ("a", "b"):
            consumer = FilesystemConsumer(root=str(tmp_path / "runs"), layout="packed", run=run)
            for i in range(2):
                consumer.accept(dataclasses.replace(captured("0", rows=1, sites=sites), submission=i))
            consumer.close()
        lines = to_arrow(open_captures(tmp_path / "runs")).to_pylist()
        found = [(line["run"], line["submission"]) for line in lines]
        assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        (old,) = write(tmp_path / "old", captured(rows=1, sites=sites))
        old.run = None
        (line,) = to_arrow([old]).to_pylist()
        assert (line["run"], line["submission"]) == (None, None)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_positions_of_embeddings_have_no_token(self, tmp_path, layout):
        """Catches files that cannot hold -1, and a table that takes it for the id of a token."""
        pytest.importorskip("pyarrow")
        request = dataclasses.replace(captured(rows=4), prompt_token_ids=(-1,) * 4)
        captures = write(tmp_path, request, layout=layout)
        assert_same(captures[0], request)
        assert captures[0].token_ids("post_block", 3).tolist() == [-1, -1, 901, 903]
        table = to_arrow(captures, "post_block", 3)
        assert table["token_id"].to_pylist() == [None, None, 901, 903]
        assert table["position"].to_pylist() == [1, 3, 5, 7]

    def test_parquet(self, tmp_path):
        """Catches a file that differs from the table."""
        parquet = pytest.importorskip("pyarrow.parquet")
        captures = write(tmp_path / "root", captured("a"), captured("b", seed=1))
        assert export_parquet(captures, tmp_path / "out.parquet") == 30
        assert parquet.read_table(tmp_path / "out.parquet").equals(to_arrow(captures))

    def test_parquet_is_about_as_large_as_the_rows(self, tmp_path, monkeypatch):
        """Catches numbers stored twice, in a dictionary and as indices, and a row group for each request."""
        parquet = pytest.importorskip("pyarrow.parquet")
        captures = write(
            tmp_path / "root", *(captured(f"r{i}", seed=i, rows=20, width=256) for i in range(20)), layout="packed"
        )
        size = sum(request.num_bytes for request in captures)
        export_parquet(captures, tmp_path / "out.parquet")
        assert (tmp_path / "out.parquet").stat().st_size < 1.05 * size
        assert parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 1
        monkeypatch.setattr("vllm_steer.capture.files.export._GROUP_BYTES", size // 4)
        export_parquet(captures, tmp_path / "groups.parquet")
        assert 2 <= parquet.ParquetFile(tmp_path / "groups.parquet").num_row_groups <= 5
        assert parquet.read_table(tmp_path / "groups.parquet").equals(to_arrow(captures))

    @pytest.mark.parametrize(("reduce", "position"), [("mean", None), ("last", 9)])
    def test_positions_of_reduced_rows(self, tmp_path, reduce, position):
        """Catches a mean with a position, and a last row without its own."""
        pytest.importorskip("pyarrow")
        request = captured(reduce=reduce)
        sites = {site: SiteRows(rows.positions, rows.rows[-1:]) for site, rows in request.sites.items()}
        request = dataclasses.replace(request, sites=sites)
        (line, *_) = to_arrow(write(tmp_path, request)).to_pylist()
        assert line["position"] == position

    def test_table_rejects_different_widths(self, tmp_path):
        """Catches rows of different widths in one table."""
        pytest.importorskip("pyarrow")
        captures = write(tmp_path, captured("a"), captured("b", width=3))
        with pytest.raises(ValueError, match="choose"):
            to_arrow(captures)

    def test_datasets(self, tmp_path):
        """Catches a dataset without its columns."""
        pytest.importorskip("datasets")
        data = to_dataset(write(tmp_path, captured()))
        assert len(data) == 15 and set(data.column_names) >= {"row", "position", "request_id"}
