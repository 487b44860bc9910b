"""Engine: batching, paging, stopping; a request's tokens are the same whatever runs beside it."""

from __future__ import annotations

import pytest
import torch

from polyop.llm import Engine, LlmError, Request, SamplingParams, load_model, load_tokenizer

PROMPTS = [[5], [9, 200, 17], list(range(40, 80)), [33, 4, 4, 251, 90, 12, 66], list(range(100, 117))]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def dense(tiny_folder):
    return load_model(tiny_folder), load_tokenizer(tiny_folder)


@pytest.fixture(scope="module")
def int4(tiny_int4_folder):
    return load_model(tiny_int4_folder), load_tokenizer(tiny_int4_folder)


@pytest.fixture(params=["dense", "int4"])
def either(request):
    return request.getfixturevalue(request.param)


def generate(loaded, prompts, params=GREEDY, **limits) -> list[Request]:
    engine = Engine(*loaded, **limits)
    requests = [engine.submit(ids, params) for ids in prompts]
    engine.run()
    assert engine.cache.num_free_blocks == engine.cache.num_pages
    return requests


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_ids for request in requests]


# ---- invariance ----------------------------------------------------------------------------------------------------


def logits_of_every_step(loaded, prompts, monkeypatch, **limits) -> list[list[torch.Tensor]]:
    """For each prompt the logits of each of its steps."""
    seen: dict[int, list[torch.Tensor]] = {}
    accept = Engine._accept

    def sample_and_keep(engine, request, token_id):
        seen.setdefault(request.request_id, []).append(kept.pop(0))
        accept(engine, request, token_id)

    kept: list[torch.Tensor] = []
    model = loaded[0]

    def logits(hidden):
        values = type(model).logits(model, hidden)
        kept.extend(row.clone() for row in values)
        return values

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", logits)
        patch.setattr(Engine, "_accept", sample_and_keep)
        generate(loaded, prompts, **limits)
    return [seen[i] for i in range(len(prompts))]


