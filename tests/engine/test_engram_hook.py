# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Engram classes with tables in files: on CPU as far as a CPU goes; on a GPU streams and graphs too."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sparkwright_kernels.engram import native
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.formats import FORMATS, PAGE, EngramFile, directory_name, planned
from sparkwright_kernels.engram.gather_native import Read
from sparkwright_kernels.engram.layout import EngramLayout
from sparkwright_kernels.engram.ops import DTYPES, PackedRows, gather
from upstream import load

ON_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="NOT TESTED: no CUDA device")
TOKENS = 2048
HEADS, COLUMNS = 8, 24


@pytest.fixture(scope="session", autouse=True)
def _native_library() -> None:
    try:
        native.library()
    except EngramError as error:
        pytest.skip(f"NOT TESTED: {error}")


@pytest.fixture(scope="session")
def upstream() -> Any:
    try:
        return load(TOKENS)
    except ImportError as error:
        pytest.skip(f"NOT TESTED: neither vLLM nor its engram.py (SPARKWRIGHT_VLLM_ENGRAM): {error}")


@pytest.fixture(scope="session")
def hook(upstream: Any) -> Any:
    from sparkwright_kernels.vllm_plugin import engram

    assert engram.upstream is upstream
    return engram


@pytest.fixture(scope="session")
def config(upstream: Any) -> dict[str, Any]:
    """A model's config with real structure and small tables; their sizes are vLLM's own."""
    config: dict[str, Any] = {
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [0, 0], "engram_vocab_size": 500,
        "engram_max_ngram_size": 4, "engram_n_heads": HEADS, "engram_head_dim": 256,
        "engram_compressed_vocab_size": 300, "engram_pad_token_id": 2,
    }  # fmt: skip
    primes = upstream.EngramLayout(SimpleNamespace(**config)).primes
    config["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return config


@pytest.fixture(scope="session")
def layout(config: dict[str, Any]) -> EngramLayout:
    return EngramLayout.from_config(config)


@pytest.fixture(scope="session")
def tables(layout: EngramLayout) -> dict[int, np.ndarray]:
    """Packed rows `[rows, 264]` of each layer, whole. No NaN, which equals nothing."""
    rng = np.random.default_rng(0)
    return {layer: rng.integers(0, 0x7F, (layout.total(layer), 264), np.uint8) for layer in layout.layer_ids}


def write(path: Path, file: EngramFile, rows: np.ndarray) -> None:
    """A packed file as its format lays it out, without checksums of chunks, which reading does not look at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.zeros(file.file_bytes, np.uint8)
    data[:PAGE] = np.frombuffer(file.header(), np.uint8)
    for row in range(file.rows.rows):
        data[file.offset(row) :][: file.row_bytes] = rows[file.rows.lo + row]
    path.write_bytes(data.tobytes())


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory, layout: EngramLayout, tables: dict[int, np.ndarray]) -> Path:
    root = tmp_path_factory.mktemp("engram")
    for format in FORMATS:
        for ranks in (1, 2):
            for layer in layout.layer_ids:
                for rank in range(ranks):
                    file = planned(layout, format, layer, "heads", rank, ranks)
                    write(root / directory_name(format, "heads", ranks) / file.name, file, tables[layer])
    return root


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, upstream: Any) -> Callable[[int, int], None]:
    """Makes this process a rank of a group, on a machine whose GPU, if it has none, is only asked its size."""
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        engram_config=SimpleNamespace(cpu_offload=True, dp_shared_memory=False, use_thp=False),
    )
    stand_ins = {
        "get_current_vllm_config": lambda: engine,
        "get_engram_dp_size": lambda: 1,
        "is_uva_available": lambda: True,
        "ColumnParallelLinear": lambda *_, **__: torch.nn.Identity(),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(upstream, name, value)
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))

    def be(number: int, ranks: int) -> None:
        monkeypatch.setattr(upstream, "get_tensor_model_parallel_rank", lambda: number)
        monkeypatch.setattr(upstream, "get_tensor_model_parallel_world_size", lambda: ranks)

    be(0, 1)
    return be


@pytest.fixture
def make(rank: Any, hook: Any, upstream: Any, config: dict[str, Any], directory: Path) -> Callable[..., Any]:
    """Makes vLLM's table of a layer, as its Engram layer makes it, from files."""

    def make(index: int = 0, format: str = "pages", root: Path = directory) -> Any:
        asked = {"sparkwright_engram": {"directory": str(root), "format": format}}
        with hook.file_backed(hook.EngramFiles.from_config(asked, config)):
            layout = upstream.EngramLayout(SimpleNamespace(**config))
            return upstream.Engram._create_embedding(None, layout, index)

    return make


def random_ids(layout: EngramLayout, layer: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Hash ids `[tokens, columns]` as the engine makes them, some tokens dead; a slice of a wider tensor, as there."""
    rng = np.random.default_rng(seed)
    offsets = np.array(layout.offsets[layer])
    ids = rng.integers(offsets[:-1], offsets[1:], (tokens, COLUMNS))
    ids[rng.random(tokens) < 0.1] = -1
    wide = torch.full((tokens, 2, COLUMNS), 7, dtype=torch.int32)
    wide[:, 1] = torch.from_numpy(ids)
    return wide[:, 1]


def wanted(tables: dict[int, np.ndarray], layer: int, ids: torch.Tensor, columns: slice) -> torch.Tensor:
    return gather(PackedRows(torch.from_numpy(tables[layer]), *DTYPES), ids.cpu()[:, columns].contiguous())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_lookups_read_this_ranks_heads(
    make: Any, rank: Any, layout: EngramLayout, tables: dict[int, np.ndarray], format: str, number: int, ranks: int
) -> None:
    rank(number, ranks)
    for index, layer in enumerate(layout.layer_ids):
        table = make(index, format)
        heads = COLUMNS // ranks
        for tokens in (6, 1, 300):
            ids = random_ids(layout, layer, tokens, tokens)
            out = torch.full((tokens, heads, 256), 7, dtype=torch.bfloat16)
            table.lookup(ids, out)
            assert torch.equal(out, wanted(tables, layer, ids, slice(number * heads, (number + 1) * heads)))
        assert table.reader.stats.out_of_range == 0


def test_no_table_is_kept_and_the_checkpoints_is_passed_over(make: Any, layout: EngramLayout) -> None:
    table = make()
    assert sum(parameter.numel() for parameter in table.parameters()) == 0
    for parameter in table.parameters():
        parameter.weight_loader(parameter, torch.empty(layout.total(1), parameter.shape[1], device="meta"))


def test_the_name_is_restored_whatever_happens(
    make: Any, hook: Any, upstream: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    original = upstream.ParallelEngramEmbedding
    make()
    assert upstream.ParallelEngramEmbedding is original
    with pytest.raises(EngramError, match=r"engram-l1-r0of1.bin: found no readable file"):
        make(root=tmp_path)
    assert upstream.ParallelEngramEmbedding is original
    with hook.file_backed(hook.EngramFiles.from_config({"other": 1}, config)):
        assert upstream.ParallelEngramEmbedding is original


def test_a_file_of_another_rank_is_refused(make: Any, rank: Any, directory: Path, tmp_path: Path) -> None:
    rank(0, 2)
    place = tmp_path / "pages-heads-tp2"
    place.mkdir()
    (place / "engram-l1-r0of2.bin").symlink_to(directory / "pages-heads-tp2/engram-l1-r1of2.bin")
    with pytest.raises(EngramError, match="found rank 1, needed 0"):
        make(root=tmp_path)


@pytest.mark.parametrize(
    "asked",
    [7, {}, {"directory": 7}, {"directory": "/x", "frmat": "pages"}, {"directory": "/x", "format": "zip"}],
)
def test_nonsense_in_the_configuration_is_refused(hook: Any, config: dict[str, Any], asked: object) -> None:
    with pytest.raises(EngramError, match="sparkwright_engram"):
        hook.EngramFiles.from_config({"sparkwright_engram": asked}, config)


def test_what_the_hook_cannot_serve_is_refused(
    make: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch, layout: EngramLayout
) -> None:
    table = make()
    ids = random_ids(layout, 1, 3)
    with pytest.raises(EngramError, match=r"a request for torch.uint8"):
        table.lookup(ids, torch.empty(3, COLUMNS, 264, dtype=torch.uint8))
    with pytest.raises(EngramError, match=r"torch.int64"):
        table.lookup(ids.long(), torch.empty(3, COLUMNS, 256, dtype=torch.bfloat16))
    too_many = TOKENS + 1
    with pytest.raises(EngramError, match=rf"found {too_many} tokens"):
        table.lookup(random_ids(layout, 1, too_many), torch.empty(too_many, COLUMNS, 256, dtype=torch.bfloat16))
    monkeypatch.setattr(upstream, "get_engram_dp_size", lambda: 2)
    monkeypatch.setattr(upstream, "engram_head_shard_rank", lambda: 0)
    with pytest.raises(EngramError, match="found data parallelism"):
        make()


def test_a_vllm_that_splits_tables_otherwise_is_refused(
    make: Any, rank: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(0, 2)
    monkeypatch.setattr(upstream.ParallelEngramEmbedding, "_get_shard_info", lambda _: (3, 0))
    with pytest.raises(EngramError, match="as this vLLM splits tables"):
        make()


def test_a_file_cut_short_while_open_is_an_error_on_cpu(
    make: Any, layout: EngramLayout, directory: Path, tmp_path: Path
) -> None:
    place = tmp_path / "pages-heads-tp1"
    place.mkdir()
    whole = directory / "pages-heads-tp1/engram-l1-r0of1.bin"
    (place / whole.name).write_bytes(whole.read_bytes())
    table = make(root=tmp_path)
    os.truncate(place / whole.name, 8192)
    with pytest.raises(EngramError, match="cut short"):
        table.lookup(random_ids(layout, 1, 64), torch.empty(64, COLUMNS, 256, dtype=torch.bfloat16))


@pytest.fixture
def ahead(make: Any, hook: Any, layout: EngramLayout) -> tuple[Any, list[Any]]:
    made = [make(0), make(1)]
    token_map = np.arange(400, dtype=np.int32) % 300
    return hook.ReadAhead(made, layout, token_map, pad_id=5), made


def prompts(ahead: Any) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(1)
    found = {3: rng.integers(0, 400, 1000), 0: rng.integers(0, 400, 40)}
    for slot, prompt in found.items():
        ahead.add_request(slot, prompt.tolist())
    return found


def test_read_ahead_knows_the_next_chunks_rows(ahead: tuple[Any, list[Any]], layout: EngramLayout) -> None:
    reads, made = ahead
    given = prompts(reads)
    slots, ends, counts = np.array([3, 7, 0]), np.array([128, 5, 39]), np.array([64, 5, 39])
    rows = reads.next_rows(slots, ends, counts)
    hashed = replace(layout, pad_token_id=5)
    for table, got in zip(made, rows, strict=True):
        layer = table.reader.file.layer
        whole = [hashed.hash_rows(layer, given[slot] % 300) for slot in (3, 0)]
        np.testing.assert_array_equal(got, np.concatenate([whole[0][128:192], whole[1][39:40]]))


def lookup_chunk(table: Any, rows: np.ndarray) -> None:
    ids = torch.from_numpy(rows).int()
    device = "cuda" if ON_GPU else "cpu"
    table.lookup(ids.to(device), torch.empty(len(ids), COLUMNS, 256, dtype=torch.bfloat16, device=device))


def test_read_ahead_leaves_the_next_chunk_in_memory(ahead: tuple[Any, list[Any]]) -> None:
    reads, made = ahead
    prompts(reads)
    step, counts = np.array([3]), np.array([256])
    reads.start(step, np.array([256]), counts)
    for table in made:
        lookup_chunk(table, reads.next_rows(step, np.array([0]), counts)[made.index(table)])
    made[-1]._running.result(timeout=30)
    before = [table.reader.stats for table in made]
    for table in made:
        lookup_chunk(table, reads.next_rows(step, np.array([256]), counts)[made.index(table)])
    if ON_GPU:
        torch.cuda.synchronize()
    for table, was in zip(made, before, strict=True):
        assert table.reader.stats.reads == was.reads, "the next chunk was read from the disk again"
        assert table.reader.stats.cache_hits > was.cache_hits


def test_read_ahead_stops_at_the_prompts_end(ahead: tuple[Any, list[Any]]) -> None:
    reads, made = ahead
    prompts(reads)
    reads.start(np.array([3, 0]), np.array([1000, 40]), np.array([100, 40]))
    assert made[-1].after_lookup is None


def test_a_failing_read_ahead_does_not_fail_the_lookup(
    make: Any, hook: Any, layout: EngramLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, told = make(), []
    monkeypatch.setattr(hook._log, "warning", lambda *words, **_: told.append(words))

    def task() -> None:
        raise EngramError("disk", "an error", "none")

    table.after_lookup = task
    lookup_chunk(table, random_ids(layout, 1, 4).numpy())
    assert table._running.result(timeout=30) is None and told == [("Engram read-ahead failed",)]


# The whole of vLLM, where it is installed.


@pytest.fixture
def model(hook: Any) -> Any:
    if os.environ.get("SPARKWRIGHT_VLLM_ENGRAM"):
        pytest.skip("NOT TESTED: vLLM is not installed, only its engram.py is here")
    from sparkwright_kernels.vllm_plugin import deepseek_v41

    return deepseek_v41


def test_vllm_makes_our_model_for_the_architecture(model: Any) -> None:
    from sparkwright_kernels.vllm_plugin import ENGRAM_MODEL, register
    from vllm.model_executor.models.registry import ModelRegistry

    for _ in range(2):
        register()
    assert ModelRegistry.models[ENGRAM_MODEL].load_model_cls() is model.DeepseekV41ForCausalLM
    assert model.DeepseekV41ForCausalLM.get_model_state_cls() is model.EngramModelState


@pytest.mark.parametrize("asked", [False, True])
def test_the_model_is_made_with_files_where_they_are_configured(
    model: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], directory: Path, asked: bool
) -> None:
    original, seen = upstream.ParallelEngramEmbedding, []
    monkeypatch.setattr(model.Upstream, "__init__", lambda *_, **__: seen.append(upstream.ParallelEngramEmbedding))
    additional = {"sparkwright_engram": {"directory": str(directory)}} if asked else {}
    hf_config = SimpleNamespace(to_dict=lambda: {"model_type": "deepseek_v41", "text_config": config})
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), additional_config=additional)
    made = model.DeepseekV41ForCausalLM.__new__(model.DeepseekV41ForCausalLM)
    torch.nn.Module.__init__(made)
    made.__init__(vllm_config=vllm_config)
    assert (seen[0] is original) is not asked and upstream.ParallelEngramEmbedding is original
    assert (made.engram_files is not None) is asked


def test_the_model_state_starts_read_ahead(
    model: Any, make: Any, monkeypatch: pytest.MonkeyPatch, layout: EngramLayout
) -> None:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch

    state = model.EngramModelState
    for name, result in {"__init__": None, "add_request": None, "prepare_inputs": {"x": 1}}.items():
        monkeypatch.setattr(model.DeepseekV41ModelState, name, lambda *_, result=result, **__: result)
    engram = torch.nn.Module()
    engram.tables = torch.nn.ModuleList([make(0), make(1)])
    hashes = SimpleNamespace(token_map=torch.arange(400) % 300, pad_id=5)
    engram.language_model = SimpleNamespace(model=SimpleNamespace(engram_hash=hashes))
    engram.engram_files = SimpleNamespace(layout=layout)
    state = state(None, engram)
    # only what the fields are called is vLLM's here
    batch: Any = InputBatch.__new__(InputBatch)
    given = {
        "num_reqs": 1, "idx_mapping_np": np.array([2, 0]), "num_scheduled_tokens": np.array([8, 0]),
        "num_computed_tokens_np": np.array([16, 0]),
    }  # fmt: skip
    assert given.keys() <= InputBatch.__dataclass_fields__.keys()
    for name, value in given.items():
        object.__setattr__(batch, name, value)
    request: Any = NewRequestData.__new__(NewRequestData)
    assert "prefill_token_ids" in NewRequestData.__dataclass_fields__
    request.prefill_token_ids = list(range(32))
    state.add_request(2, request)
    assert state.prepare_inputs(batch, None) == {"x": 1}
    task = engram.tables[-1].after_lookup
    task()
    assert [table.reader.stats.rows for table in engram.tables] == [8 * COLUMNS] * 2


# What only a GPU shows.


@pytest.fixture
def layers(
    make: Any, hook: Any, upstream: Any, config: dict[str, Any], layout: EngramLayout, directory: Path
) -> Iterator[list[Any]]:
    """vLLM's Engram layers 1 and 14 on one prefetch stream, with file-backed tables."""
    shape = SimpleNamespace(hidden_size=64, hc_mult=4, rms_norm_eps=1e-6)
    stream = torch.cuda.Stream()
    asked = {"sparkwright_engram": {"directory": str(directory)}}
    with hook.file_backed(hook.EngramFiles.from_config(asked, config)), torch.device("cuda"):
        theirs = upstream.EngramLayout(SimpleNamespace(**config))
        yield [upstream.Engram(shape, None, theirs, index, False, "engram", stream) for index in range(2)]
    torch.cuda.synchronize()


def device_ids(layout: EngramLayout, tokens: int, seed: int) -> torch.Tensor:
    """Hash ids of both layers `[tokens, 2, columns]`, as NgramHashState makes them."""
    both = [random_ids(layout, layer, tokens, seed + layer) for layer in layout.layer_ids]
    return torch.stack(both, dim=1).contiguous().cuda()


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [1, 4, 6, TOKENS])
def test_vllms_layers_stage_the_files_rows(
    layers: list[Any], layout: EngramLayout, tables: dict[int, np.ndarray], tokens: int
) -> None:
    for seed in range(3):
        ids = device_ids(layout, tokens, seed)
        for index, layer in enumerate(layers):
            layer.prepare_embeddings(ids[:, index])
        for index, layer in enumerate(layers):
            got = layer.embed(ids[:, index]).cpu()
            assert torch.equal(got, wanted(tables, layout.layer_ids[index], ids[:, index], slice(None)))


@NEEDS_GPU
def test_lookups_only_enqueue(layers: list[Any], layout: EngramLayout) -> None:
    ids = device_ids(layout, 4, 0)
    torch.cuda._sleep(1_000_000_000)  # about half a second, in front of everything
    for index, layer in enumerate(layers):
        layer.prepare_embeddings(ids[:, index])
    assert all(layer.embed_tokens.reader.stats.batches == 0 for layer in layers)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert all(layer.embed_tokens.reader.stats.batches == 1 for layer in layers)


@NEEDS_GPU
def test_layer_14s_reads_keep_nobody_waiting(layers: list[Any], layout: EngramLayout) -> None:
    ids = device_ids(layout, 4, 0)
    first, later = layers
    later.prepare_embeddings(ids[:, 1])
    torch.cuda.synchronize()
    # a read of half a second: usleep(job), and a status of 0
    usleep, fine = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p), ctypes.c_int32(0)
    later.embed_tokens._reads[4] = (Read(usleep, 500_000, ctypes.addressof(fine), b"slow"),)
    for index, layer in enumerate(layers):
        layer.prepare_embeddings(ids[:, index])
    first.embed(ids[:, 0])
    torch.cuda.current_stream().synchronize()
    assert first._prefetch_done.query() and not later._prefetch_done.query()
    later.embed(ids[:, 1])
    torch.cuda.current_stream().synchronize()
    assert later._prefetch_done.query()


