"""Weights from safetensors: read bit for bit, every parameter exactly once; broken or hostile files are refused by name.

Floor 9.
"""
import json
import math
import os
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from models import T_CONFIG

import refengine.folder_checkpoint
import refengine.weights
from refengine.folder_checkpoint import FolderCheckpoint
from refengine.errors import CheckpointError
from refengine.model import load_model
from refengine.safetensors_file import _DTYPES, SafetensorsFile, narrow, widen, write_safetensors
from refengine.synth import random_tensor, write_checkpoint
from refkernels import SETS

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def t_tensors(config=T_CONFIG):
    from refengine.config import parse_config

    return {name: random_tensor(name, shape, 1) for name, shape in parse_config(config, "config.json").tensors().items()}


def write(folder, tensors, config=T_CONFIG, dtype="F32"):
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", {name: (dtype, array) for name, array in tensors.items()})
    return folder


def shards(folder, parts, weight_map=None, config=T_CONFIG):
    """A folder with one file for each dict of tensors, and an index (by default the right one)."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = {f"model-{i:05}.safetensors": part for i, part in enumerate(parts, 1)}
    for file, part in names.items():
        write_safetensors(folder / file, {name: ("F32", array) for name, array in part.items()})
    right = {name: file for file, part in names.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": right if weight_map is None else weight_map}), encoding="utf-8")
    return folder


def halves(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


def refused(folder, *words):
    """Loading raises a CheckpointError with all of these words."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    for word in words:
        assert str(word) in str(caught.value), caught.value


def arrays(value):
    """All arrays of a loaded model's weights, whatever tuples hold them."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from arrays(part)


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


# Stored values

def test_all_65536_bf16_patterns_widen_by_a_shift(tmp_path):
    """Case K10: NaN with its payload, infinities, subnormals and -0.0 included."""
    patterns = np.arange(65536, dtype="<u2")
    header = {"w": {"dtype": "BF16", "shape": [256, 256], "data_offsets": [0, 131072]}}
    wide = SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, patterns.tobytes())).tensor("w")
    assert wide.dtype == np.float32 and wide.shape == (256, 256)
    want = b"".join(b"\0\0" + struct.pack("<H", pattern) for pattern in range(65536))
    assert wide.astype("<f4").tobytes() == want


def test_stored_values_have_one_byte_order_whatever_the_machine_has():
    """Case K10: on a big-endian host a type of the machine's own order would read them backwards."""
    assert {kind[0] for kind in _DTYPES.values()} == {"<"}
    x = np.array([1.5, -0.0, 2.0**-133, 3e38], np.float32)
    assert narrow(x, "BF16").dtype.str == "<u2" and narrow(x, "BF16").tobytes()[:2] == b"\xc0\x3f"
    for order in "<>":                                                           # as a host of either order has them in memory
        assert widen(narrow(x, "BF16").astype(f"{order}u2"), "BF16").tolist() == widen(narrow(x, "BF16"), "BF16").tolist()


@pytest.mark.parametrize(("shape", "size"), [([2], 3), ([1], 3), ([1], 1), ([3], 5), ([], 1)], ids=str)
def test_an_odd_number_of_bytes_of_bf16_is_refused_by_name(tmp_path, shape, size):
    """Case K10."""
    header = {"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
    with pytest.raises(CheckpointError, match="odd.safetensors"):
        SafetensorsFile(raw_file(tmp_path / "odd.safetensors", header, bytes(size)))


def test_bf16_is_written_to_nearest_with_ties_to_even():
    """1 + 2^-8 lies between two BF16 values: to even, down. 1 + 3 * 2^-8: to even, up. Just above a tie: up."""
    x = np.array([1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8, 2.0**-133, 0, -0.0], np.float32)
    assert [hex(bits) for bits in narrow(x, "BF16")] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xbf80", "0x1", "0x0",
                                                         "0x8000"]