def assert_same_bits(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for prompt, (rows, wanted) in enumerate(zip(actual, expected, strict=True)):
        for step, (row, want) in enumerate(zip(rows, wanted, strict=True)):
            assert torch.equal(row, want), f"prompt {prompt}, step {step}: {(row - want).abs().max()}"


@pytest.mark.parametrize("backend", ["fused", "vanilla"])
@pytest.mark.parametrize("kind", ["tiny_folder", "tiny_int4_folder", "tiny_normed_folder"])
def test_batch_of_five_equals_five_singles_bit_for_bit(kind, backend, request, monkeypatch):
    folder = request.getfixturevalue(kind)
    loaded = load_model(folder, attn_backend=backend), load_tokenizer(folder)
    together = logits_of_every_step(loaded, PROMPTS, monkeypatch)
    alone = [logits_of_every_step(loaded, [ids], monkeypatch)[0] for ids in PROMPTS]
    assert_same_bits(together, alone)


def test_page_size_does_not_matter(either, monkeypatch):
    runs = [logits_of_every_step(either, PROMPTS, monkeypatch, page_size=size) for size in (1, 16, 128)]
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_budget_and_batch_limits_do_not_matter(either, monkeypatch):
    expected = logits_of_every_step(either, PROMPTS, monkeypatch, prefill_chunk=8)
    for limits in ({"max_batch": 2}, {"max_num_tokens": 15}, {"num_pages": 7}):
        assert_same_bits(logits_of_every_step(either, PROMPTS, monkeypatch, prefill_chunk=8, **limits), expected)


def test_chunks_change_the_result_by_rounding_only(either, monkeypatch):
    whole = logits_of_every_step(either, PROMPTS, monkeypatch)
    chunked = logits_of_every_step(either, PROMPTS, monkeypatch, prefill_chunk=7)
    for rows, wanted in zip(chunked, whole, strict=True):
        torch.testing.assert_close(rows[0], wanted[0], rtol=0, atol=1e-4)


def test_sampled_text_does_not_depend_on_neighbours(either):
    params = SamplingParams(max_new_tokens=20, temperature=1.5, top_k=40, top_p=0.95, seed=11, ignore_eos=True)
    together = outputs(generate(either, PROMPTS, params))
    assert together == [outputs(generate(either, [ids], params))[0] for ids in PROMPTS]
    assert together[0] != outputs(generate(either, PROMPTS[:1], SamplingParams(max_new_tokens=20)))[0]


# ---- scheduling ----------------------------------------------------------------------------------------------------


def test_step_mixes_prompts_and_generation(dense):
    engine = Engine(*dense, max_batch=2, prefill_chunk=16)
    first = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3, ignore_eos=True))
    second = engine.submit(list(range(20)), SamplingParams(max_new_tokens=2, ignore_eos=True))
    third = engine.submit([7], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert engine.step() == [] and (len(first.output_ids), len(second.output_ids)) == (1, 0)
    assert engine.step() == [] and (len(first.output_ids), len(second.output_ids)) == (2, 1)
    assert engine.step() == [first, second] and third.output_ids == []
    assert engine.step() == [third]
    assert not engine.has_work() and engine.step() == []
    assert [request.finish_reason for request in (first, second, third)] == ["length"] * 3


def test_statistics_count_tokens(dense):
    engine = Engine(*dense)
    for ids in PROMPTS:
        engine.submit(ids, GREEDY)
    engine.run()
    statistics = engine.statistics
    assert statistics.prefill_tokens == sum(map(len, PROMPTS))
    assert statistics.generated_tokens == 5 * 12 and statistics.decode_tokens == 5 * 11
    assert statistics.weight_bytes == dense[0].weight_bytes and statistics.kv_bytes == engine.cache.total_bytes
    assert statistics.to_dict()["peak_memory_bytes"] > 2**20
    assert "tokens/s" in statistics.to_text()


def test_waiting_request_gets_the_pages_of_a_finished_one(dense):
    # Each needs 3 pages of 4 tokens (1 + 11 cached); there are 3.
    requests = generate(dense, [[5], [6]], page_size=4, num_pages=3)
    assert [len(request.output_ids) for request in requests] == [12, 12]


def test_context_ends_the_output(dense):
    (request,) = generate(dense, [list(range(30))], SamplingParams(max_new_tokens=100, ignore_eos=True), max_seq_len=32)
    assert len(request.output_ids) == 3 and request.finish_reason == "length"


def test_a_prompt_may_fill_the_context(dense):
    (request,) = generate(dense, [list(range(32))], max_seq_len=32)
    assert len(request.output_ids) == 1


# ---- ends ----------------------------------------------------------------------------------------------------------


def with_next_tokens(loaded, monkeypatch, token_ids: list[int]) -> None:
    """Makes the model continue every prompt with these tokens."""
    queue = iter(token_ids)

    def logits(hidden):
        out = torch.zeros(hidden.shape[0], loaded[0].config.vocab_size)
        out[:, next(queue)] = 1.0
        return out

    monkeypatch.setattr(loaded[0], "logits", logits)


def test_end_of_sequence_token_ends_the_output_and_leaves_no_text(dense, monkeypatch):
    ids = dense[1].encode("ab")
    with_next_tokens(dense, monkeypatch, [*ids, 258, *ids])
    (request,) = generate(dense, [[1]], SamplingParams(max_new_tokens=9))
    assert (request.text, request.finish_reason, request.output_ids) == ("ab", "eos", [*ids, 258])


def test_stop_string_ends_the_output(dense, monkeypatch):
    with_next_tokens(dense, monkeypatch, dense[1].encode("one;;two"))
    pieces = []
    engine = Engine(*dense)
    request = engine.submit([1], SamplingParams(max_new_tokens=99, stop=(";;",)), pieces.append)
    engine.run()
    assert (request.text, request.finish_reason) == ("one", "stop")
    assert pieces == ["o", "n", "e"]


def test_held_back_text_is_given_out_at_the_end(dense, monkeypatch):
    with_next_tokens(dense, monkeypatch, dense[1].encode("one;"))
    pieces = []
    engine = Engine(*dense)
    engine.submit([1], SamplingParams(max_new_tokens=4, stop=(";;",)), pieces.append)
    engine.run()
    assert pieces == ["o", "n", "e", ";"]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "ids", "text"),
    [
        ({}, [], "prompt 0 is empty"),
        ({}, [260], "prompt 0 holds token 260; the vocabulary of the model has 260"),
        ({"max_seq_len": 4}, [1] * 5, "prompt 0 has 5 tokens; the context holds 4"),
        ({"page_size": 4, "num_pages": 2}, [1], "no free page: prompt 0 needs 3 pages of 4 tokens; the KV cache has 2"),
    ],
)
def test_request_that_cannot_run_is_refused(dense, limits, ids, text):
    engine = Engine(*dense, **limits)
    with pytest.raises(LlmError, match=text):
        engine.submit(ids, GREEDY)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_batch": 0}, "max_batch is 0; wanted at least 1"),
        ({"page_size": 0}, "page_size is 0; wanted at least 1"),
        ({"num_pages": 0}, "num_pages is 0; wanted at least 1"),
        ({"max_batch": 4, "prefill_chunk": 16, "max_num_tokens": 18}, "max_num_tokens is 18; wanted at least 19"),
    ],
)
def test_limits_that_do_not_fit_are_refused(dense, limits, text):
    with pytest.raises(LlmError, match=text):
        Engine(*dense, **limits)
