"""Tokenizer: encoding, chat template, streamed text."""

import pytest

from polyop.llm import LlmError, load_tokenizer
from polyop.llm.tokenizer import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return load_tokenizer(tiny_folder)


def test_text_survives_the_round_trip(tokenizer):
    text = "Grüße, 世界 🙂\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_is_rendered_and_its_special_tokens_are_single_ids(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<|start|>system\nbe brief<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.encode_chat(messages)
    assert ids.count(257) == 3 and ids.count(258) == 2
    assert len(ids) == len(text) - 3 * (len("<|start|>") - 1) - 2 * (len("<|end|>") - 1)


def test_chat_template_may_refuse(tokenizer):
    refusing = Tokenizer(tokenizer.backend, "{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(LlmError, match="chat template: roles must alternate"):
        refusing.render_chat([{"role": "user", "content": "hi"}])


def test_chat_template_cannot_reach_python(tokenizer):
    hostile = Tokenizer(tokenizer.backend, "{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(LlmError, match="chat template"):
        hostile.render_chat([])


def test_missing_chat_template_is_named(tokenizer):
    with pytest.raises(LlmError, match="no chat template"):
        Tokenizer(tokenizer.backend, None, {}).encode_chat([])


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens == tokenizer.special_tokens
    assert again.encode("<|start|>abc") == tokenizer.encode("<|start|>abc")


def stream(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> list[str]:
    text_stream = TextStream(tokenizer.decode, stop)
    pieces = [text_stream.push(token_id) for token_id in tokenizer.encode(text)]
    pieces.append(text_stream.finish())
    assert "".join(pieces) == text_stream.text
    return pieces


def test_stream_holds_unfinished_characters_back(tokenizer):
    pieces = stream(tokenizer, "aé🙂b")
    assert pieces == ["a", "", "é", "", "", "", "🙂", "b", ""]


def test_stream_cuts_at_the_stop_string_and_holds_its_beginning_back(tokenizer):
    assert stream(tokenizer, "ab##c", ("##",)) == ["a", "b", "", "", "", ""]
    assert stream(tokenizer, "ab#cd", ("##",)) == ["a", "b", "", "#c", "d", ""]
    assert stream(tokenizer, "ab#", ("##",)) == ["a", "b", "", "#"]


def test_stream_stops_at_the_earliest_of_several_stop_strings(tokenizer):
    assert "".join(stream(tokenizer, "one two three", ("three", " tw"))) == "one"


def test_damaged_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LlmError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(tmp_path)