def test_all_65536_f16_patterns_widen_to_their_value(tmp_path):
    patterns = np.arange(65536, dtype="<u2")
    header = {"w": {"dtype": "F16", "shape": [65536], "data_offsets": [0, 131072]}}
    wide = SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, patterns.tobytes())).tensor("w")
    for pattern, value in zip(patterns.tolist(), wide.tolist()):
        sign, exponent, fraction = -1.0 if pattern >> 15 else 1.0, pattern >> 10 & 31, pattern & 1023
        want = (math.ldexp(fraction, -24) if exponent == 0 else math.ldexp(1024 + fraction, exponent - 25) if exponent < 31
                else math.inf if not fraction else math.nan)
        same = math.isnan(value) if math.isnan(want) else (value == sign * want and math.copysign(1, value) == sign)
        assert same, hex(pattern)


def test_f32_comes_back_bit_for_bit_also_from_an_unaligned_place(tmp_path):
    raw = np.random.Philox(key=1).random_raw(60).view(np.uint32)                # any bit patterns, NaN among them
    header = b'{"w": {"dtype": "F32", "shape": [30, 4], "data_offsets": [0, 480]}}'
    for pad in range(4):                                                        # a header of any length
        path = raw_file(tmp_path / f"{pad}.safetensors", header + b" " * pad, raw.tobytes())
        assert SafetensorsFile(path).tensor("w").view(np.uint32).ravel().tolist() == raw.tolist()


def test_some_rows_are_the_rows_of_the_whole(tmp_path):
    x = random_tensor("w", (9, 4), 3)
    for dtype in ("F32", "F16", "BF16"):
        write_safetensors(tmp_path / "x.safetensors", {"other": ("F32", x), "w": (dtype, x)})
        file = SafetensorsFile(tmp_path / "x.safetensors")
        whole = file.tensor("w")
        assert file.tensor("w", slice(2, 5)).tobytes() == whole[2:5].tobytes()
        assert file.tensor("w", np.array([8, 0, 8])).tobytes() == whole[[8, 0, 8]].tobytes()


def test_what_write_safetensors_writes_is_what_the_library_reads(tmp_path):
    tensors = {"a": random_tensor("a", (3, 5), 1), "b.weight": random_tensor("b", (7,), 1),
               "empty": np.empty((0, 4), np.float32)}
    for dtype, kind in (("F32", np.float32), ("F16", np.float16)):
        write_safetensors(tmp_path / "x.safetensors", {name: (dtype, x) for name, x in tensors.items()})
        theirs = safetensors.numpy.load_file(tmp_path / "x.safetensors")
        assert theirs.keys() == tensors.keys()
        for name, x in tensors.items():
            assert (theirs[name].dtype, theirs[name].shape) == (kind, x.shape)
            assert theirs[name].tobytes() == x.astype(kind).tobytes()
    write_safetensors(tmp_path / "x.safetensors", {"a": ("BF16", tensors["a"])})
    (name, entry), = safetensors.deserialize((tmp_path / "x.safetensors").read_bytes())
    assert (name, entry["dtype"], entry["shape"]) == ("a", "BF16", [3, 5])
    bits = np.frombuffer(bytes(entry["data"]), "<u2").astype(np.uint32) << 16
    # Rounded to 8 significant bits: off by half a step, 2^-9 of the value's power of two.
    assert (np.abs(bits.view(np.float32).reshape(3, 5) - tensors["a"]) <= 2.0**-8 * np.abs(tensors["a"])).all()


