"""Blocks are expanded as llama.cpp's own package expands them; what is no whole file is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rbln_backend.checkpoints.block_form import BlockForm
from rbln_backend.emulator.quantized_packing import expand_blocks
from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.blocks import as_form
from rbln_backend.gguf.checkpoint import write_checkpoint
from rbln_backend.gguf.reader import GgufFile
from tests.checkpoints import CheckpointCache
from tests.gguf_files import random_blocks, write_gguf

Kind = gguf.GGMLQuantizationType
BLOCKS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_expanded(kind: Kind, tmp_path: Path) -> None:
    packed = random_blocks(kind, 3, 512, scale=0.01)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.add_tensor("row.weight", packed[0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(tmp_path / "m.gguf")
    wanted = torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32))
    assert (file.dtype, file.type_name("row.weight")) == (torch.bfloat16, kind.name)
    assert file.shape("token_embd.weight") == (3, 512)
    assert torch.equal(file.read("token_embd.weight"), wanted.bfloat16())
    assert torch.equal(file.read("row.weight"), wanted[0])
    kept = file.block_type("token_embd.weight")
    assert kept is not None
    bits, parts = kept.form.bits, file.split("token_embd.weight")
    assert torch.equal(expand_blocks(*parts, bits), wanted)
    widest = BlockForm(bits=8, group_size=16, has_minima=True, scales="float32")
    assert torch.equal(expand_blocks(*as_form(parts, kept.form, widest), 8), wanted)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_numbers_keep_their_type(
    kind: Kind, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    original = checkpoints("llama")
    write_checkpoint(write_gguf(original, tmp_path / "m.gguf", kind=kind), tmp_path)
    found = load_file(tmp_path / "model-00001-of-00001.safetensors")
    wanted = load_file(original / "model.safetensors")
    assert {name: weight.dtype for name, weight in found.items()} == dict.fromkeys(
        wanted, PLAIN[kind]
    )
    assert all(torch.equal(found[name], wanted[name].to(PLAIN[kind])) for name in wanted)


def test_parts_are_one_file(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    original = checkpoints("llama")
    whole = GgufFile.open(write_gguf(original, tmp_path / "m.gguf"))
    first = write_gguf(original, tmp_path / "parts.gguf", part_tensors=9, kind=Kind.Q8_0)
    rest = sorted(tmp_path.glob("parts-*.gguf"))[1:]
    assert len(rest) > 1
    file = GgufFile.open(first)
    assert set(file.tensors) == set(whole.tensors)
    assert file.type_name("token_embd.weight") == "Q8_0"
    for name in whole.tensors:
        stored, wanted = file.read(name).float(), whole.read(name)
        assert file.shape(name) == whole.shape(name)
        assert float((stored - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    assert "Q8_0" in write_checkpoint(first, tmp_path)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"name the first, \.\.\.-00001-of-"):
        GgufFile.open(renamed)
    content = rest[0].read_bytes()
    for damaged, reason in (
        (content[:-100], f"the last 100 bytes of {rest[0].name} are missing"),
        (content[:40], f"{rest[0].name}: .*the file ends after"),
        (b"none", f"{rest[0].name}: the header: does not begin with GGUF"),
        (b"", f"{rest[0].name}: the file is empty"),
        (rest[1].read_bytes(), f"{rest[0].name} is not part 2 of"),
    ):
        rest[0].write_bytes(damaged)
        with pytest.raises(CheckpointError, match=reason):
            GgufFile.open(first)
    rest[0].unlink()
    with pytest.raises(CheckpointError, match=f"{rest[0].name} cannot be read: No such file"):
        GgufFile.open(first)


def test_damaged_files_are_refused(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    whole = write_gguf(checkpoints("llama"), tmp_path / "m.gguf").read_bytes()
    part = tmp_path / "part.gguf"
    for content, reason in (
        (whole[:-100], "the last 100 bytes of part.gguf are missing"),
        (whole[:5000], r"tokenizer\.ggml\.tokens\[429\]: 5 bytes, and the file ends after 1"),
        (whole[:3], "the header: does not begin with GGUF"),
        (b"", "the file is empty"),
        (b"GGUF" + b"\xff" * 4000, "version 4294967295; 2 and 3 are read"),
        (whole.replace(b"llama.block_count", b"llama.block_cOunt"), "llama.block_count"),
    ):
        part.write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            write_checkpoint(part, tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile.open(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not read from GGUF"),
        ({"split.count": 3}, "it is one of 3 parts"),
        ({"ARCH.expert_count": 8}, "llama.expert_count = 8: not read"),
        ({"ARCH.vocab_size": 7}, "llama.vocab_size must be 4096, not 7"),
        ({"ARCH.block_count": 2}, "no place for blk.2"),
        ({"ARCH.block_count": 4}, "lacks model.layers.3"),
        ({"ARCH.attention.head_count_kv": 4}, r"attn_k.weight is \(64, 128\)"),
        ({"ARCH.attention.head_count_kv": [2, 2, 1]}, "differs between layers"),
        ({"ARCH.rope.dimension_count": 16}, "rope.dimension_count must be 32"),
        ({"ARCH.rope.scaling.type": "longrope", "ARCH.rope.scaling.factor": 2.0}, "longrope"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre 'default' is not read"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not read"),
    ],
)
def test_what_has_no_meaning_here_is_refused(
    keys: dict[str, object], reason: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    named = keys.pop("general.architecture", None)
    file = write_gguf(checkpoints("llama"), tmp_path / "m.gguf", keys=keys)
    if named is not None:
        file.write_bytes(
            file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
        )
    with pytest.raises(CheckpointError, match=reason):
        write_checkpoint(file, tmp_path)
    assert list(tmp_path.glob("*.safetensors")) == []