@NEEDS_GPU
def test_a_captured_graph_reads_what_its_ids_say(
    layers: list[Any], layout: EngramLayout, tables: dict[int, np.ndarray]
) -> None:
    ids = device_ids(layout, 6, 0)
    kept = [torch.empty(6, COLUMNS, 256, dtype=torch.bfloat16, device="cuda") for _ in layers]

    def forward() -> None:
        for index, layer in enumerate(layers):
            layer.prepare_embeddings(ids[:, index])
        for index, layer in enumerate(layers):
            kept[index].copy_(layer.embed(ids[:, index]))

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for seed in range(20):
        ids.copy_(device_ids(layout, 6, seed))
        graph.replay()
        for index, out in enumerate(kept):
            assert torch.equal(out.cpu(), wanted(tables, layout.layer_ids[index], ids[:, index], slice(None)))


@NEEDS_GPU
def test_engine_and_layout_hash_alike(upstream: Any, layout: EngramLayout, config: dict[str, Any]) -> None:
    """Read-ahead hashes on the host what the engine's kernel hashes on the GPU."""
    theirs = upstream.EngramLayout(SimpleNamespace(**config))
    state = upstream.NgramHashState.__new__(upstream.NgramHashState)
    torch.nn.Module.__init__(state)
    state.layout, state.use_slot_cache, state._cache, state.pad_id, state.block_size = theirs, False, None, 5, 64
    token_map = torch.arange(400, dtype=torch.int32) % 300
    multipliers = upstream.compute_hash_multipliers(theirs.layer_ids, 4, 300)
    buffers = {"token_map": token_map, "offsets": theirs.offsets, "multipliers": multipliers}
    for name, value in {**buffers, "primes": torch.tensor(theirs.primes)}.items():
        state.register_buffer(name, value.cuda())
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 400, 500)).cuda()
    for begin, end in ((0, 200), (200, 500)):
        chunk = tokens[begin:end]
        before = torch.full((1, 3), -1, dtype=torch.int32, device="cuda")
        known = tokens[max(begin - 3, 0) : begin].flip(0).int()
        before[0, : len(known)] = known
        got = state(
            chunk,
            torch.arange(begin, end, device="cuda"),
            torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            torch.zeros(end - begin, dtype=torch.bool, device="cuda"),
            before,
            torch.zeros(1, 3, dtype=torch.bool, device="cuda"),
            None,
            None,
        ).cpu()
        ours = replace(layout, pad_token_id=5)
        for index, layer in enumerate(layout.layer_ids):
            rows = ours.hash_rows(layer, tokens.cpu().numpy() % 300)[begin:end]
            np.testing.assert_array_equal(got[:, index].numpy(), rows)


@NEEDS_GPU
def test_a_row_that_cannot_be_read_ends_the_process(directory: Path, tmp_path: Path) -> None:
    place = tmp_path / "pages-heads-tp1"
    place.mkdir()
    for file in (directory / place.name).iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", f"{here}::test_child_of_the_above"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(here.parent)],
        env={**os.environ, "SPARKWRIGHT_TEST_ENGRAM": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -6, done.stdout[-2000:] + done.stderr[-2000:]
    assert "engram-l1-r0of1.bin: found No data available, needed its rows; the engine ends" in done.stderr


@NEEDS_GPU
def test_child_of_the_above(make: Any, layout: EngramLayout) -> None:
    root = os.environ.get("SPARKWRIGHT_TEST_ENGRAM")
    if not root:
        pytest.skip("part of the test above, which runs it in a process of its own")
    table = make(root=Path(root))
    os.truncate(table.reader.path, 8192)
    lookup_chunk(table, random_ids(layout, 1, 64).numpy())
    torch.cuda.synchronize()