def test_what_the_library_writes_is_what_we_read(tmp_path):
    x = {"a": random_tensor("a", (3, 5), 1), "b": random_tensor("b", (4,), 1).astype(np.float16)}
    safetensors.numpy.save_file(x, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == {"a", "b"}
    assert all(file.tensor(name).tobytes() == x[name].astype(np.float32).tobytes() for name in x)


# Every parameter exactly once

def test_a_sharded_checkpoint_is_the_whole_one(t_folder, tmp_path):
    tensors, ids = t_tensors(), [3, 1, 4, 1, 5]
    split = load_model(shards(tmp_path, halves(tensors)))
    assert split.logits(ids).tobytes() == load_model(t_folder).logits(ids).tobytes()
    assert split.checkpoint.fingerprint() == FolderCheckpoint(t_folder).fingerprint()


def test_every_parameter_shows_in_the_logits(tmp_path):
    """Case K11: a parameter that was skipped, or set from another, would not. Each is changed in one place, by itself.

    NOTE: k_proj.bias cancels in the softmax but for the rotation, so there are two tokens and more.
    """
    config = {**T_CONFIG, "attention_bias": True, "num_hidden_layers": 1}
    tensors, ids = t_tensors(config), list(range(0, 64, 7))
    base = load_model(write(tmp_path, tensors, config)).logits(ids)
    for name, x in tensors.items():
        other = x.copy()
        other.flat[0] += np.float32(0.5)                                         # of token 0 where it is the embedding
        changed = load_model(write(tmp_path, {**tensors, name: other}, config)).logits(ids)
        assert np.abs(changed - base).max() > 1e-3, name                         # far above float32's 1e-6


@pytest.mark.parametrize("name", [Q, "model.norm.weight", EMBED])
def test_a_missing_tensor_is_named(tmp_path, name):
    refused(write(tmp_path, {key: x for key, x in t_tensors().items() if key != name}), f"missing: {name}", tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path):
    refused(write(tmp_path, {**t_tensors(), "model.layers.2.mlp.up_proj.weight": np.ones((48, 32), np.float32)}),
            "unexpected: model.layers.2.mlp.up_proj.weight", tmp_path)
    refused(write(tmp_path, {**t_tensors(), "model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
            "unexpected: model.layers.0.self_attn.q_proj.bias")


def test_the_old_rotary_buffers_are_no_parameters(tmp_path, t_model):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load_model(write(tmp_path, {**t_tensors(), **extra})).logits([1, 2]).tobytes() == t_model.logits([1, 2]).tobytes()


@pytest.mark.parametrize(("name", "shape", "should"), [
    (Q, (32, 32), (64, 32)), (Q, (32, 64), (64, 32)), (Q, (64, 32, 1), (64, 32)),
    ("model.layers.1.self_attn.k_norm.weight", (32,), (16,))])
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path, name, shape, should):
    """Case J2: (32, 32) is what hidden / heads would give."""
    tensors = {**t_tensors(), name: np.ones(shape, np.float32)}
    refused(write(tmp_path, tensors), f"{name} is {shape}, should be {should}", tmp_path)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    tensors = t_tensors()
    del tensors["model.norm.weight"]
    refused(write(tmp_path, {**tensors, "extra": np.ones(1, np.float32), Q: np.ones((1, 1), np.float32)}),
            "missing: model.norm.weight", "unexpected: extra", f"wrong shape: {Q} is (1, 1)")


def test_nothing_is_read_before_names_and_shapes_fit(tmp_path, monkeypatch):
    write(tmp_path, {**t_tensors(), Q: np.ones((32, 32), np.float32)})
    monkeypatch.setattr(FolderCheckpoint, "tensor", lambda *args: pytest.fail("a tensor was read"))
    refused(tmp_path, "wrong shape")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", ["absent", "equal", "different"])
def test_the_tie_flag_and_the_head_must_agree(tmp_path, tied, present):
    """Case K9. The flag decides; a head that contradicts it is an error, one that repeats the embedding is not."""
    tensors = {name: x for name, x in t_tensors().items() if name != HEAD}
    if present != "absent":
        tensors[HEAD] = tensors[EMBED].copy()
        tensors[HEAD][-1, -1] += np.float32(present == "different")
    config = {**T_CONFIG, "tie_word_embeddings": tied}
    write(tmp_path, tensors, config)
    if tied and present == "different":
        refused(tmp_path, "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight", tmp_path)
    elif not tied and present == "absent":
        refused(tmp_path, "lm_head.weight is missing, and tie_word_embeddings is not true", tmp_path)
    else:
        logits = load_model(tmp_path).logits([1, 2, 3])
        plain = load_model(write(tmp_path, {**tensors, HEAD: tensors[EMBED]}, {**config, "tie_word_embeddings": False}))
        assert (logits.tobytes() == plain.logits([1, 2, 3]).tobytes()) == (present != "different")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("name", [Q, HEAD, "model.norm.weight", "model.layers.1.self_attn.k_norm.weight",
                                  "model.layers.1.mlp.down_proj.weight"])
def test_an_infinite_weight_is_refused_and_the_tensor_named(tmp_path, name, value):
    tensors = t_tensors()
    tensors[name].flat[-1] = value
    refused(write(tmp_path, tensors), name.removesuffix(".weight"), tmp_path)


@pytest.mark.parametrize(("name", "kernels"), [
    (EMBED, "exact"), ("model.layers.0.self_attn.o_proj.bias", "exact"), (Q, "native"), (Q, "native64")])
def test_an_infinite_weight_is_refused_wherever_it_stands(tmp_path, name, kernels):
    config = {**T_CONFIG, "attention_bias": True}
    tensors = t_tensors(config)
    tensors[name].flat[-1] = np.inf
    with pytest.raises(CheckpointError):
        load_model(write(tmp_path, tensors, config), kernels)


def test_an_infinite_weight_is_named_by_its_tensor_alone_and_its_row(tmp_path):
    tensors = t_tensors()
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name][5, 0] = np.inf
    with pytest.raises(CheckpointError) as caught:
        load_model(write(tmp_path, tensors))
    assert "v_proj" in str(caught.value) and "q_proj" not in str(caught.value) and "row 5 " in str(caught.value)


# The index

def test_a_tensor_that_the_index_gives_to_a_shard_without_it_is_named(tmp_path):
    """Case K5."""
    first, second = halves(t_tensors())
    moved = sorted(first)[0]
    weight_map = {**dict.fromkeys(first, "model-00001.safetensors"), **dict.fromkeys(second, "model-00002.safetensors"),
                  moved: "model-00002.safetensors"}
    refused(shards(tmp_path, [first, second], weight_map), INDEX, moved, "model-00001.safetensors")


def test_a_tensor_that_the_index_lists_and_no_shard_has_is_named(tmp_path):
    first, second = halves(t_tensors())
    weight_map = {**dict.fromkeys(first, "model-00001.safetensors"), **dict.fromkeys(second, "model-00002.safetensors"),
                  "ghost.weight": "model-00002.safetensors"}
    refused(shards(tmp_path, [first, second], weight_map), INDEX, "ghost.weight", "model-00002.safetensors")


def test_a_tensor_that_the_index_lacks_is_named(tmp_path):
    first, second = halves(t_tensors())
    weight_map = {**dict.fromkeys(first, "model-00001.safetensors"), **dict.fromkeys(second, "model-00002.safetensors")}
    del weight_map[sorted(second)[3]]
    refused(shards(tmp_path, [first, second], weight_map), INDEX, sorted(second)[3], "model-00002.safetensors")


def test_a_tensor_in_two_shards_is_named_with_the_shard_that_should_not_have_it(tmp_path):
    first, second = halves(t_tensors())
    twice = sorted(first)[0]
    for given, other in ((1, 2), (2, 1)):                        # the index can name only one of them
        weight_map = {**dict.fromkeys(first, "model-00001.safetensors"), **dict.fromkeys(second, "model-00002.safetensors"),
                      twice: f"model-0000{given}.safetensors"}
        refused(shards(tmp_path, [first, {**second, twice: first[twice]}], weight_map), INDEX, twice,
                f"model-0000{other}.safetensors")


def test_a_shard_that_is_not_there_is_named(tmp_path):
    shards(tmp_path, halves(t_tensors()))
    (tmp_path / "model-00002.safetensors").unlink()
    refused(tmp_path, INDEX, "model-00002.safetensors does not exist")


def test_two_files_without_an_index_are_not_guessed_at(tmp_path):
    shards(tmp_path, halves(t_tensors()))
    (tmp_path / INDEX).unlink()
    refused(tmp_path, "model-00001.safetensors, model-00002.safetensors", INDEX)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    refused(tmp_path, "found none")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}'])
