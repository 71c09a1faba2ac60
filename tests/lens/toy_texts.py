"""A BERT of a few words, for tests that need a model and a tokenizer but no meaning."""

from __future__ import annotations

import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers, processors
from tokenizers.models import WordPiece

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "<script>"),
]


def toy_tokenizer():
    core = tokenizers.Tokenizer(WordPiece({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def toy_model(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{
            "vocab_size": len(WORDS),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 24,
            **options,
        }
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def toy_sentences(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[4 + int(i)] for i in torch.randint(0, 9, (n,), generator=generator))
        for n in lengths
    ]


def toy_folder(path):
    toy_model().save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    return path