def test_an_index_without_file_names_is_refused(tmp_path, text):
    (shards(tmp_path, halves(t_tensors())) / INDEX).write_text(text)
    refused(tmp_path, INDEX, "weight_map is not an object of file names")


OUTSIDE = ["../outside.safetensors", "a/../../outside.safetensors", "sub/model.safetensors", "./model.safetensors",
           "model.safetensors/", "..", ".", "", "\0", "\\", "C:\\outside.safetensors", "a/../../outside.safetensors\0", "..\\outside.safetensors", "sub\\model.safetensors",
           "model.safetensors\0.txt", "ABSOLUTE"]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_an_index_name_that_leads_elsewhere_is_refused_before_anything_is_opened(tmp_path, monkeypatch, name):
    """Case K6."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {key: ("F32", x) for key, x in t_tensors().items()})
    write(folder, t_tensors())
    name = str(tmp_path / "outside.safetensors") if name == "ABSOLUTE" else name
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(t_tensors(), name)}))
    monkeypatch.setattr(refengine.folder_checkpoint, "SafetensorsFile", lambda path: pytest.fail(f"{path} was opened"))
    refused(folder, INDEX, repr(name), "is not a plain file name")


def test_a_link_that_leaves_the_folder_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {key: ("F32", x) for key, x in t_tensors().items()})
    (folder / "config.json").write_text(json.dumps(T_CONFIG))
    os.symlink(tmp_path / "outside.safetensors", folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(t_tensors(), "shard.safetensors")}))
    monkeypatch.setattr(refengine.folder_checkpoint, "SafetensorsFile", lambda path: pytest.fail(f"{path} was opened"))
    refused(folder, INDEX, "shard.safetensors is a link that leaves the folder")


def test_the_one_file_may_be_no_link_out_of_the_folder_either(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {key: ("F32", x) for key, x in t_tensors().items()})
    (folder / "config.json").write_text(json.dumps(T_CONFIG))
    os.symlink(tmp_path / "outside.safetensors", folder / "model.safetensors")
    monkeypatch.setattr(refengine.folder_checkpoint, "SafetensorsFile", lambda path: pytest.fail(f"{path} was opened"))
    refused(folder, "model.safetensors is a link that leaves the folder")


def test_links_within_the_folder_and_those_of_the_hubs_own_cache_are_followed(tmp_path, t_model):
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    first, second = halves(t_tensors())
    shards(snapshot, [first, second])
    (snapshot / "model-00001.safetensors").rename(blobs / "0123")
    os.symlink("../../blobs/0123", snapshot / "model-00001.safetensors")
    (snapshot / "model-00002.safetensors").rename(snapshot / "two")
    os.symlink("two", snapshot / "model-00002.safetensors")
    assert load_model(snapshot).logits([1, 2]).tobytes() == t_model.logits([1, 2]).tobytes()


# Broken files

@pytest.mark.parametrize("cut", ["one byte", "half of the data", "all data", "within the header", "within the length"])
@pytest.mark.parametrize("shard", [1, 2])
def test_a_truncated_shard_is_named_with_the_bytes_it_has(tmp_path, cut, shard):
    """Case K4: others load the rest as zeros."""
    path = shards(tmp_path, halves(t_tensors())) / f"model-0000{shard}.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    keep = {"one byte": len(whole) - 1, "half of the data": (start + len(whole)) // 2, "all data": start,
            "within the header": start // 2, "within the length": 5}[cut]
    path.write_bytes(whole[:keep])
    refused(tmp_path, path.name, f"{keep} bytes")


def header(*entries):
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                       for name, dtype, shape, offsets in entries})


ONE = ("a", "F32", [2], [0, 8])
BROKEN = {
    "length 0": (b"", 0, b""), "length 1": (b"{", 1, b""), "length of the file and one more": (b"{}", 11, b""),
    "length 2^63": (b"{}", 2**63, b""), "length 2^64 - 1": (b"{}", 2**64 - 1, b""),
    "4 MB in 4 bytes": (header(("a", "F32", [1000, 1000], [0, 4])), None, bytes(4)),
    "more elements than 2^64": (header(("a", "F32", [2**33, 2**33], [0, 4])), None, bytes(4)),
    "overlap": (header(ONE, ("b", "F32", [2], [4, 12])), None, bytes(12)),
    "gap": (header(ONE, ("b", "F32", [2], [12, 20])), None, bytes(20)),
    "data that no tensor has": (header(ONE), None, bytes(12)),
    "begin after end": (header(("a", "F32", [2], [8, 0])), None, bytes(8)),
    "negative begin": (header(("a", "F32", [2], [-8, 0])), None, bytes(8)),
    "negative shape": (header(("a", "F32", [-2], [0, 8])), None, bytes(8)),
    "three offsets": (header(("a", "F32", [2], [0, 4, 8])), None, bytes(8)),
    "odd bytes of BF16": (header(("a", "BF16", [2], [0, 3])), None, bytes(3)),
    "no object": ("[1, 2]", None, b""), "entry is no object": ('{"a": 5}', None, b""), "no JSON": ("{'a'}", None, b""),
    "no UTF-8": (b'{"\xff": 1}', None, b""),
    "a tensor twice": (header(ONE)[:-1] + ", " + header(ONE)[1:], None, bytes(8)),
    "a key twice": (header(ONE).replace('"F32",', '"F32", "dtype": "F16",'), None, bytes(8)),
    "an unknown dtype": (header(("a", "F8_X", [8], [0, 8])), None, bytes(8)),
    "a dtype in lower case": (header(("a", "bf16", [4], [0, 8])), None, bytes(8)),
    "a dtype of integers": (header(("a", "I64", [1], [0, 8])), None, bytes(8)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_by_name_without_reading_beyond_it(tmp_path, kind):
    """Cases K1, K2, K3. Allocation stays near the size of the file, whatever lengths it claims."""
    text, length, data = BROKEN[kind]
    path = raw_file(tmp_path / "broken.safetensors", text if isinstance(text, bytes) else text.encode(), data, length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="broken.safetensors"):
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_broken_headers_are_broken_only_where_they_say(tmp_path):
    """The control: the same header with nothing wrong is read."""
    file = SafetensorsFile(raw_file(tmp_path / "x.safetensors", header(ONE, ("b", "F32", [1], [8, 12])).encode(), bytes(12)))
    assert file.tensor("a").tolist() == [0, 0] and file.tensor("b").shape == (1,)


def test_a_dtype_that_is_not_read_is_named_with_its_tensor(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", header(("some.weight", "I64", [1], [0, 8])).encode(), bytes(8))
    with pytest.raises(CheckpointError, match="x.safetensors: some.weight: dtype I64 is not one of F64, F32, F16, BF16"):
        SafetensorsFile(path)


def test_what_is_no_file_at_all_is_refused_by_name(tmp_path):
    for path in (tmp_path / "nothing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            SafetensorsFile(path)


# Memory

@pytest.mark.parametrize("kernels", SETS)
def test_loading_holds_one_copy_of_the_weights_and_a_few_blocks(tmp_path, monkeypatch, kernels):
    """11.5 million weights: 23 MB as stored in BF16, 46 or 92 MB packed.

    Beside the packed weights each worker may hold a block as float32, what BF16 is widened through (4 bytes twice), and two
    float64 arrays on the way to the grid: 28 bytes a weight of a block, 32 with the small arrays. The block is made small
    here, so that the allowance (1 MB) is less than any one matrix of the model in any form (from 3 MB).
    """
    block, workers = 2**13, 4
    monkeypatch.setattr(refengine.weights, "_BLOCK", block)
    config = {**T_CONFIG, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
              "intermediate_size": 3072, "num_hidden_layers": 2}
    write_checkpoint(tmp_path, config, dtype="BF16")
    load_model("tiny", kernels)                                                  # imports and caches are not of this
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        model = load_model(tmp_path, kernels)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    packed = sum(array.nbytes for array in arrays(model.weights))
    assert packed > 11.5e6 * (4 if kernels == "native" else 8)
    assert peak <= packed + workers * 32 * block, f"{peak - packed:,} bytes beside the packed weights"
